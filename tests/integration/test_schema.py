"""The schema: what it takes, what it refuses and how it says so, and who may do what."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from gateway.embedded import EmbeddedPostgres
from outbox import names
from outbox.migrations import check, migrate

VECTORS = json.loads((Path(__file__).parents[1] / "unit" / "sharding_vectors.json").read_text())
SECRET = "s3cret"
PAYLOAD = json.dumps(SECRET)

Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def connection(migrated: str) -> Iterator[Connection]:
    with psycopg.connect(migrated, autocommit=True) as connection:
        yield connection


def insert(connection: Connection, **columns: object) -> None:
    connection.execute(
        sql.SQL("INSERT INTO tidegate.outbox ({}) VALUES ({})").format(
            sql.SQL(", ").join(map(sql.Identifier, columns)),
            sql.SQL(", ").join(map(sql.Placeholder, columns)),
        ),
        columns,
    )


def rows(connection: Connection, columns: str = "*") -> list[tuple[Any, ...]]:
    return connection.execute(
        f"SELECT {columns} FROM tidegate.outbox ORDER BY id".encode()
    ).fetchall()


REJECTED: list[tuple[dict[str, object], str]] = [
    ({"room": "r", "tenant": None}, "the tenant is null: give its name, or leave the column out"),
    ({"room": "r", "tenant": "t" * 65}, "tenant name has 65 characters, the limit is 64"),
    (
        {"room": "r", "tenant": "a:b"},
        'tenant name "a:b" is not allowed: a letter or digit, then letters, digits and any of '
        "_ . -",
    ),
    ({"tenant": "t"}, "the room is null: give its name"),
    ({"room": "r" * 240}, "room name has 240 characters, the limit is 200"),
    (
        {"room": "a\nb"},
        r'room name "a\nb" is not allowed: a letter or digit, then letters, digits and any of '
        "_ . : , / @ # = + ~ ! | -",
    ),
    (
        {"room": "r", "payload": f'"{"x" * 1_299_992}{SECRET}"'},
        "payload has 1300000 bytes, the limit is 1048576",
    ),
    ({"room": "r", "payload_bin": b"x"}, "give payload or payload_bin, not both"),
    (
        {"room": "r", "payload": None},
        "there is no payload: give payload or payload_bin",
    ),
    (
        {"room": "r", "payload": None, "payload_bin": SECRET.encode() * 200_000},
        "payload has 1200000 bytes, the limit is 1048576",
    ),
    ({"room": "r", "tags": "[]"}, "tags must be a JSON object of strings, not of type array"),
    ({"room": "r", "tags": "null"}, "tags must be a JSON object of strings, not of type null"),
    (
        {"room": "r", "tags": '{"a": 1}'},
        "tags must be strings: a value of another type is among them",
    ),
    (
        {"room": "r", "tags": '{"a": []}'},
        "tags must be strings: a value of another type is among them",
    ),
    (
        {"room": "r", "tags": json.dumps({"a": "x" * 4_088})},
        "tags have 4097 bytes, the limit is 4096",
    ),
    (
        {"room": "r", "tags": '{"txid": "1"}'},
        'the tag "txid" is reserved: every message carries it',
    ),
    ({"room": "r", "txid": None}, "txid and created_at are set by the table: leave them out"),
    ({"room": "r", "created_at": None}, "txid and created_at are set by the table: leave them out"),
]


@pytest.mark.parametrize(("columns", "message"), REJECTED)
def test_rejected(
    connection: Connection,
    postgres: EmbeddedPostgres,
    columns: dict[str, object],
    message: str,
) -> None:
    """In one line, without the payload: neither in the error nor in the server's log."""
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        insert(connection, **{"payload": PAYLOAD, **columns})
    assert caught.value.diag.message_primary == message
    assert caught.value.diag.message_detail is None
    assert SECRET not in str(caught.value)
    assert SECRET not in postgres.log.read_text()
    assert rows(connection) == []


def test_an_insert_has_next_to_nothing_to_parse(connection: Connection) -> None:
    """Postgres parses, plans and compiles this text in each INSERT statement.

    As CHECKs and generated columns (25 KB) it cost six times what the insert itself does. Left are
    the defaults of tenant, txid and created_at.
    """
    row = connection.execute("""
        SELECT (SELECT coalesce(sum(length(conbin::text)), 0) FROM pg_constraint
                WHERE conrelid = 'tidegate.outbox'::regclass)
             + (SELECT coalesce(sum(length(adbin::text)), 0) FROM pg_attrdef
                WHERE adrelid = 'tidegate.outbox'::regclass)
             + (SELECT coalesce(sum(length(tgqual::text)), 0) FROM pg_trigger
                WHERE tgrelid = 'tidegate.outbox'::regclass)
    """).fetchone()
    assert row is not None
    assert 0 < row[0] < 1_000
    row = connection.execute(
        "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'tidegate.outbox'::regclass "
        "AND tgenabled <> 'D' AND tgtype & 4 <> 0"
    ).fetchone()
    assert row == (1,)


