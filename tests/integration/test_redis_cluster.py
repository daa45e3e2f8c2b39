"""Redis Cluster: six nodes, a relay and two gateways over them."""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psycopg
import pytest
from redis.exceptions import ResponseError

from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
from gateway.operate.status import read_status
from outbox import keys
from outbox.head import RoomHead
from outbox.message import Message
from outbox.migrations import migrate
from outbox.redis.connect import connect
from outbox.sharding import shard_of
from outbox.streams import Streams
from tests.integration.conftest import Stack, token
from tests.processes import Process, Processes
from tests.redis_setups import (
    Clustered,
    Migration,
    cut_replication,
    mend_replication,
    order,
    readers,
)
from tests.requirements import lacking
from tests.traffic import TENANT, Traffic

SHARDS = 16
NODE_PATIENCE_S = 6.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Clustered]:
    with Clustered() as cluster:
        yield cluster


@pytest.fixture
def rooms() -> list[str]:
    """The test's own, of which some are on each master."""
    name = secrets.token_hex(4)
    return [f"orders:{name}-{number}" for number in range(24)]


@dataclass
class Running:
    """All that runs, with what the tests must know of it."""

    stack: Stack
    cluster: Clustered
    gateways: list[Process]
    epoch: str

    def traffic(self, rooms: Sequence[str]) -> Traffic:
        return Traffic(self.stack.dsn, self.gateways, rooms, token(now=time.time()))

    def bus(self, room: str) -> str:
        return keys.bus(self.epoch, self.shard(room))

    def shard(self, room: str) -> int:
        return shard_of(TENANT, room, SHARDS, SHARDS)

    def owner(self, room: str) -> EmbeddedRedis:
        """The master that has the room's shard."""
        return self.cluster.owner(self.bus(room))


