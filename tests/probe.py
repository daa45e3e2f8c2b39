"""A probe between Postgres and Redis: publishes, and compares the streams with the log."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, cast

import psycopg
from redis.asyncio import Redis

from outbox import database, keys
from outbox.entry import decode
from outbox.layout import layout
from outbox.log import Log
from outbox.message import Message
from outbox.redis import connect as redis_connect
from outbox.sequence import Sequencer
from outbox.sharding import shard_of
from outbox.streams import StreamLimits, Streams


class Probe:
    """One connection to each, for one test. ``async with Probe(dsn, url) as probe``."""

    def __init__(self, dsn: str, url: str, limits: StreamLimits | None = None) -> None:
        self.dsn = dsn
        self.client: Redis = redis_connect.connect(url)
        self.streams = Streams(self.client, limits)

    async def __aenter__(self) -> Self:
        self.connection = await database.connect(self.dsn)
        self.pool = await database.open_pool(self.dsn, 0, 2, 5.0)
        self.log = Log(self.pool)
        self.sequencer = Sequencer(self.connection)
        found = await layout(self.connection)
        self.epoch = self.epoch_at_start = found.epoch
        self.shards = found.shards
        self.spread = found.spread
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.client.aclose()
        await self.pool.close()
        await self.connection.close()

    def shard(self, room: str, tenant: str = "acme") -> int:
        return shard_of(tenant, room, self.shards, self.spread)

    def neighbour(self, room: str) -> str:
        """Another room of the same shard."""
        names = (f"{room}-{number}" for number in range(10_000))
        return next(name for name in names if self.shard(name) == self.shard(room))

    def stranger(self, room: str) -> str:
        """A room of another shard."""
        names = (f"{room}-{number}" for number in range(10_000))
        return next(name for name in names if self.shard(name) != self.shard(room))

    async def publish(self, *rooms: str, tenant: str = "acme") -> None:
        """One message to each room in turn, all in one transaction."""
        async with self.connection.transaction(), self.connection.pipeline():
            for room in rooms:
                await self.connection.execute(
                    "SELECT tidegate.publish(%s, %s, %s)", (tenant, room, '{"of": "' + room + '"}')
                )

    async def sequence(self, *rooms: str) -> list[Message]:
        """Publishes and sequences without appending, as a relay that dies in between would."""
        await self.publish(*rooms)
        batch = await self.sequencer.batch(range(self.shards), 10_000)
        return batch.messages

    async def logged(self) -> dict[int, list[Message]]:
        """The whole log by shard."""
        epoch, heads = await self.log.heads()
        self.epoch = epoch
        found: dict[int, list[Message]] = {}
        for shard, head in heads.items():
            after = 0
            while messages := await self.log.span(shard, after, head, 1000):
                found.setdefault(shard, []).extend(messages)
                after = messages[-1].seq
        return found

    async def on_bus(self, shard: int) -> list[Message]:
        return await self._read(keys.bus(self.epoch, shard), shard)

    async def in_room(self, room: str, tenant: str = "acme") -> list[Message]:
        shard = self.shard(room, tenant)
        return await self._read(keys.room(self.epoch, shard, tenant, room), shard)

    async def _read(self, key: str, shard: int) -> list[Message]:
        entries = cast(Any, await self.client.xrange(key))
        messages = []
        for entry_id, fields in entries:
            message = decode(shard, fields[b"b"].decode(), fields[b"m"])
            position = message.seq if key.endswith(":bus") else message.offset
            assert entry_id == b"%d-0" % position
            messages.append(message)
        return messages

    async def differences(self, *, holes: bool = False) -> list[str]:
        """Where buses and room streams differ from the newest messages of the log.

        ``holes``: room streams may lack messages inside, as they do after Redis lost their ends.
        """
        found = []
        logged = await self.logged()
        for shard, messages in logged.items():
            on_bus = await self.on_bus(shard)
            if not on_bus or on_bus != messages[-len(on_bus) :]:
                found.append(f"bus {shard}: {seqs(on_bus)} for {seqs(messages)}")
            rooms = {(message.tenant, message.room) for message in messages}
            for tenant, room in rooms:
                in_log = [m for m in messages if (m.tenant, m.room) == (tenant, room)]
                in_room = await self.in_room(room, tenant)
                expected = in_log[-len(in_room) :]
                if holes and in_room:
                    there = {message.offset for message in in_room} | {in_log[-1].offset}
                    expected = [message for message in in_log if message.offset in there]
                if not in_room or in_room == expected:
                    continue
                # One that is older than its bus is left to expire: nobody is served from it.
                if await self.streams.replay(self.epoch, shard, tenant, room, 0, 0) is not None:
                    found.append(f"room {room}: {offsets(in_room)} for {offsets(in_log)}")
        return found

    async def waiting(self) -> int:
        """Committed rows in the outbox."""
        async with await psycopg.AsyncConnection.connect(self.dsn) as connection:
            cursor = await connection.execute("SELECT count(*) FROM tidegate.outbox")
            row = await cursor.fetchone()
        return -1 if row is None else int(row[0])

    async def sequenced(self) -> bool:
        """Whether the outbox is empty."""
        return await self.waiting() == 0

    async def drained(self) -> bool:
        """Whether the outbox is empty and the buses end where the log ends."""
        if not await self.sequenced():
            return False
        self.epoch, heads = await self.log.heads()
        return await self.streams.last_ids(self.epoch, list(heads)) == heads


def seqs(messages: Sequence[Message]) -> list[int]:
    return [message.seq for message in messages]


def offsets(messages: Sequence[Message]) -> list[int]:
    return [message.offset for message in messages]


async def until(
    condition: Callable[[], Awaitable[Any]] | Callable[[], Any], what: str, timeout_s: float = 20
) -> None:
    """Waits until the condition holds; it may be a coroutine function. Fails after a time."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        held = condition()
        if isinstance(held, Awaitable):
            held = await held
        if held:
            return
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.01)
