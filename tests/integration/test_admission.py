"""A relay that Postgres refuses: it ends where it never worked, and waits where it did."""

import asyncio
import re
import secrets
from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
from outbox.migrations import migrate
from tests.probe import Probe, until
from tests.processes import Process, Processes

Start = Callable[[str], Process]


@pytest.fixture
def start(processes: Processes, redis_url: str) -> Start:
    def start(dsn: str) -> Process:
        return processes.start_relay(TIDEGATE_POSTGRES_DSN=dsn, TIDEGATE_REDIS_URL=redis_url)

    return start


@pytest.fixture
def role(migrated: str) -> Iterator[str]:
    """A role without rights, whose password is ``right``."""
    name = f"role_{secrets.token_hex(6)}"
    execute(migrated, "CREATE ROLE {} LOGIN PASSWORD 'right'", name)
    yield name
    execute(migrated, "DROP OWNED BY {}", name)
    execute(migrated, "DROP ROLE {}", name)


def execute(dsn: str, statement: str, name: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(sql.Identifier(name)))  # type: ignore[arg-type]


def granted(dsn: str, function: str, role: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            sql.SQL("SELECT tidegate.{}({})").format(sql.Identifier(function), sql.Literal(role))
        )


async def ending(process: Process) -> str:
    """The line with which it ends."""
    assert await asyncio.to_thread(process.wait, 30) == 1, process.text()
    (line,) = re.findall(r"^tidegate: (.*)$", process.text(), re.MULTILINE)
    assert process.text().endswith(f"{line}\n")
    return str(line)


async def test_a_wrong_password_ends_it(migrated: str, role: str, start: Start) -> None:
    line = await ending(start(make_conninfo(migrated, user=role, password="wrong")))
    assert line == (
        f'Postgres: password authentication failed for user "{role}": check TIDEGATE_POSTGRES_DSN'
    )


async def test_a_user_that_may_not_log_in_ends_it(migrated: str, role: str, start: Start) -> None:
    execute(migrated, "ALTER ROLE {} NOLOGIN", role)
    line = await ending(start(make_conninfo(migrated, user=role, password="right")))
    assert line.startswith(f'Postgres: role "{role}" is not permitted to log in: check TIDEGATE')


async def test_a_missing_database_ends_it(migrated: str, start: Start) -> None:
    line = await ending(start(make_conninfo(migrated, dbname="missing")))
    assert line == 'Postgres: database "missing" does not exist: check TIDEGATE_POSTGRES_DSN'


async def test_a_database_that_is_closed_to_the_user_ends_it(
    migrated: str, role: str, start: Start
) -> None:
    name = str(conninfo_to_dict(migrated)["dbname"])
    execute(migrated, "REVOKE CONNECT ON DATABASE {} FROM PUBLIC", name)
    line = await ending(start(make_conninfo(migrated, user=role, password="right")))
    assert line.startswith(f'Postgres: permission denied for database "{name}": check TIDEGATE')


@pytest.mark.parametrize("allowed", [None, "allow_publish", "allow_gateway"])
async def test_missing_rights_end_it(
    migrated: str, role: str, start: Start, allowed: str | None
) -> None:
    if allowed:
        granted(migrated, allowed, role)
    line = await ending(start(make_conninfo(migrated, user=role, password="right")))
    assert re.fullmatch(
        r"Postgres: permission denied for (schema|table) \w+: "
        r"its owner must run `SELECT tidegate\.allow_relay\(role\)`",
        line,
    )


async def test_a_password_that_changes_later_is_waited_for(
    migrated: str, redis_url: str, role: str, start: Start
) -> None:
    granted(migrated, "allow_relay", role)
    async with Probe(migrated, redis_url) as probe:
        relay = start(make_conninfo(migrated, user=role, password="right"))
        await probe.publish("a")
        await until(probe.drained, "the relay works")
        execute(migrated, "ALTER ROLE {} PASSWORD 'other'", role)
        await probe.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (role,)
        )
        await asyncio.to_thread(relay.wait_log, "password authentication failed.*postgres: trouble")
        execute(migrated, "ALTER ROLE {} PASSWORD 'right'", role)
        await probe.publish("a")
        await until(probe.drained, "the relay works again")
        assert relay.returncode is None


async def test_rights_that_are_taken_later_are_waited_for(
    migrated: str, redis_url: str, role: str, start: Start
) -> None:
    granted(migrated, "allow_relay", role)
    async with Probe(migrated, redis_url) as probe:
        relay = start(make_conninfo(migrated, user=role, password="right"))
        await probe.publish("a")
        await until(probe.drained, "the relay works")
        execute(migrated, "REVOKE DELETE ON tidegate.outbox FROM {}", role)
        await probe.publish("a")
        await asyncio.to_thread(relay.wait_log, "permission denied.*postgres: trouble")
        granted(migrated, "allow_relay", role)
        await until(probe.drained, "the relay works again")
        assert relay.returncode is None


async def test_a_server_that_is_not_there_yet_is_waited_for(
    redis_url: str, processes: Processes
) -> None:
    with EmbeddedPostgres() as server, EmbeddedRedis() as second:
        dsn = server.dsn()
        await asyncio.to_thread(migrate, dsn)
        await asyncio.to_thread(server.kill)
        relay = processes.start_relay(
            TIDEGATE_POSTGRES_DSN=dsn,
            TIDEGATE_REDIS_URL=redis_url,
            TIDEGATE_REDIS_URL_ALSO=second.url,
        )
        await asyncio.to_thread(relay.wait_log, "Connection refused.*postgres: trouble")
        await asyncio.to_thread(server.restart)
        async with Probe(dsn, redis_url) as probe, Probe(dsn, second.url) as also:
            await probe.publish("a")
            await until(probe.drained, "the relay works")
            await until(also.drained, "the second Redis is kept the same")
        await asyncio.to_thread(relay.stop)