def copy_in(connection: Connection, *row: str) -> None:
    with connection.cursor().copy("COPY tidegate.outbox (room, payload) FROM STDIN") as copy:
        copy.write_row(row)


@pytest.mark.parametrize("doorbell", [True, False])
def test_every_way_in_is_checked(connection: Connection, doorbell: bool) -> None:
    connection.execute("SELECT tidegate.set_doorbell(%s)", [doorbell])
    connection.execute("SET session_replication_role = replica")
    insert(connection, room="r", payload="1")
    with pytest.raises(psycopg.errors.CheckViolation, match="room name"):
        insert(connection, room="a b", payload="1")
    copy_in(connection, "s", "123")
    with pytest.raises(psycopg.errors.CheckViolation, match="room name"):
        copy_in(connection, "a b", "123")
    assert rows(connection, "room, shard = tidegate.shard_of(tenant, room), size_bytes") == [
        ("r", True, 1),
        ("s", True, 3),
    ]


def test_sizes_at_the_limit(connection: Connection) -> None:
    limit = names.PAYLOAD_MAX_BYTES
    insert(connection, room="r" * 200, tenant="t" * 64, payload=f'"{"x" * (limit - 2)}"')
    insert(connection, room="r", payload_bin=bytes(limit), tags=json.dumps({"a": "x" * 4_087}))
    # Bytes count, not characters.
    insert(connection, room="r", payload=f'"{"é" * (limit // 2 - 1)}"')
    with pytest.raises(psycopg.errors.CheckViolation, match="payload has 1048578 bytes"):
        insert(connection, room="r", payload=f'"{"é" * (limit // 2)}"')
    assert [size for (size,) in rows(connection, "size_bytes")] == [limit, limit, limit]


def test_limits_are_those_of_the_code() -> None:
    assert (names.TENANT_MAX_CHARS, names.ROOM_MAX_CHARS) == (64, 200)
    assert (names.PAYLOAD_MAX_BYTES, names.TAGS_MAX_BYTES) == (1_048_576, 4_096)


NAME = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5),
    st.text("aZ09_.-:,/@#=+~!|", max_size=12),
    st.text("a", min_size=60, max_size=70),
    st.text("a:", min_size=196, max_size=204),
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tenant=NAME, room=NAME)
def test_names_are_those_of_the_code(connection: Connection, tenant: str, room: str) -> None:
    expected = names.room_error(room) or names.tenant_error(tenant)
    try:
        insert(connection, tenant=tenant, room=room, payload="1")
    except psycopg.errors.CheckViolation as error:
        assert expected is not None
        said = error.diag.message_primary or ""
        # They quote the name each in its own way.
        noun, _, rest = expected.partition(" name ")
        assert said.startswith(f"{noun} name ")
        assert said.endswith(rest.rpartition(" is not allowed: ")[2])
    else:
        assert expected is None


@pytest.mark.parametrize(
    "payload",
    [
        "{}",
        "null",
        '""',
        ' {"a" :\t1,\r\n "a": 2} ',
        r'"\ud800"',
        r'"\u0000"',
        "1e400",
        "9223372036854775808",
        "-0",
        "[" * 5_000 + "]" * 5_000,
        '"\u2028 é 😀"',
    ],
)
def test_json_is_kept_as_it_is(connection: Connection, payload: str) -> None:
    insert(connection, room="r", payload=payload)
    assert rows(connection, "payload::text") == [(payload,)]


@pytest.mark.parametrize("payload", ["", "{", "NaN", "{'a': 1}", '"a', "1 2", '"\n"'])
def test_what_is_not_json_is_refused(connection: Connection, payload: str) -> None:
    with pytest.raises(psycopg.errors.InvalidTextRepresentation):
        insert(connection, room="r", payload=payload)


