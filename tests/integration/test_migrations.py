"""Migrations against a real server."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psycopg
import pytest

from gateway.embedded import EmbeddedPostgres
from outbox import database as connections
from outbox import migrations as module
from outbox.errors import SchemaMismatch, UnsupportedServer
from outbox.layout import SCHEMA_VERSION, layout
from outbox.migrations import check, migrate, migrations

ALL = list(range(1, SCHEMA_VERSION + 1))


def test_an_empty_database_is_migrated_once(database: str) -> None:
    (problem,) = check(database)
    assert problem.endswith('has no schema "tidegate": run `tidegate migrate`')
    assert [migration.id for migration in migrate(database, 8, 2)] == ALL
    assert check(database) == []
    assert migrate(database) == []
    assert migrate(database, 8, 2) == []
    with psycopg.connect(database) as connection:
        rows = connection.execute("SELECT id, name, sha256 FROM tidegate.migration").fetchall()
    assert rows == [(m.id, m.name, m.sha256) for m in migrations()]


async def test_layout_is_what_the_database_says(database: str) -> None:
    async with await connections.connect(database) as connection:
        with pytest.raises(SchemaMismatch, match="has no schema"):
            await layout(connection)
        migrate(database, 8, 2)
        found = await layout(connection)
        assert (found.shards, found.spread, found.schema_version) == (8, 2, SCHEMA_VERSION)
        assert len(found.epoch) == 16
        assert found.doorbell
        await connection.execute("SELECT tidegate.set_doorbell(false)")
        assert not (await layout(connection)).doorbell


def test_defaults_fit_together(database: str) -> None:
    migrate(database, shards=2)
    with psycopg.connect(database) as connection:
        row = connection.execute("SELECT shards, spread FROM tidegate.meta").fetchone()
    assert row == (2, 2)


def test_each_database_has_its_own_epoch(postgres: EmbeddedPostgres, database: str) -> None:
    migrate(database)
    with psycopg.connect(database) as connection:
        connection.execute("ALTER SCHEMA tidegate RENAME TO old")
        connection.commit()
    migrate(database)
    with psycopg.connect(database) as connection:
        row = connection.execute("SELECT a.epoch, b.epoch FROM tidegate.meta a, old.meta b")
        first, second = row.fetchone() or ("", "")
    assert first != second


def test_several_at_once_do_it_once(database: str) -> None:
    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(lambda _: migrate(database), range(4)))
    assert sorted(migration.id for applied in done for migration in applied) == ALL
    assert check(database) == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"shards": 4}, "the database has shards = 16, asked for was 4"),
        ({"spread": 2}, "the database has spread = 4, asked for was 2"),
    ],
)
def test_another_layout_is_refused(migrated: str, asked: dict[str, int], message: str) -> None:
    with pytest.raises(SchemaMismatch, match=message):
        migrate(migrated, **asked)
    assert [problem.partition(":")[0] for problem in check(migrated, **asked)] == [message]


def test_an_impossible_layout_is_refused(database: str) -> None:
    with pytest.raises(SchemaMismatch, match="spread is 5"):
        migrate(database, 4, 5)
    assert len(check(database)) == 1


def test_changed_files_are_refused(migrated: str) -> None:
    with psycopg.connect(migrated) as connection:
        connection.execute("UPDATE tidegate.migration SET sha256 = repeat('0', 64)")
    with pytest.raises(SchemaMismatch, match="migration 0001_outbox was applied from another file"):
        migrate(migrated)
    assert "another file" in check(migrated)[0]


async def test_a_newer_schema_is_refused(migrated: str) -> None:
    with psycopg.connect(migrated) as connection:
        connection.execute("UPDATE tidegate.meta SET schema_version = 99, oldest_reader = 98")
    expected = (
        "the schema has version 99 and suits Tidegate from version 98 of it on, "
        f"this one knows {SCHEMA_VERSION}: upgrade Tidegate"
    )
    with pytest.raises(SchemaMismatch, match=expected):
        migrate(migrated)
    assert check(migrated) == [expected]
    async with await connections.connect(migrated) as connection:
        with pytest.raises(SchemaMismatch, match=expected):
            await layout(connection)


def test_a_newer_schema_that_suits_is_left_as_it_is(migrated: str) -> None:
    """An older Tidegate that is rolled back to finds nothing to do and nothing wrong."""
    with psycopg.connect(migrated) as connection:
        connection.execute("UPDATE tidegate.meta SET schema_version = 99")
    assert migrate(migrated) == []
    assert check(migrated) == []


def test_a_schema_that_could_be_newer_is_told(database: str) -> None:
    with psycopg.connect(database) as connection:
        connection.execute(migrations()[0].statement(8, 2).encode())
    (problem,) = check(database)
    assert problem.endswith(f"needed is {SCHEMA_VERSION}: run `tidegate migrate`")


def test_a_migration_gives_way_to_those_who_use_the_tables(database: str) -> None:
    """A long dump holds every table: others must not queue behind the migration meanwhile."""
    with psycopg.connect(database) as connection:
        connection.execute(migrations()[0].statement(8, 2).encode())
    with ThreadPoolExecutor(1) as threads, psycopg.connect(database) as dump:
        dump.execute("SELECT FROM tidegate.meta")
        migrating = threads.submit(migrate, database)
        with psycopg.connect(database, autocommit=True) as reader:
            reader.execute("SET statement_timeout = '2s'")
            gave_way = 0
            while gave_way < 2:
                row = reader.execute(
                    "SELECT count(*) FROM pg_locks WHERE NOT granted "
                    "AND relation = 'tidegate.meta'::regclass"
                ).fetchone()
                waits = row is not None and row[0] > 0
                reader.execute("SELECT FROM tidegate.meta")
                gave_way += waits
            assert not migrating.done()
        dump.rollback()
        assert [migration.id for migration in migrating.result(10)] == ALL[1:]


@pytest.mark.parametrize("rings", [True, False])
async def test_the_doorbell_stays_as_it_was(database: str, rings: bool) -> None:
    with psycopg.connect(database) as connection:
        connection.execute(migrations()[0].statement(8, 2).encode())
        connection.execute("SELECT tidegate.set_doorbell(%s)", [rings])
    migrate(database)
    assert check(database) == []
    async with await connections.connect(database) as connection:
        assert (await layout(connection)).doorbell == rings
        await connection.execute("SELECT tidegate.publish('t', 'r', '1')")


def test_who_could_publish_still_can(database: str) -> None:
    """Rights that the first version gave, and rows that it took, last through a migration."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(migrations()[0].statement(8, 2).encode())
        role = f"publisher_{connection.info.backend_pid}"
        connection.execute(f"CREATE ROLE {role}".encode())
        try:
            connection.execute("SELECT tidegate.allow_publish(%s::regrole)", [role])
            connection.execute("SELECT tidegate.publish('t', 'before', '1')")
            migrate(database)
            connection.execute(f"SET ROLE {role}".encode())
            connection.execute("SELECT tidegate.publish('t', 'after', '1', '{\"a\": \"b\"}')")
            connection.execute("INSERT INTO tidegate.outbox (room, payload) VALUES ('r', '1')")
            with pytest.raises(psycopg.errors.CheckViolation, match="room name has 201 characters"):
                connection.execute("SELECT tidegate.publish('t', repeat('r', 201), '1')")
            with pytest.raises(psycopg.errors.CheckViolation, match='tag "txid" is reserved'):
                connection.execute("SELECT tidegate.publish('t', 'r', '1', '{\"txid\": \"1\"}')")
            connection.execute("RESET ROLE")
            rows = connection.execute(
                "SELECT room, shard = tidegate.shard_of(tenant, room), size_bytes "
                "FROM tidegate.outbox ORDER BY id"
            ).fetchall()
            assert rows == [("before", True, 1), ("after", True, 1), ("r", True, 1)]
        finally:
            connection.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_an_outbox_that_takes_nothing_is_a_problem(migrated: str) -> None:
    with psycopg.connect(migrated) as connection:
        connection.execute("ALTER TABLE tidegate.outbox DISABLE TRIGGER USER")
    (problem,) = check(migrated)
    assert problem.startswith("table tidegate.outbox takes no rows")
    with psycopg.connect(migrated) as connection:
        connection.execute("SELECT tidegate.set_doorbell(true)")
    assert check(migrated) == []


