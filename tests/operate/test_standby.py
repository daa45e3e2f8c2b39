"""Failover of Postgres: nothing is lost with a synchronous standby, and honesty without one."""

import asyncio
import time
from pathlib import Path

import psycopg
import pytest

from gateway.tokens import sign
from outbox.migrations import migrate
from tests.client import Client
from tests.operate.standby import Pair
from tests.operate.traffic import TENANT, Traffic, numbers_are_complete
from tests.probe import until
from tests.processes import Process, Processes

SECRET = "a secret of thirty-two bytes or more"
ROOMS = ("orders:1", "orders:2")


def start(processes: Processes, dsn: str, redis_url: str) -> Process:
    env = {
        "TIDEGATE_POSTGRES_DSN": dsn,
        "TIDEGATE_REDIS_URL": redis_url,
        "TIDEGATE_TOKEN_HMAC_SECRET": SECRET,
        "TIDEGATE_LEASE_S": "1",
    }
    processes.start_relay("relay-1", **env)
    processes.start_relay("relay-2", **env)
    return processes.start_gateway(**env)


async def greeted(client: Client) -> None:
    await client.greet(sign(SECRET, TENANT, "ann", now=time.time()))


async def head(dsn: str, room: str) -> int:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        cursor = await connection.execute(
            "SELECT max(head) FROM tidegate.room WHERE name = %s", (room,)
        )
        row = await cursor.fetchone()
    assert row is not None
    return int(row[0])


async def final_head(dsn: str, room: str) -> int:
    """When nobody writes any more, that of the last message."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:

        async def sequenced() -> bool:
            cursor = await connection.execute("SELECT count(*) FROM tidegate.outbox")
            return await cursor.fetchone() == (0,)

        await until(sequenced, "the outbox is empty", 30)
    return await head(dsn, room)


@pytest.mark.timeout(180)
async def test_a_synchronous_standby_is_promoted(
    tmp_path: Path, redis_url: str, processes: Processes
) -> None:
    """Same epoch, nothing lost, and clients notice nothing."""
    with Pair(tmp_path / "pair", synchronous=True) as pair:
        migrate(pair.primary.dsn())
        gateway = await asyncio.to_thread(start, processes, pair.dsn, redis_url)
        async with Client(gateway.websocket_url) as client:
            await greeted(client)
            for room in ROOMS:
                await client.subscribe(room, since=(0, ""))
            before = client.positions[ROOMS[0]][1]
            async with Traffic(pair.dsn, *ROOMS) as traffic:
                await traffic.some()
                await asyncio.to_thread(pair.promote)
                await traffic.some()
            for room in ROOMS:
                await client.until(lambda r=room: traffic.committed[r] in client.data(r), 30)
                await client.until_offset(room, await final_head(pair.dsn, room))
                assert numbers_are_complete(client.data(room), traffic.committed[room])
            assert traffic.breaks >= 1
            assert client.evicted == {}
            assert client.positions[ROOMS[0]][1] == before
        async with Client(gateway.websocket_url) as late:
            await greeted(late)
            assert (await late.subscribe(ROOMS[0], since=(1, before)))["recovered"]


@pytest.mark.timeout(180)
async def test_a_standby_that_lagged_is_promoted(
    tmp_path: Path, redis_url: str, processes: Processes
) -> None:
    """What clients have seen beyond the standby belongs to a history that has ended."""
    room = ROOMS[0]
    with Pair(tmp_path / "pair", synchronous=False) as pair:
        migrate(pair.primary.dsn())
        gateway = await asyncio.to_thread(start, processes, pair.dsn, redis_url)
        async with Client(gateway.websocket_url) as client:
            await greeted(client)
            await client.subscribe(room, since=(0, ""))
            async with Traffic(pair.dsn, room) as traffic:
                await traffic.some()
                await asyncio.to_thread(pair.pause)
                await traffic.some()
                await client.until(lambda: traffic.committed[room] - 5 in client.data(room))
            known = client.positions[room]
            await asyncio.to_thread(pair.promote)
            assert await head(pair.dsn, room) < known[0]
            await client.until(lambda: room in client.evicted, 30)
            reply = await client.subscribe(room, since=client.positions[room])
            assert not reply["recovered"]
            assert reply["epoch"] != known[1]
            assert reply["offset"] < known[0]
            async with Traffic(pair.dsn, room) as again:
                await again.some()
            await client.until_offset(room, await final_head(pair.dsn, room))
        async with Client(gateway.websocket_url) as stale:
            await greeted(stale)
            # The offset exists again by now: it is the epoch that tells the two apart.
            assert not (await stale.subscribe(room, since=known))["recovered"]
