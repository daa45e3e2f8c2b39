"""Where rooms stand, asked of the stores for many rooms at a time.

Whoever joins a room that nobody in this worker was in yet must learn its head. However many do so
at the same moment, one read of Redis is under way and two of the log: those who come meanwhile wait
and are in the next. The log is asked for the rooms that Redis cannot tell of, with all of them in
one statement.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import cast

from redis.exceptions import RedisError

from gateway.hub import Hub
from gateway.room import Room
from gateway.unavailable import Unavailable
from outbox.errors import OutboxError
from outbox.head import RoomHead
from outbox.log import Log
from outbox.streams import Streams

ROOMS_AT_ONCE = 256
"""In one read. All who wait for them are answered in one go, which takes some milliseconds."""
LOG_READS = 2
"""So that one statement that takes long does not hold up all."""


class Heads:
    """Asks for the rooms of one hub. ``epoch`` gives the worker's epoch, ``suspect`` is called when
    the log contradicts it. What takes longer than ``timeout_s`` fails."""

    def __init__(
        self,
        hub: Hub,
        streams: Streams,
        log: Log,
        timeout_s: float,
        epoch: Callable[[], str],
        suspect: Callable[[], None],
    ) -> None:
        self._hub = hub
        self._streams = streams
        self._log = log
        self._timeout_s = timeout_s
        self._epoch = epoch
        self._suspect = suspect
        self._waiters: dict[Room, dict[asyncio.Future[int], None]] = {}
        self._for_streams = _Queue(self._ask_streams, 1)
        self._for_log = _Queue(self._ask_log, LOG_READS)

    async def of(self, room: Room) -> int:
        """The room's head as this worker knows it; afterwards ``room.top`` is set, unless the room
        was forgotten meanwhile: then it is a position like any other.

        Raises:
            Unavailable: no store could answer in time.
        """
        if room.top is not None:
            return room.top
        waiters = self._waiters.get(room)
        if waiters is None:
            waiters = self._waiters[room] = {}
            self._for_streams.add(room)
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiters[waiter] = None
        try:
            async with asyncio.timeout(self._timeout_s):
                head = await waiter
        except TimeoutError:
            raise Unavailable("no store answered in time") from None
        finally:
            del waiters[waiter]
            if not waiters and self._waiters.get(room) is waiters:
                self._drop(room)
        return head if room.top is None else room.top

    # What came of it

    def _settle(self, room: Room) -> bool:
        """Tells those who wait, if the room's head is known now."""
        if room.top is None:
            return False
        for waiter in self._drop(room):
            if not waiter.done():
                waiter.set_result(room.top)
        return True

    def _fail(self, room: Room, why: str) -> None:
        # A delivery may have told it by now.
        if not self._settle(room):
            for waiter in self._drop(room):
                if not waiter.done():
                    waiter.set_exception(Unavailable(why))

    def _drop(self, room: Room) -> "list[asyncio.Future[int]]":
        """Nobody is to wait for the room any more; those who did."""
        self._for_streams.remove(room)
        self._for_log.remove(room)
        return list(self._waiters.pop(room, ()))

    # Asking

    def _questions(self, rooms: list[Room]) -> list[tuple[Room, int, int]]:
        """The rooms that must be asked for, with their generations and the seqs for which an answer
        must at least be true."""
        questions: list[tuple[Room, int, int]] = []
        for room in rooms:
            floor = self._hub.positions.get(room.shard)
            if floor is None:
                self._fail(room, "the shard is not being read")
            elif not self._settle(room):
                questions.append((room, room.generation, floor))
        return questions

    async def _ask_streams(self, rooms: list[Room]) -> None:
        epoch = self._epoch()
        questions = self._questions(rooms)
        if not questions:
            return
        heads: Sequence[RoomHead | None] = [None] * len(questions)
        try:
            # A Redis that is silent must leave time for the log.
            async with asyncio.timeout(self._timeout_s / 3):
                heads = await self._streams.heads(epoch, [_name(room) for room, _, _ in questions])
        except TimeoutError:
            # Those who came meanwhile have waited, too.
            for room in self._for_streams.take_all():
                self._for_log.add(room)
        except (RedisError, OSError):
            pass
        self._take(
            epoch,
            [
                (room, generation, None if head is None or head.seq < floor else head)
                for (room, generation, floor), head in zip(questions, heads, strict=True)
            ],
        )

    async def _ask_log(self, rooms: list[Room]) -> None:
        epoch = self._epoch()
        questions = self._questions(rooms)
        if not questions:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                found_epoch, heads = await self._log.room_heads(
                    [_name(room) for room, _, _ in questions]
                )
        except (TimeoutError, OutboxError) as error:
            for room, _, _ in questions:
                self._fail(room, str(error) or "no store answered in time")
            return
        answers: list[tuple[Room, int, RoomHead | None]] = []
        for (room, generation, floor), head in zip(questions, heads, strict=True):
            if found_epoch == epoch and head.seq >= floor:
                answers.append((room, generation, head))
            else:
                self._suspect()
                self._fail(room, "the log has another history than the streams")
        self._take(epoch, answers)

    def _take(self, epoch: str, answers: list[tuple[Room, int, RoomHead | None]]) -> None:
        changed = self._epoch() != epoch
        for room, generation, head in answers:
            if changed:
                self._fail(room, "the epoch changed during the read")
                continue
            if head is not None:
                room.anchor(head.offset, generation)
            if not self._settle(room) and room in self._waiters:
                # Deliveries may have been forgotten while the read was under way: then its answer
                # proves nothing now.
                (self._for_log if head is None else self._for_streams).add(room)


class _Queue:
    """Rooms that are to be asked for, in the order in which they came. ``ask`` is given many of
    them at once, and called again when it has come back."""

    def __init__(self, ask: Callable[[list[Room]], Awaitable[None]], at_once: int) -> None:
        self._ask = ask
        self._at_once = at_once
        self._rooms: dict[Room, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, room: Room) -> None:
        self._rooms[room] = None
        if len(self._tasks) < self._at_once:
            self._tasks.add(asyncio.create_task(self._run()))

    def remove(self, room: Room) -> None:
        self._rooms.pop(room, None)

    def take_all(self) -> list[Room]:
        rooms, self._rooms = list(self._rooms), {}
        return rooms

    async def _run(self) -> None:
        try:
            while self._rooms:
                rooms = list(islice(self._rooms, ROOMS_AT_ONCE))
                for room in rooms:
                    del self._rooms[room]
                await self._ask(rooms)
        finally:
            # At once: a room that is added from now on needs a task.
            self._tasks.discard(cast("asyncio.Task[None]", asyncio.current_task()))


def _name(room: Room) -> tuple[int, str, str]:
    return (room.shard, *room.key)
