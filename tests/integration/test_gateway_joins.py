"""Many joins at one moment, to rooms that nobody is in: what they cost, and what they leave."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from outbox import keys
from outbox.database import Connection, connect
from outbox.redis.connect import connect as connect_redis
from tests.client import Client, Refused
from tests.integration.conftest import Stack
from tests.processes import Process

CLIENTS = 10
ROOMS_EACH = 100
AT_REST = {
    *("get", "hset", "eval", "time", "hgetall", "exists", "xinfo|groups", "xreadgroup", "ping"),
}
"""What a gateway does where nothing happens: it looks at the epoch, renews its line in the table of
gateways (dated by the server), looks for groups of vanished workers, and begins its read anew."""


@pytest.fixture
async def connection(stack: Stack) -> AsyncIterator[Connection]:
    async with await connect(stack.dsn) as connection:
        yield connection


@pytest.fixture
async def remote(stack: Stack, connection: Connection) -> AsyncIterator[Any]:
    """The stack's Redis as a relay would leave it, which would be busy itself."""
    redis = connect_redis(stack.redis.url)
    cursor = await connection.execute("SELECT epoch FROM tidegate.meta")
    (epoch,) = await cursor.fetchone() or ("",)
    await redis.set(keys.EPOCH, epoch)
    yield redis
    await redis.aclose()


async def join_all(gateway: Process, clients: AsyncExitStack) -> list[Any]:
    """Each room is joined by one client; what became of it."""
    came = [
        await clients.enter_async_context(Client(gateway.websocket_url)) for _ in range(CLIENTS)
    ]
    await asyncio.gather(*(client.greet() for client in came))
    outcomes: list[Any] = await asyncio.gather(
        *(
            client.subscribe(f"idle:{number}:{room}")
            for number, client in enumerate(came)
            for room in range(ROOMS_EACH)
        ),
        return_exceptions=True,
    )
    return outcomes


async def calls(remote: Any) -> dict[str, int]:
    """How often Redis was asked, by command."""
    statistics = await remote.info("commandstats")
    return {
        name.removeprefix("cmdstat_"): told["calls"]
        for name, told in statistics.items()
        if name not in ("cmdstat_info", "cmdstat_client|setinfo")
    }


async def log_readers(connection: Connection) -> set[tuple[Any, ...]]:
    """Each connection for reading the log, and since when it has been doing what."""
    cursor = await connection.execute(
        "SELECT pid, state, state_change FROM pg_stat_activity "
        "WHERE application_name = 'tidegate-log' AND datname = current_database()"
    )
    return set(await cursor.fetchall())


async def until(ready: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await ready():
            await asyncio.sleep(0.02)


async def asked_at_rest(remote: Any, connection: Connection) -> dict[str, int]:
    """Waits until two renewals of the gateway's line have come without a word to Postgres and with
    nothing else to Redis than the usual; how often that was."""
    async with asyncio.timeout(60):
        while True:
            readers, before = await log_readers(connection), await calls(remote)

            async def renewed(before: dict[str, int] = before) -> bool:
                return (await calls(remote))["hset"] >= before["hset"] + 2

            await until(renewed)
            asked = {
                name: count - before.get(name, 0)
                for name, count in (await calls(remote)).items()
                if count != before.get(name, 0)
            }
            if asked.keys() <= AT_REST and await log_readers(connection) == readers:
                return asked


async def test_joins_that_wait_at_the_same_moment_are_asked_for_together(
    stack: Stack, remote: Any, connection: Connection
) -> None:
    gateway = stack.gateway()
    before = await calls(remote)
    async with AsyncExitStack() as clients:
        joined = await join_all(gateway, clients)
        assert [reply["offset"] for reply in joined] == [0] * CLIENTS * ROOMS_EACH
        after = await calls(remote)
        assert after["evalsha"] - before.get("evalsha", 0) < CLIENTS * ROOMS_EACH / 4
    gateway.stop(20)

    # A connection has reported what it did when it has ended.
    async def ended() -> bool:
        return not await log_readers(connection)

    await until(ended)
    cursor = await connection.execute(
        "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
    )
    (transactions,) = await cursor.fetchone() or (0,)
    assert transactions < CLIENTS * ROOMS_EACH / 4


async def test_after_joins_that_were_refused_nothing_goes_on(
    stack: Stack, remote: Any, connection: Connection
) -> None:
    gateway = stack.gateway(TIDEGATE_LOG_TIMEOUT_S="1")
    async with AsyncExitStack() as clients:
        async with connection.transaction():
            await connection.execute("LOCK TABLE tidegate.room IN ACCESS EXCLUSIVE MODE")
            refused = await join_all(gateway, clients)
        assert all(isinstance(error, Refused) and error.temporary for error in refused)
        asked = await asked_at_rest(remote, connection)
        assert asked["get"] <= 3 * asked["hset"] + 2
        assert asked["xreadgroup"] <= 2 * asked["hset"] + 2

        joined = await join_all(gateway, clients)
        assert [reply["offset"] for reply in joined] == [0] * CLIENTS * ROOMS_EACH
        asked = await asked_at_rest(remote, connection)
        assert asked["get"] <= 3 * asked["hset"] + 2