def test_publish_takes_json_in_any_form_and_bytes(connection: Connection) -> None:
    calls = [
        "SELECT tidegate.publish('acme', 'orders:42', '{\"a\": 1}')",
        "SELECT tidegate.publish('acme', 'orders:42', '{\"a\": 1}'::text)",
        "SELECT tidegate.publish('acme', 'orders:42', '{\"a\": 1}'::json)",
        "SELECT tidegate.publish('acme', 'orders:42', '{\"a\": 1}'::jsonb)",
        "SELECT tidegate.publish('acme', 'orders:42', jsonb_build_object('a', 1))",
        "SELECT tidegate.publish('acme', 'orders:42', row_to_json(x)) FROM (SELECT 1 AS a) x",
        "SELECT tidegate.publish('acme', 'orders:42', '\\x00ff'::bytea)",
        "SELECT tidegate.publish(tenant => 'acme', room => 'orders:42', payload => '1', "
        'tags => \'{"k": "v"}\')',
    ]
    txids = []
    for call in calls:
        row = connection.execute(call.encode()).fetchone()
        txids.append(row[0] if row else None)
    assert rows(connection, "tenant, room, payload::text, payload_bin, tags") == [
        *[("acme", "orders:42", '{"a": 1}', None, None)] * 5,
        ("acme", "orders:42", '{"a":1}', None, None),
        ("acme", "orders:42", None, b"\0\xff", None),
        ("acme", "orders:42", "1", None, {"k": "v"}),
    ]
    assert [txid for (txid,) in rows(connection, "txid")] == txids


def test_publish_gives_the_transaction_of_the_business_write(connection: Connection) -> None:
    with connection.transaction():
        row = connection.execute("SELECT pg_current_xact_id()").fetchone()
        with connection.transaction():  # a savepoint has an id of its own, which is not meant
            assert row == connection.execute("SELECT tidegate.publish('t', 'r', '1')").fetchone()
    assert rows(connection, "txid") == [row]


def test_a_message_cannot_be_changed(connection: Connection) -> None:
    insert(connection, room="r", payload="1")
    with pytest.raises(psycopg.errors.CheckViolation, match="a message cannot be changed"):
        connection.execute("UPDATE tidegate.outbox SET room = 'x'")


@pytest.mark.parametrize(
    ("shards", "spread"), sorted({(v["shards"], v["spread"]) for v in VECTORS})
)
def test_the_shard_is_that_of_the_code(database: str, shards: int, spread: int) -> None:
    migrate(database, shards, spread)
    wanted = [v for v in VECTORS if (v["shards"], v["spread"]) == (shards, spread)]
    with psycopg.connect(database, autocommit=True) as connection:
        for vector in wanted:
            insert(connection, tenant=vector["tenant"], room=vector["room"], payload="1")
        found = rows(connection, "shard, tidegate.shard_of(tenant, room)")
        heads = connection.execute("SELECT id, head FROM tidegate.shard ORDER BY id").fetchall()
    assert found == [(vector["shard"], vector["shard"]) for vector in wanted]
    assert heads == [(shard, 0) for shard in range(shards)]


@pytest.fixture
def role(connection: Connection) -> Iterator[str]:
    name = f"role_{connection.info.backend_pid}"
    connection.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
    yield name
    connection.execute("RESET ROLE")
    connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
    connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def become(connection: Connection, role: str, *functions: str) -> None:
    for function in functions:
        connection.execute(
            sql.SQL("SELECT tidegate.{}({})").format(sql.Identifier(function), sql.Literal(role))
        )
    connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))


def refused(connection: Connection, statement: str) -> bool:
    try:
        connection.execute(statement.encode())
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.GeneratedAlways):
        return True
    return False


def test_without_a_grant_nothing_is_allowed(connection: Connection, role: str) -> None:
    become(connection, role)
    assert refused(connection, "SELECT tidegate.publish('t', 'r', '1')")
    assert refused(connection, "INSERT INTO tidegate.outbox (room, payload) VALUES ('r', '1')")
    assert refused(connection, "SELECT * FROM tidegate.meta")


def test_a_publisher_may_only_publish(connection: Connection, role: str) -> None:
    become(connection, role, "allow_publish")
    connection.execute("SELECT tidegate.publish('t', 'r', '1')")
    connection.execute("SELECT tidegate.publish('t', 'r', 'x'::bytea)")
    connection.execute("INSERT INTO tidegate.outbox (room, payload, tags) VALUES ('r', '1', '{}')")
    with pytest.raises(psycopg.errors.CheckViolation, match="is not allowed"):
        connection.execute("SELECT tidegate.publish('t', 'a b', '1')")
    for column, value in [
        ("id", "1"),
        ("txid", "'1'"),
        ("created_at", "now()"),
        ("shard", "1"),
        ("size_bytes", "1"),
    ]:
        assert refused(
            connection,
            f"INSERT INTO tidegate.outbox (room, payload, {column}) "
            f"OVERRIDING SYSTEM VALUE VALUES ('r', '1', {value})",
        ), column
    for statement in [
        "SELECT id FROM tidegate.outbox",
        "INSERT INTO tidegate.outbox (room, payload) VALUES ('r', '1') RETURNING txid",
        "UPDATE tidegate.outbox SET room = 'x'",
        "DELETE FROM tidegate.outbox",
        "TRUNCATE tidegate.outbox",
        "SELECT * FROM tidegate.message",
        "SELECT * FROM tidegate.room",
        "SELECT * FROM tidegate.meta",
        "UPDATE tidegate.shard SET head = 0",
        "SELECT tidegate.make_partitions(1)",
        "SELECT tidegate.drop_oldest_partition(1)",
        "SELECT tidegate.set_doorbell(false)",
        "CREATE TABLE tidegate.x ()",
    ]:
        assert refused(connection, statement), statement