@pytest.fixture(scope="module")
def running(
    cluster: Clustered, postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    name = f"clustered_{secrets.token_hex(6)}"
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    dsn = postgres.dsn(name)
    migrate(dsn, shards=SHARDS, spread=SHARDS)
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT epoch FROM tidegate.meta").fetchone()
    assert row is not None
    processes = Processes(tmp_path_factory.mktemp("clustered") / "processes")
    stack = Stack(dsn, cluster, processes)  # type: ignore[arg-type]
    try:
        stack.relay()
        with ThreadPoolExecutor() as pool:
            gateways = list(pool.map(stack.gateway, ("gateway-1", "gateway-2")))
        yield Running(stack, cluster, gateways, row[0])
    finally:
        processes.stop()
    processes.check_logs()


def all_readers(cluster: Clustered) -> int:
    return sum(readers(master) for master in cluster.masters())


def groups(cluster: Clustered, buses: Sequence[str]) -> int:
    return sum(len(order(cluster.owner(bus), "XINFO", "GROUPS", bus)) for bus in buses)


async def until(ready: object, what: str, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not await asyncio.to_thread(ready):  # type: ignore[arg-type]
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.05)


async def test_a_master_is_killed_and_its_replica_takes_over(
    running: Running, rooms: list[str]
) -> None:
    async with running.traffic(rooms) as traffic:
        await traffic.more(100)
        victim = running.owner(rooms[0])
        others = [room for room in rooms if running.owner(room) is not victim]
        victim.kill()
        # The other nodes' shards need not wait for the failover.
        await traffic.more(30, others, timeout_s=NODE_PATIENCE_S)
        await until(lambda: running.owner(rooms[0]) is not victim, "failover")
        await traffic.more(200)
        await traffic.settle()
    await asyncio.to_thread(victim.restart)
    await asyncio.to_thread(running.cluster.until_healthy)


async def test_the_replica_that_takes_over_lags_by_many_entries(
    running: Running, rooms: list[str]
) -> None:
    room = rooms[0]
    async with running.traffic(rooms) as traffic:
        await traffic.more(100)
        victim = running.owner(room)
        replica = running.cluster.replica_of(victim)
        await asyncio.to_thread(cut_replication, replica)
        await traffic.more(300)
        victim.kill()
        await until(lambda: running.owner(room) is replica, "failover")
        await traffic.more(200)
        await traffic.settle()
    assert "buses refilled" in running.stack.processes.all["relay"].text()
    await asyncio.to_thread(mend_replication, replica)
    await asyncio.to_thread(victim.restart)
    await asyncio.to_thread(running.cluster.until_healthy)


async def test_a_master_hangs_and_comes_back(running: Running, rooms: list[str]) -> None:
    async with running.traffic(rooms) as traffic:
        await traffic.more(100)
        victim = running.owner(rooms[0])
        others = [room for room in rooms if running.owner(room) is not victim]
        successor = running.cluster.replica_of(victim)
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            await until(lambda: order(successor, "ROLE")[0] == "master", "failover")
            await traffic.more(30, others)
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        await traffic.more(200)
        await traffic.settle()
    await asyncio.to_thread(running.cluster.until_healthy)


async def test_a_slot_moves_under_traffic(running: Running, rooms: list[str]) -> None:
    room = rooms[0]
    bus = running.bus(room)
    async with running.traffic(rooms) as traffic:
        await traffic.more(100)
        others = [other for other in rooms if running.bus(other) != bus]
        source = running.cluster.owner(bus)
        target = next(one for one in running.cluster.masters() if one is not source)
        move = Migration(running.cluster, bus, target)
        await asyncio.to_thread(move.open)
        await traffic.more(60)
        # The bus goes first, so that readers and relay have to ASK.
        assert await asyncio.to_thread(move.move, lambda key: key == bus) == 1
        await traffic.more(100, others)
        await asyncio.to_thread(move.close)
        # Replicas hear of it from the others.
        await until(lambda: running.cluster.owner(bus) is target, "the slot has moved")
        await traffic.more(300)
        await traffic.settle()


async def test_a_slot_moves_all_at_once(running: Running, rooms: list[str]) -> None:
    bus = running.bus(rooms[0])
    source = running.cluster.owner(bus)
    target = next(one for one in running.cluster.masters() if one is not source)
    async with running.traffic(rooms) as traffic:
        await traffic.more(50)
        try:
            Migration(running.cluster, bus, target).at_once()
        except ResponseError as error:
            await traffic.settle()
            lacking("atomic-slot-migration", f"the server cannot move a slot at once ({error})")
        await until(lambda: running.cluster.owner(bus) is target, "the slot has moved")
        await traffic.more(200)
        await traffic.settle()


async def test_a_client_follows_redirections(cluster: Clustered) -> None:
    client = connect(cluster.url)
    streams = Streams(client)
    try:
        bus = keys.bus("epoch", 7)
        await client.xadd(bus, {"b": "x", "m": "y"}, id="5-0")
        source = cluster.owner(bus)
        target = next(one for one in cluster.masters() if one is not source)
        move = Migration(cluster, bus, target)
        first = Message(9, 1, "acme", "a", 1, "b1", "7", None, b"{}", True, 1)
        await streams.append("epoch", 9, [first], start=True)
        rooms = [(shard, "acme", room) for shard in range(SHARDS) for room in "ab"]
        move.open()
        assert await streams.last_ids("epoch", [7]) == {7: 5}
        assert move.move() == 1
        # Both one command and a pipeline ASK, many at once.
        told = asyncio.gather(*(streams.heads("epoch", rooms) for _ in range(20)))
        found = await asyncio.gather(
            *(streams.last_ids("epoch", range(SHARDS)) for _ in range(20)),
            *(client.xadd(bus, {"b": "x", "m": "y"}) for _ in range(20)),
        )
        assert all(answer[7] >= 5 for answer in found[:20])
        where = [RoomHead(1, 1) if room == (9, "acme", "a") else None for room in rooms]
        assert await told == [where] * 20
        move.close()
        assert await client.xlen(bus) == 21
        assert await client.xlen(bus) == 21
        # NOSCRIPT of a node that has just been started
        order(target, "SCRIPT", "FLUSH")
        assert (await streams.last_ids("epoch", range(SHARDS)))[7] > 5
        with pytest.raises(NotImplementedError):
            client.pipeline()
    finally:
        await client.aclose()


async def test_one_connection_for_each_shard_that_is_watched(
    running: Running, rooms: list[str]
) -> None:
    buses = sorted({running.bus(room) for room in rooms})
    assert len(buses) > 8
    assert {running.cluster.owner(bus) for bus in buses} == set(running.cluster.masters())
    async with running.traffic(rooms) as traffic:
        await traffic.more(200)
        # One that has just read something is in no read.
        await until(lambda: all_readers(running.cluster) >= len(buses), "each shard is read")
        # Rooms of earlier tests linger: their shards may still be read.
        assert await asyncio.to_thread(all_readers, running.cluster) <= 2 * SHARDS
        # A replica that lagged brought back groups of earlier readers: they are reaped.
        await until(lambda: groups(running.cluster, buses) == 2 * len(buses), "groups are in use")
        await traffic.settle()
        found = await read_status(running.stack.dsn, running.cluster.url)
        assert found.problems == ()
        assert len(found.shards) == SHARDS
        assert len(found.gateways) == 2
    verify = running.stack.processes.start("verify", "verify", **running.stack.settings)
    assert await asyncio.to_thread(verify.wait, 30) == 0, verify.text()
    for gateway in running.gateways:
        gateway.signal(signal.SIGTERM)
        assert gateway.wait(20) == 0
    # Each has removed its own.
    assert await asyncio.to_thread(groups, running.cluster, buses) == 0
