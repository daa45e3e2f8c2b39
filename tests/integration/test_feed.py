"""Holes in a bus: filled from the log when Postgres is there, and never at the cost of others.

Real servers, a consumer in this process, and a proxy between it and Postgres. The test plays the
relay: what it leaves out of a bus is a hole.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gateway import feed
from gateway.consumer import Consumer
from gateway.hub import Hub
from gateway.room import Room
from outbox import keys, tasks
from outbox.database import open_pool
from outbox.entry import encode
from outbox.log import Log
from outbox.message import Message
from outbox.redis.connect import connect
from outbox.streams import Streams
from tests.chaos.proxy import Link
from tests.probe import Probe, offsets, until

LOG_TIMEOUT_S = 4.0
"""How long a read of the log waits for a Postgres that is silent."""
SOON_S = 2.0
"""Far above any latency, and below what a lane would wait for the log."""
FIRST, SECOND = "orders:first", "orders:second"


class AskedLog(Log):
    """A log that remembers which spans it was asked for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: list[tuple[int, int, int]] = []

    async def span(self, shard: int, after: int, until: int, *rest: Any) -> list[Message]:
        self.asked.append((shard, after, until))
        return await super().span(shard, after, until, *rest)


class Worker:
    """The reading half of a gateway's worker."""

    def __init__(self, probe: Probe, redis_url: str, log: AskedLog, link: Link) -> None:
        self.probe = probe
        self.log = log
        self.link = link
        self.hub = Hub(probe.shards, probe.spread, 100_000, 1_000_000_000)
        self.client = connect(redis_url)
        self.epochs: list[str] = []
        self.consumer = Consumer(self.hub, Streams(self.client), log, "worker", self._restart)
        self.running: asyncio.Task[None]

    def _restart(self) -> None:
        self.epochs.append(self.consumer.epoch)
        self.hub.restart()

    async def start(self) -> None:
        await self.consumer.start()
        self.running = asyncio.create_task(self.consumer.run())

    async def stop(self) -> None:
        await tasks.end([self.running])

    async def open(self, name: str) -> Room:
        """A room whose ring keeps all that it is given."""
        await self.consumer.attach(self.probe.shard(name))
        room = self.hub.open(("acme", name))
        room.anchor(0, 0)
        return room

    @property
    def feed(self) -> feed.Feed:
        return self.consumer._feed

    @property
    def joined(self) -> set[int]:
        return {s for lane in self.consumer._lanes.values() for s in lane.joined}

    async def bus(self, messages: Sequence[Message], without: Collection[int] = ()) -> None:
        """Puts messages on their buses, but for those at these places of the sequence."""
        async with self.client.pipeline(transaction=False) as pipeline:
            for place, message in enumerate(messages):
                if place not in without:
                    bus = keys.bus(self.probe.epoch, message.shard)
                    fields: Any = {"b": message.batch, "m": encode(message)}
                    pipeline.xadd(bus, fields, f"{message.seq}-0")
            await pipeline.execute()

    async def publish(
        self, name: str, count: int, without: Collection[int] = (), pad: int = 0
    ) -> None:
        """``count`` more messages of a room, with holes; ``pad``: bytes of payload in addition."""
        connection = self.probe.connection
        async with connection.transaction(), connection.pipeline():
            for number in range(count):
                await connection.execute(
                    "SELECT tidegate.publish('acme', %s, %s)",
                    (name, f'"{number}{"x" * pad}"'),
                )
        messages: list[Message] = []
        while len(messages) < count:
            batch = await self.probe.sequencer.batch(range(self.probe.shards), 10_000)
            messages += batch.messages
        await self.bus(messages, without)


@pytest.fixture
async def worker(migrated: str, redis_url: str) -> AsyncIterator[Worker]:
    async with working(migrated, redis_url) as worker:
        yield worker