def test_a_publisher_cannot_change_what_is_checked(connection: Connection, role: str) -> None:
    """Not by functions and operators of its own that its search_path finds first."""
    become(connection, role, "allow_publish")
    connection.execute("RESET ROLE")
    owner = sql.Identifier(role)
    connection.execute(sql.SQL("CREATE SCHEMA own AUTHORIZATION {}").format(owner))
    connection.execute(sql.SQL("SET ROLE {}").format(owner))
    connection.execute("""
        CREATE FUNCTION own.octet_length(text) RETURNS int IMMUTABLE RETURN 1;
        CREATE FUNCTION own.octet_length(bytea) RETURNS int IMMUTABLE RETURN 1;
        CREATE FUNCTION own.md5(text) RETURNS text IMMUTABLE RETURN repeat('0', 32);
        CREATE FUNCTION own.yes(text, text) RETURNS boolean IMMUTABLE RETURN true;
        CREATE FUNCTION own.yes(int, int) RETURNS boolean IMMUTABLE RETURN true;
        CREATE OPERATOR own.~ (FUNCTION = own.yes, LEFTARG = text, RIGHTARG = text);
        CREATE OPERATOR own.<= (FUNCTION = own.yes, LEFTARG = int, RIGHTARG = int);
        CREATE FUNCTION own.pg_notify(text, text) RETURNS void RETURN NULL;
        CREATE DOMAIN own.text AS pg_catalog.varchar;
        SET search_path = own, pg_catalog
    """)
    insert(connection, room="orders:42", payload="12345")
    for columns, message in REJECTED:
        if columns.keys() & {"txid", "created_at"}:
            continue
        with pytest.raises(psycopg.errors.CheckViolation) as caught:
            insert(connection, **{"payload": PAYLOAD, **columns})
        assert caught.value.diag.message_primary == message
    connection.execute("RESET ROLE; RESET search_path")
    assert rows(connection, "shard = tidegate.shard_of(tenant, room), size_bytes") == [(True, 5)]


def test_a_gateway_may_publish_and_read_the_log(connection: Connection, role: str) -> None:
    become(connection, role, "allow_gateway")
    connection.execute("SELECT tidegate.publish('t', 'r', '1')")
    for table in ["message", "room", "shard", "meta", "migration"]:
        connection.execute(f"SELECT * FROM tidegate.{table}".encode())
    for statement in [
        "SELECT * FROM tidegate.outbox",
        "DELETE FROM tidegate.message",
        "UPDATE tidegate.shard SET head = 0",
        "UPDATE tidegate.meta SET epoch = ''",
    ]:
        assert refused(connection, statement), statement


def test_a_relay_may_not_publish_or_change_the_log(connection: Connection, role: str) -> None:
    become(connection, role, "allow_relay")
    for statement in [
        "INSERT INTO tidegate.outbox (room, payload) VALUES ('r', '1')",
        "DELETE FROM tidegate.message",
        "UPDATE tidegate.message SET seq = 1",
        "DELETE FROM tidegate.room",
        "UPDATE tidegate.meta SET shards = 1",
        "DROP TABLE tidegate.message",
        "SELECT tidegate.set_doorbell(false)",
    ]:
        assert refused(connection, statement), statement


def test_two_phase_commit_needs_the_doorbell_off() -> None:
    with EmbeddedPostgres(settings={"max_prepared_transactions": "2"}) as server:
        migrate(server.dsn())
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            row = connection.execute(
                "SELECT tgenabled::text FROM pg_trigger WHERE tgname = 'doorbell'"
            ).fetchone()
            assert row == ("D",)
            assert check(server.dsn()) == []
            # As if a relay slept: the bell would ring.
            with psycopg.connect(server.dsn(), autocommit=True) as relay:
                relay.execute("SELECT pg_advisory_lock(1414087749, shard.id) FROM tidegate.shard")
                connection.execute("BEGIN")
                connection.execute("SELECT tidegate.publish('t', 'r', '1')")
                connection.execute("PREPARE TRANSACTION 'one'")
                connection.execute("COMMIT PREPARED 'one'")
