"""Publishing with psycopg against a real Postgres."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import rows

from publisher import (
    InvalidMessage,
    Message,
    RawJSON,
    Rejected,
    publish,
    publish_async,
    publish_many,
    publish_many_async,
    statement,
)

MIB = 1_048_576
Conn = psycopg.Connection[rows.TupleRow]
AsyncConn = psycopg.AsyncConnection[rows.TupleRow]


@pytest.fixture
def conn(migrated: str) -> Iterator[Conn]:
    with psycopg.connect(migrated) as connection:
        yield connection


@pytest.fixture
def other(migrated: str) -> Iterator[Conn]:
    """A second connection: it sees what is committed."""
    with psycopg.connect(migrated, autocommit=True) as connection:
        yield connection


@pytest.fixture
async def aconn(migrated: str) -> AsyncIterator[AsyncConn]:
    async with await psycopg.AsyncConnection.connect(migrated) as connection:
        yield connection


def published(conn: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    """(tenant, room, payload text, payload_bin, tags, txid) in the order of ids."""
    return (
        psycopg.Cursor(conn, row_factory=rows.tuple_row)
        .execute(
            "SELECT tenant, room, payload::text, payload_bin, tags, txid::text "
            "FROM tidegate.outbox ORDER BY id"
        )
        .fetchall()
    )


def payloads(conn: psycopg.Connection[Any]) -> list[Any]:
    return [row[2] for row in published(conn)]


def test_the_message_is_there_when_the_transaction_has_committed(conn: Conn, other: Conn) -> None:
    txid = publish(conn, "orders:42", {"status": "paid"}, tenant="acme", tags={"kind": "order"})
    assert published(other) == []
    conn.commit()
    assert published(other) == [
        ("acme", "orders:42", '{"status":"paid"}', None, {"kind": "order"}, txid)
    ]


def test_the_transaction_id_is_that_of_the_whole_transaction(conn: Conn) -> None:
    first = publish(conn, "orders:42", 1)
    with conn.transaction():
        second = publish(conn, "orders:43", 2)
        third = publish_many(conn, [Message("orders:43", 3)])
    current = conn.execute("SELECT pg_current_xact_id()::text").fetchone()
    assert current == (first,)
    assert first == second == third
    assert first.isdecimal()


def test_a_rolled_back_transaction_publishes_nothing(conn: Conn, other: Conn) -> None:
    publish(conn, "orders:42", 1)
    publish_many(conn, [Message("orders:42", 2)])
    conn.rollback()
    assert published(other) == []


def test_a_savepoint_takes_back_its_own_messages_only(conn: Conn, other: Conn) -> None:
    publish(conn, "room", 1)
    with conn.transaction():
        publish(conn, "room", 2)
        raise psycopg.Rollback
    publish(conn, "room", 3)
    conn.commit()
    assert payloads(other) == ["1", "3"]


def test_autocommit_publishes_at_once(migrated: str, other: Conn) -> None:
    with psycopg.connect(migrated, autocommit=True) as conn:
        publish(conn, "room", 1)
        assert payloads(other) == ["1"]
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_a_cursor_keeps_its_results(conn: Conn) -> None:
    cursor = conn.execute("SELECT generate_series(1, 3)")
    assert cursor.fetchone() == (1,)
    publish(cursor, "room", 1)
    assert cursor.fetchall() == [(2,), (3,)]
    with conn.cursor(name="server_side") as server_side:
        server_side.execute("SELECT generate_series(1, 3)")
        publish(server_side, "room", 2)
        assert server_side.fetchall() == [(1,), (2,), (3,)]
    assert payloads(conn) == ["1", "2"]


@pytest.mark.parametrize(
    "row_factory",
    [rows.dict_row, rows.namedtuple_row, rows.scalar_row, rows.kwargs_row(dict)],
    ids=["dict", "namedtuple", "scalar", "kwargs"],
)
def test_any_row_factory(migrated: str, row_factory: Any) -> None:
    with psycopg.connect(migrated, row_factory=row_factory) as conn:
        txid = publish(conn, "room", 1)
        assert publish(conn.cursor(), "room", 2) == txid
        assert publish_many(conn, [Message("room", 3)]) == txid
        assert [row[5] for row in published(conn)] == [txid] * 3


@pytest.mark.parametrize(
    "cursor_factory",
    [psycopg.ClientCursor, psycopg.RawCursor, psycopg.Cursor],
    ids=lambda factory: factory.__name__,
)
def test_any_cursor_class(migrated: str, cursor_factory: Any) -> None:
    tags = {"it's": "100 %s \\ é"}
    with psycopg.connect(migrated, cursor_factory=cursor_factory) as conn:
        txid = publish(conn, "room", {"it's": "%(x)s \\ é"}, tags=tags)
        publish(conn.cursor(), "room", b"\0'\\\xff")
        publish_many(conn, [Message("room", "'\"{},\\"), Message("room", b"\0", tags=tags)])
        assert [row[2:] for row in published(conn)] == [
            ('{"it\'s":"%(x)s \\\\ é"}', None, tags, txid),
            (None, b"\0'\\\xff", None, txid),
            ('"\'\\"{},\\\\"', None, None, txid),
            (None, b"\0", tags, txid),
        ]


def test_a_pipeline(conn: Conn, other: Conn) -> None:
    with conn.pipeline():
        conn.execute("CREATE TABLE orders (id int)")
        txid = publish(conn, "room", 1)
        conn.execute("INSERT INTO orders VALUES (1)")
        publish_many(conn, [Message("room", 2)])
        message = statement("room", 3)
        conn.execute(message.sql.encode(), message.params)
    conn.commit()
    assert [(row[2], row[5]) for row in published(other)] == [("1", txid), ("2", txid), ("3", txid)]


def test_an_earlier_error_in_a_pipeline_is_not_taken_for_a_refusal(conn: Conn) -> None:
    # Which of the two comes first depends on how much of the pipeline was sent by then.
    earlier = (psycopg.errors.InvalidTextRepresentation, psycopg.errors.PipelineAborted)

    def publish_after_an_error() -> None:
        with conn.pipeline():
            conn.execute("SELECT 'x'::int")
            publish(conn, "room", 1)

    with pytest.raises(earlier):
        publish_after_an_error()
    conn.rollback()
    with pytest.raises(Rejected, match="payload has 1048577 bytes"), conn.pipeline():
        publish(conn, "room", RawJSON(f'"{"a" * (MIB - 1)}"'))


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1", "UTF8"])
def test_client_encodings(migrated: str, encoding: str) -> None:
    with psycopg.connect(migrated, client_encoding=encoding) as conn:
        txid = publish(conn, "room", "é", tags={"a": "é"})
        conn.execute("SET client_encoding TO UTF8")
        assert published(conn)[0][2:] == ('"é"', None, {"a": "é"}, txid)


def test_a_client_encoding_that_cannot_carry_the_data(migrated: str) -> None:
    with psycopg.connect(migrated, client_encoding="LATIN1") as conn:
        with pytest.raises(InvalidMessage, match=r"client_encoding \(latin-1\) .* U\+1F30A"):
            publish(conn, "room", "🌊")
        publish(conn, "room", 1)
        assert payloads(conn) == ["1"]


@pytest.mark.parametrize(
    "text",
    [
        ' {\t"b" : 1.0,\r\n\n "a" :\n[ 1E400, "\\ud800\\u0000" ], "a": 2 }\n ',
        '"' + "🌊" * 1000 + '\u2028\x7f"',
        f"{2**63}",
        "[" * 2000 + "]" * 2000,
    ],
    ids=["white space", "unicode", "big number", "deep"],
)
def test_raw_json_is_kept_byte_for_byte(conn: Conn, text: str) -> None:
    publish(conn, "room", RawJSON(text))
    publish(conn, "room", RawJSON(text.encode()))
    publish_many(conn, [Message("room", RawJSON(text))])
    assert payloads(conn) == [text] * 3


@pytest.mark.parametrize(
    "data", [None, "", {}, "\0 \n \u2028 🌊 \ud7ff", {"ключ": [1.5, -0.0, 2**80, {"": None}]}]
)
def test_python_values_arrive(conn: Conn, data: Any) -> None:
    publish(conn, "room", data)
    publish_many(conn, [Message("room", data)])
    assert [json.loads(text) for text in payloads(conn)] == [data, data]


def test_many_keep_their_order_and_their_kinds(conn: Conn) -> None:
    kinds: list[Any] = [{"n": 1}, b"\0\xff", RawJSON("[ 1 ]"), None, "{},\"'\\", b""]
    messages = [
        Message(f"room:{index % 7}", kinds[index % 6], f"t{index % 3}", {"n": str(index)})
        for index in range(5000)
    ]
    txid = publish_many(conn, iter(messages))
    stored = published(conn)
    texts = ['{"n":1}', None, "[ 1 ]", "null", '"{},\\"\'\\\\"', None]
    assert [row[4]["n"] for row in stored] == [str(index) for index in range(5000)]
    assert stored == [
        (
            message.tenant,
            message.room,
            texts[index % 6],
            kinds[index % 6] if texts[index % 6] is None else None,
            message.tags,
            txid,
        )
        for index, message in enumerate(messages)
    ]


def test_none_at_all(conn: Conn) -> None:
    txid = publish_many(conn, [])
    assert publish_many(conn, iter(())) == txid
    assert published(conn) == []
    assert publish(conn, "room", 1) == txid


@pytest.mark.parametrize("size_bytes", [MIB, MIB + 1])
@pytest.mark.parametrize("kind", ["binary", "text", "multibyte", "raw"])
def test_the_limit_is_one_mebibyte(conn: Conn, kind: str, size_bytes: int) -> None:
    data: Any
    match kind:
        case "binary":
            data = bytes(size_bytes)
        case "text":
            data = "a" * (size_bytes - 2)
        case "multibyte":
            data = "é" * (MIB // 2 - 1) + "a" * (size_bytes - MIB)
        case _:
            data = RawJSON(f"1{' ' * (size_bytes - 1)}")
    if size_bytes <= MIB:
        publish(conn, "room", data)
        assert len(published(conn)) == 1
        return
    with pytest.raises(Rejected) as caught:
        publish(conn, "room", data)
    assert str(caught.value) == "payload has 1048577 bytes, the limit is 1048576"


REFUSALS = [
    (Message("", 1), 'room name "" is not allowed: a letter or digit'),
    (Message("a b", 1), 'room name "a b" is not allowed'),
    (Message("заказы", 1), 'room name "заказы" is not allowed'),
    (Message("room\n", 1), 'room name "room\\n" is not allowed'),
    (Message("r" * 201, 1), "room name has 201 characters, the limit is 200"),
    (Message("room", 1, ""), 'tenant name "" is not allowed'),
    (Message("room", 1, "a:b"), 'tenant name "a:b" is not allowed'),
    (Message("room", 1, "t" * 65), "tenant name has 65 characters, the limit is 64"),
    (Message("room", 1, tags={"txid": "1"}), 'the tag "txid" is reserved'),
    (Message("room", 1, tags={"a": "é" * 3000}), "tags have 6009 bytes, the limit is 4096"),
    (Message("room", RawJSON("")), "payload is not valid JSON, error in line 1"),
    (Message("room", RawJSON('{\n"a":\nsecret}')), "payload is not valid JSON, error in line 3"),
    (Message("room", RawJSON("NaN")), "payload is not valid JSON, error in line 1"),
    (Message("room", RawJSON("\ufeff1")), "payload is not valid JSON, error in line 1"),
    (
        Message("room", RawJSON("[" * 500_000 + "]" * 500_000)),
        "payload is nested too deep for the server's max_stack_depth",
    ),
]


@pytest.mark.parametrize(("message", "text"), REFUSALS, ids=[text for _, text in REFUSALS])
def test_what_the_database_refuses(
    conn: Conn, message: Message, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(Rejected) as caught, conn.transaction():
        publish(conn, message.room, message.data, tenant=message.tenant, tags=message.tags)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value.__cause__) + caplog.text
    with pytest.raises(Rejected) as caught, conn.transaction():
        publish_many(conn, [Message("room", 1), message])
    assert str(caught.value).startswith(text)
    # The savepoint was rolled back: the transaction goes on.
    publish(conn, "room", 2)
    assert payloads(conn) == ["2"]


def test_a_refusal_carries_the_sqlstate_and_the_cause(conn: Conn) -> None:
    with pytest.raises(Rejected) as caught:
        publish(conn, "a b", 1)
    assert caught.value.sqlstate == "23514"
    assert isinstance(caught.value.__cause__, psycopg.errors.CheckViolation)
    assert isinstance(caught.value, ValueError)
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INERROR


def test_what_cannot_be_sent_leaves_the_transaction_usable(conn: Conn, other: Conn) -> None:
    publish(conn, "room", 1)
    with pytest.raises(InvalidMessage):
        publish(conn, "room", {"x": float("nan")})
    with pytest.raises(InvalidMessage, match=r"^message 1: "):
        publish_many(conn, [Message("room", 2), Message("room\0", 3)])
    publish(conn, "room", 4)
    conn.commit()
    assert payloads(other) == ["1", "4"]


def test_other_errors_are_the_drivers(conn: Conn, database: str) -> None:
    with psycopg.connect(database) as empty, pytest.raises(psycopg.errors.UndefinedTable):
        publish(empty, "room", 1)
    conn.execute("SET TRANSACTION READ ONLY")
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        publish(conn, "room", 1)
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        publish(conn, "room", 1)
    conn.close()
    with pytest.raises(psycopg.OperationalError, match="closed"):
        publish(conn, "room", 1)


def test_the_publishing_role_suffices(conn: Conn, migrated: str) -> None:
    # Roles belong to the server, so this one is gone with the rollback.
    conn.execute("CREATE ROLE tidegate_test_publisher")
    conn.execute("SELECT tidegate.allow_publish('tidegate_test_publisher')")
    conn.execute("SET ROLE tidegate_test_publisher")
    txid = publish(conn, "room", 1)
    publish(conn, "room", b"2")
    publish_many(conn, [Message("room", 3)])
    message = statement("room", 4)
    joined = f"WITH {message.cte} SELECT txid FROM message"
    assert conn.execute(joined.encode(), message.params).fetchone() == (txid,)
    with pytest.raises(Rejected, match='room name "a b"'), conn.transaction():
        publish(conn, "a b", 5)
    with pytest.raises(psycopg.errors.InsufficientPrivilege), conn.transaction():
        published(conn)
    conn.execute("RESET ROLE")
    assert len(published(conn)) == 4
    conn.rollback()


def test_business_write_and_message_in_one_statement(conn: Conn, other: Conn) -> None:
    conn.execute("CREATE TABLE orders (id int PRIMARY KEY, status text)")
    conn.commit()
    insert = "INSERT INTO orders VALUES (%(id)s, 'new') RETURNING id, (SELECT txid FROM message)"
    message = statement("orders:1", {"status": "new"}, tenant="acme")
    query = f"WITH {message.cte} {insert}".encode()
    row = conn.execute(query, {**message.params, "id": 1}).fetchone()
    conn.commit()
    assert row is not None
    assert [row[:2] + row[5:] for row in published(other)] == [("acme", "orders:1", row[1])]
    with pytest.raises(psycopg.errors.UniqueViolation):
        conn.execute(query, {**message.params, "id": 1})
    conn.rollback()
    assert len(published(other)) == 1


def test_two_messages_in_one_statement(conn: Conn) -> None:
    first = statement("orders:1", 1, name="first")
    second = statement("orders:1", b"2", name="second")
    conn.execute(
        f"WITH {first.cte}, {second.cte} SELECT".encode(), {**first.params, **second.params}
    )
    assert len(published(conn)) == 2


def test_an_asynchronous_connection_is_told_apart(migrated: str) -> None:
    async def attempt() -> None:
        async with await psycopg.AsyncConnection.connect(migrated) as aconn:
            for target in (aconn, aconn.cursor()):
                with pytest.raises(TypeError, match="use publish_async"):
                    publish(target, "room", 1)  # type: ignore[arg-type]

    asyncio.run(attempt())


@pytest.mark.parametrize("target", [None, "postgresql://", 1])
async def test_what_is_no_connection(target: Any) -> None:
    with pytest.raises(TypeError, match=r"publish\(\) takes a psycopg or DB-API connection"):
        publish(target, "room", 1)
    with pytest.raises(TypeError, match=r"publish_async\(\) takes psycopg's AsyncConnection"):
        await publish_async(target, "room", 1)


async def test_async(aconn: AsyncConn, other: Conn) -> None:
    txid = await publish_async(aconn, "orders:42", {"a": 1}, tenant="acme", tags={"k": "v"})
    await publish_async(aconn.cursor(row_factory=rows.dict_row), "orders:42", b"\0")
    await publish_many_async(aconn, [Message("orders:42", 3), Message("orders:42", 4)])
    assert published(other) == []
    await aconn.commit()
    assert published(other) == [
        ("acme", "orders:42", '{"a":1}', None, {"k": "v"}, txid),
        ("default", "orders:42", None, b"\0", None, txid),
        ("default", "orders:42", "3", None, None, txid),
        ("default", "orders:42", "4", None, None, txid),
    ]


async def test_async_roll_back_and_refusal(aconn: AsyncConn, other: Conn) -> None:
    await publish_async(aconn, "room", 1)
    with pytest.raises(Rejected, match='room name "a b"'):
        await publish_async(aconn, "a b", 1)
    await aconn.rollback()
    with pytest.raises(InvalidMessage, match="data is inf"):
        await publish_async(aconn, "room", float("inf"))
    assert published(other) == []


async def test_async_pipeline_and_cursor_classes(migrated: str, other: Conn) -> None:
    for factory in (psycopg.AsyncClientCursor, psycopg.AsyncRawCursor):
        async with await psycopg.AsyncConnection.connect(
            migrated, autocommit=True, cursor_factory=factory
        ) as aconn:
            await publish_async(aconn, "room", "é")
            async with aconn.pipeline():
                await publish_many_async(aconn, [Message("room", 1)])
    assert payloads(other) == ['"é"', "1"] * 2


async def test_many_writers_at_once(migrated: str, other: Conn) -> None:
    async def write(writer: int) -> list[tuple[str, str]]:
        done = []
        async with await psycopg.AsyncConnection.connect(migrated) as aconn:
            for number in range(50):
                txid = await publish_async(aconn, f"room:{number % 3}", [writer, number])
                if number % 5 == writer % 5:
                    await aconn.rollback()
                else:
                    await aconn.commit()
                    done.append((f"[{writer},{number}]", txid))
        return done

    kept = [pair for done in await asyncio.gather(*map(write, range(8))) for pair in done]
    assert sorted((row[2], row[5]) for row in published(other)) == sorted(kept)
    assert len({txid for _, txid in kept}) == len(kept) == 8 * 40