@asynccontextmanager
async def working(dsn: str, redis_url: str) -> AsyncIterator[Worker]:
    port = int(conninfo_to_dict(dsn)["port"] or 0)
    async with Probe(dsn, redis_url) as probe, Link("gateway to postgres", port) as link:
        await probe.streams.set_epoch(probe.epoch)
        pool = await open_pool(make_conninfo(dsn, port=link.port), 1, 4, LOG_TIMEOUT_S)
        worker = Worker(probe, redis_url, AskedLog(pool, LOG_TIMEOUT_S), link)
        await worker.start()
        try:
            yield worker
            assert not worker.running.done()
        finally:
            link.heal()
            await worker.stop()
            await worker.client.aclose()
            await pool.close()


def given(room: Room) -> list[int]:
    """The offsets that the room was given, which must be dense and in order."""
    found = offsets(list(room.memory.ring))
    assert found == list(range(1, len(found) + 1))
    assert room.generation == 0, "the room was forgotten"
    return found


async def complete(room: Room, count: int, timeout_s: float = 20) -> None:
    await until(lambda: len(given(room)) >= count, f"{count} in {room.key}", timeout_s)
    assert len(given(room)) == count


async def test_a_hole_is_filled_and_costs_one_read(worker: Worker) -> None:
    room = await worker.open(FIRST)
    await worker.publish(FIRST, 20, without={5, 6, 7})
    await complete(room, 20)
    assert worker.log.asked == [(room.shard, 5, 8)]
    assert worker.feed.held == (0, 0)


async def test_a_hole_stops_its_shard_alone(worker: Worker) -> None:
    """Postgres is silent: others get their messages at once, this one when it is back, in order."""
    first = await worker.open(FIRST)
    other = worker.probe.stranger(FIRST)
    second = await worker.open(other)
    await worker.publish(FIRST, 3)
    await worker.publish(other, 3)
    await complete(first, 3)
    await complete(second, 3)
    worker.link.freeze()
    await worker.publish(FIRST, 10, without={2})
    await complete(first, 5)
    latencies_s = []
    for number in range(100):
        began_s = time.monotonic()
        await worker.publish(other, 1)
        await complete(second, 4 + number, SOON_S)
        latencies_s.append(time.monotonic() - began_s)
        await worker.publish(FIRST, 1)
    assert max(latencies_s) < SOON_S
    assert len(given(first)) == 5
    assert worker.consumer.connected
    worker.link.heal()
    await complete(first, 113)
    await worker.publish(FIRST, 1)
    await complete(first, 114)
    # The lane is still its first one.
    assert worker.consumer._connections == 1


async def test_what_is_held_is_bounded(worker: Worker) -> None:
    """In number: what comes after is read again from the bus when the hole is filled."""
    first = await worker.open(FIRST)
    other = worker.probe.stranger(FIRST)
    second = await worker.open(other)
    worker.link.freeze()
    await worker.publish(FIRST, feed.HELD_MESSAGES * 3, without={0})
    await until(lambda: first.shard not in worker.joined, "the shard is not read any more")
    assert worker.joined == {second.shard}
    held = worker.feed.held
    assert held[0] == feed.HELD_MESSAGES
    for number in range(30):
        await worker.publish(FIRST, 20)
        await worker.publish(other, 1)
        await complete(second, number + 1, SOON_S)
        assert worker.feed.held == held
    assert given(first) == []
    worker.link.heal()
    await complete(first, feed.HELD_MESSAGES * 3 + 600)
    # Nothing but the hole came from the log.
    assert {asked[1:] for asked in worker.log.asked} == {(0, 1)}
    assert worker.feed.held == (0, 0)
    await until(lambda: worker.joined == {first.shard, second.shard}, "both are read")
    await worker.publish(FIRST, 1)
    await complete(first, feed.HELD_MESSAGES * 3 + 601, SOON_S)


