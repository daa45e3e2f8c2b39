"""What a room's past is, from the nearest place that knows it for certain.

Three tiers: the room's memory in this process, its replay stream in Redis, the log in Postgres.
Every answer of a store carries its epoch and the seq it is true for. The worker has delivered its
shard up to a position; an answer that is true for an earlier seq may lack messages that the worker
will not see again, so it cannot say where a room's head is. Only the log may say that something is
lost.

Equal reads that are under way are shared; one that began before the reader attached may be too old
for it, which its seq shows, and the reader then reads anew. What a read brought the room remembers,
so that of all those who return to it the first reads and the others are served from memory.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from gateway.commands import Since
from gateway.heads import Heads
from gateway.hub import Hub
from gateway.reads import Reads
from gateway.room import Glance, Key, Room
from gateway.unavailable import Unavailable
from outbox.errors import OutboxError
from outbox.log import NO_OFFSET, Log, LogPage
from outbox.message import Message
from outbox.streams import Streams

STREAM_READS = 16
"""Pages that are read from Redis at one time."""


@dataclass(frozen=True, slots=True)
class Page:
    """Messages right after the offset that was asked for, dense; empty at the head."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """Not every message after the offset exists any more, or the offset never did."""

    head: int


@dataclass(frozen=True, slots=True)
class PageLimits:
    """How much one read brings."""

    messages: int
    message_bytes: int
    timeout_s: float
    log_reads: int = 3
    """Pages that are read from the log at one time."""


class History:
    """Reads for the rooms of one hub. ``epoch`` gives the worker's epoch, ``suspect`` is called
    when a store contradicts it."""

    def __init__(
        self,
        hub: Hub,
        streams: Streams,
        log: Log,
        limits: PageLimits,
        epoch: Callable[[], str],
        suspect: Callable[[], None],
    ) -> None:
        self._hub = hub
        self._streams = streams
        self._log = log
        self._limits = limits
        self._epoch = epoch
        self._suspect = suspect
        self._heads = Heads(hub, streams, log, limits.timeout_s, epoch, suspect)
        self._stream_reads = Reads(STREAM_READS)
        self._log_reads = Reads(limits.log_reads)

    async def head(self, room: Room) -> int:
        """The room's head as this worker knows it; see ``Heads.of``."""
        return await self._heads.of(room)

    async def read(self, room: Room, after: int) -> Page | Lost:
        """The messages after an offset: at least one unless the offset is the head.

        Raises:
            Unavailable: no store could answer in time.
        """
        deadline_s = asyncio.get_running_loop().time() + self._limits.timeout_s
        if room.top is None:
            # Most who return to an idle room have missed nothing, and they come by the thousand:
            # where the rooms stand is asked for all of them together.
            await self._heads.of(room)
        known = room.page(after, self._limits.messages, self._limits.message_bytes)
        if known is not None:
            return Page(known)
        return await self._read(room, after, deadline_s)

    async def past(
        self, key: Key, shard: int, since: Since | None, limit: int, reverse: bool
    ) -> tuple[str, int, tuple[Message, ...]] | Lost:
        """For the ``history`` command: epoch, head, and at most ``limit`` messages.

        Forward: those after ``since`` (else the oldest retained); reverse: those before ``since``
        (else the newest), newest first. Always from the log, which is true for all rooms.
        """
        tenant, name = key
        size_bytes = self._limits.message_bytes
        after = since.offset if since is not None else 0
        try:
            async with asyncio.timeout(self._limits.timeout_s), self._log_reads.turn:
                if reverse:
                    before = NO_OFFSET if since is None else since.offset
                    page = await self._log.latest(tenant, name, shard, limit, size_bytes, before)
                else:
                    page = await self._log.page(tenant, name, shard, after, limit, size_bytes)
                    if since is None and limit and not page.messages and page.first <= page.head:
                        page = await self._log.page(
                            tenant, name, shard, page.first - 1, limit, size_bytes
                        )
        except TimeoutError:
            raise Unavailable("the log did not answer in time") from None
        if since is not None and (since.epoch not in ("", page.epoch) or since.offset > page.head):
            return Lost(page.head)
        if since is not None and not reverse and limit and after < min(page.head, page.first - 1):
            return Lost(page.head)
        messages = page.messages[::-1] if reverse else page.messages
        return page.epoch, page.head, tuple(messages)

    async def _read(self, room: Room, after: int, deadline_s: float) -> Page | Lost:
        epoch = self._epoch()
        floor = self._hub.positions.get(room.shard)
        if floor is None:
            raise Unavailable("the shard is not being read")
        glance, top = room.glance(), room.top
        tenant, name = room.key
        try:
            async with asyncio.timeout_at(deadline_s):
                found = await self._from_stream(room, epoch, floor, glance, top, after)
                if found is not None:
                    return found

                async def read() -> LogPage:
                    return await self._log.page(
                        tenant,
                        name,
                        room.shard,
                        after,
                        self._limits.messages,
                        self._limits.message_bytes,
                    )

                page = await self._log_reads.share((epoch, room.key, after), floor, read)
                if after > page.head:
                    # The read may have been begun for another, before this offset was reached.
                    async with self._log_reads.turn:
                        page = await read()
        except TimeoutError:
            raise Unavailable("no store answered in time") from None
        except OutboxError as error:
            raise Unavailable(str(error)) from error
        if page.epoch != epoch or page.seq < floor:
            self._suspect()
            raise Unavailable("the log has another history than the streams")
        if self._epoch() != epoch:
            raise Unavailable("the epoch changed during the read")
        room.anchor(page.head, glance.generation)
        if after == page.head:
            return Page(())
        if page.messages and page.messages[0].offset == after + 1:
            room.take(page.messages, glance)
            return Page(page.messages)
        return Lost(page.head)

    async def _from_stream(
        self,
        room: Room,
        epoch: str,
        floor: int,
        glance: Glance,
        top: int | None,
        after: int,
    ) -> Page | None:
        try:
            # A Redis that is silent must leave time for the log.
            async with asyncio.timeout(self._limits.timeout_s / 3):
                replay = await self._stream_reads.share(
                    (epoch, room.key, after), floor, lambda: self._replay(epoch, room, after)
                )
        except (_NoReplay, RedisError, OSError):
            return None
        if self._epoch() != epoch:
            raise Unavailable("the epoch changed during the read")
        if replay.seq < floor:
            return None
        if top is not None and replay.top < top:
            return None  # shorter than what this worker had delivered: a part of it was lost
        if after == replay.top:
            room.anchor(replay.top, glance.generation)
            return Page(())
        if replay.messages and replay.messages[0].offset == after + 1:
            room.anchor(replay.top, glance.generation)
            room.take(replay.messages, glance)
            return Page(replay.messages)
        return None

    async def _replay(self, epoch: str, room: Room, after: int) -> Any:
        tenant, name = room.key
        limits = self._limits
        replay = await self._streams.replay(
            epoch, room.shard, tenant, name, after, limits.messages, limits.message_bytes
        )
        if replay is None:
            raise _NoReplay
        return replay


class _NoReplay(Exception):
    """The replay stream cannot answer."""