def test_files_applied_by_hand_are_recorded(database: str) -> None:
    with psycopg.connect(database) as connection:
        for migration in migrations():
            connection.execute(migration.statement(8, 2).encode())
    assert migrate(database) == []
    with psycopg.connect(database) as connection:
        row = connection.execute("SELECT count(*) FROM tidegate.migration").fetchone()
    assert row == (len(ALL),)
    assert check(database, 8, 2) == []


def test_a_failure_leaves_nothing(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = migrations()[0]
    bad = replace(good, text=good.text + "SELECT 1 / 0;")
    monkeypatch.setattr(module, "migrations", lambda: [bad])
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(database)
    monkeypatch.undo()
    assert [migration.id for migration in migrate(database)] == ALL


def test_a_log_without_a_partition_is_a_problem(migrated: str) -> None:
    with psycopg.connect(migrated) as connection:
        connection.execute(
            "DO $$ DECLARE part regclass; BEGIN FOR part IN SELECT inhrelid FROM pg_inherits "
            "WHERE inhparent = 'tidegate.message'::regclass LOOP "
            "EXECUTE 'DROP TABLE ' || part; END LOOP; END $$"
        )
    assert check(migrated) == [
        "the log has no partition for today: start a relay, or SELECT tidegate.make_partitions(7)"
    ]


async def test_another_encoding_is_refused(postgres: EmbeddedPostgres) -> None:
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    dsn = postgres.dsn("latin")
    expected = 'database "latin" is encoded in LATIN1, needed is UTF8: create one with'
    try:
        assert check(dsn)[0].startswith(expected)
        with pytest.raises(UnsupportedServer, match=expected):
            migrate(dsn)
        with pytest.raises(UnsupportedServer, match=expected):
            await connections.connect(dsn)
        with pytest.raises(UnsupportedServer, match=expected):
            await connections.open_pool(dsn, 1, 2, 5.0)
    finally:
        with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
            connection.execute("DROP DATABASE latin WITH (FORCE)")


def test_a_dsn_that_cannot_be_read_is_not_repeated() -> None:
    (problem,) = check("postgresql://u:s3cret@[::1/db")
    assert problem.startswith("the Postgres DSN cannot be read")
    assert "s3cret" not in problem
    assert "\n" not in problem