async def test_what_is_held_is_bounded_in_bytes(worker: Worker) -> None:
    first = await worker.open(FIRST)
    worker.link.freeze()
    for _ in range(12):
        await worker.publish(FIRST, 4, without={0}, pad=200_000)
        messages, size_bytes = worker.feed.held
        assert size_bytes <= feed.HELD_BYTES
        assert messages <= 5
    await until(lambda: first.shard not in worker.joined, "the shard is not read any more")
    worker.link.heal()
    await complete(first, 48)
    assert worker.feed.held == (0, 0)


async def test_an_entry_larger_than_what_may_be_held(worker: Worker) -> None:
    first = await worker.open(FIRST)
    for _ in range(5):
        await worker.publish(FIRST, 2, without={0}, pad=feed.HELD_BYTES - 100)
    await complete(first, 10)


async def test_several_holes_in_several_shards(worker: Worker) -> None:
    """More than may be filled at one time, several in each, Postgres coming and going."""
    names = [FIRST]
    while len(names) < 4:
        names.append(
            next(
                name
                for name in (f"orders:{n}" for n in range(1000))
                if worker.probe.shard(name) not in {worker.probe.shard(n) for n in names}
            )
        )
    rooms = [await worker.open(name) for name in names]
    assert len({room.shard for room in rooms}) == 4
    worker.link.freeze()
    for _ in range(3):
        for name in names:
            await worker.publish(name, 50, without={0, 10, 11, 30, 49})
    assert [given(room) for room in rooms] == [[]] * 4
    worker.link.refuse()
    worker.link.heal()
    for room in rooms:
        # The last hole of each shows with the next entry only.
        await complete(room, 149)
    worker.link.cut()
    for name in names:
        await worker.publish(name, 5, without={1})
    for room in rooms:
        await complete(room, 155)


async def test_a_new_connection_reads_what_is_held_once_more(
    worker: Worker, redis_url: str
) -> None:
    first = await worker.open(FIRST)
    worker.link.freeze()
    await worker.publish(FIRST, 10, without={0, 5})
    for lanes in range(1, 5):
        await until(lambda n=lanes: worker.consumer._connections == n and worker.joined, "it reads")
        await until(lambda: worker.feed.held[0] >= 8, "the entries are held")
        await worker.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await worker.publish(FIRST, 1)
        await until(lambda n=lanes: worker.consumer._connections == n + 1, "a new connection")
    await until(lambda: worker.feed.held[0] == 12, "each once")
    worker.link.heal()
    await complete(first, 14)


async def test_a_new_connection_leaves_out_what_is_full(worker: Worker) -> None:
    first = await worker.open(FIRST)
    other = worker.probe.stranger(FIRST)
    second = await worker.open(other)
    worker.link.freeze()
    await worker.publish(FIRST, feed.HELD_MESSAGES * 2, without={0})
    await until(lambda: worker.feed.held[0] == feed.HELD_MESSAGES, "as much is held as may be")
    await worker.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await until(lambda: worker.consumer._connections == 2, "a new connection")
    await worker.publish(other, 1)
    await complete(second, 1, SOON_S)
    assert worker.joined == {second.shard}
    worker.link.heal()
    await complete(first, feed.HELD_MESSAGES * 2)


async def test_an_epoch_that_ends_while_a_hole_is_filled(worker: Worker) -> None:
    """What the log says then belongs to another history: it must not reach those of the old one."""
    first = await worker.open(FIRST)
    await worker.publish(FIRST, 2)
    await complete(first, 2)
    worker.link.freeze()
    await worker.publish(FIRST, 10, without={3})
    await complete(first, 5)
    await until(lambda: worker.feed.held[0] > 0, "a hole is being filled")
    # Postgres has lost the commits: other messages have their positions now.
    connection = worker.probe.connection
    await connection.execute("UPDATE tidegate.message SET payload = '\"another\"' WHERE seq > 3")
    epoch = await worker.probe.sequencer.new_epoch()
    old = worker.feed
    worker.link.heal()
    await until(lambda: worker.epochs == [epoch], "the new epoch is noticed")
    assert given(first) == [1, 2, 3, 4, 5]
    assert b"another" not in b"".join(message.payload for message in first.memory.ring)
    assert old.held == (0, 0)
    assert worker.feed is not old
    # And on with the new one.
    worker.probe.epoch = epoch
    again = await worker.open(FIRST)
    assert again is not first
    again.top = 12
    await worker.publish(FIRST, 5, without={1})
    await until(lambda: offsets(list(again.memory.ring)) == list(range(13, 18)), "the new history")


async def test_a_log_that_ends_before_the_hole_does(worker: Worker) -> None:
    """Postgres lost commits and no relay has noticed yet: nothing is given up as lost."""
    first = await worker.open(FIRST)
    await worker.publish(FIRST, 6, without={3})
    await complete(first, 6)
    messages = list(first.memory.ring)
    bus = keys.bus(worker.probe.epoch, first.shard)
    fields: Any = {"b": "another", "m": encode(messages[-1])}
    await worker.client.xadd(bus, fields, "9-0")
    await until(lambda: worker.feed.held[0] == 1, "the hole is noticed")
    asked = len(worker.log.asked)
    await until(lambda: len(worker.log.asked) > asked + 2, "it is asked for again and again")
    assert given(first) == [1, 2, 3, 4, 5, 6]
    epoch = await worker.probe.sequencer.new_epoch()
    await until(lambda: worker.epochs == [epoch], "the new epoch is noticed")


async def test_what_the_log_no_longer_has_is_told(worker: Worker) -> None:
    first = await worker.open(FIRST)
    await worker.probe.sequence(*[FIRST] * 3)
    await worker.probe.connection.execute("DELETE FROM tidegate.message WHERE seq <= 2")
    await worker.bus(await worker.probe.log.span(first.shard, 2, 3, 10))
    await until(lambda: worker.hub.positions[first.shard] == 3, "the shard goes on")
    assert first.generation == 1
    assert offsets(list(first.memory.ring)) == [3]


async def test_an_end_while_a_hole_is_filled(worker: Worker) -> None:
    first = await worker.open(FIRST)
    for fault in (worker.link.freeze, worker.link.black_hole):
        fault()
        await worker.publish(FIRST, 10, without={1})
        await until(lambda: worker.feed.held[0] > 0, "a hole is being filled")
        began_s = time.monotonic()
        await worker.stop()
        assert time.monotonic() - began_s < SOON_S
        assert worker.feed.held == (0, 0)
        await worker.consumer.leave()
        assert await worker.client.xinfo_groups(keys.bus(worker.probe.epoch, first.shard)) == []
        worker.link.heal()
        await worker.start()
        await complete(first, 10 if fault == worker.link.freeze else 20)


async def test_a_shard_that_nobody_wants_any_more_and_then_somebody_does(worker: Worker) -> None:
    first = await worker.open(FIRST)
    shard = first.shard
    worker.link.freeze()
    await worker.publish(FIRST, feed.HELD_MESSAGES * 2, without={0})
    await until(lambda: worker.feed.held[0] == feed.HELD_MESSAGES, "as much is held as may be")
    # As the worker does with rooms that have been empty for long.
    del worker.hub.rooms[first.key]
    del worker.hub.positions[shard]
    # At the end of the bus: this needs no Postgres.
    again = await worker.open(FIRST)
    assert worker.hub.positions[shard] == feed.HELD_MESSAGES * 2
    again.top = feed.HELD_MESSAGES * 2
    for number in range(1, 4):
        await worker.publish(FIRST, 1)
        await until(lambda n=number: len(again.memory.ring) == n, "it goes on at once", SOON_S)
    worker.link.heal()
    await worker.publish(FIRST, 2)
    await until(lambda: len(again.memory.ring) == 5, "it goes on")
    assert all(b == a + 1 for a, b in pairwise(offsets(list(again.memory.ring))))
    assert first.memory.ring == again.memory.ring.__class__()
