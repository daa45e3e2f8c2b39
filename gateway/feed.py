"""The feed: from the entries of a bus, as they were read, to the hub, without a hole.

A position is captured once and only advances. Entries at or below it are dropped, a hole is filled
from the log. Postgres may be away for any time, so a hole stops its shard alone: a task of the
shard's own fills it, and what was read after it is held meanwhile. Where that would be too much the
rest is dropped, and the shard is read again from its position when the hole is filled: bus and log
have everything.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import structlog

from gateway.hub import Hub
from outbox import tasks
from outbox.backoff import Backoff
from outbox.entry import BATCH_FIELD, MESSAGE_FIELD, decode
from outbox.errors import OutboxError
from outbox.log import Log
from outbox.message import Message

SPAN_LIMIT = 1_000
"""Messages that one read of the log brings."""
HELD_MESSAGES = 1_000
"""Most entries of a shard that are held while a hole before them is being filled."""
HELD_BYTES = 1_048_576
FILLS_AT_ONCE = 2
"""Reads of the log at one time, whatever the number of holes: clients that resume need it, too."""
BACKOFF_S = (0.05, 1.0)

Entry: TypeAlias = Any
"""As Redis gives it: id ("<seq>-0") and fields, both as bytes."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Filling:
    """A shard with a hole."""

    until: int
    """The hole is what lies between the shard's position and this seq, which belongs to it."""
    held: list[Entry] = field(default_factory=list)
    last: int = 0
    """The highest seq that was held: a new connection reads these entries once more."""
    messages: int = 0
    size_bytes: int = 0
    """Of all entries that are held, those included that are just being delivered."""
    troubled: bool = False
    """Whether the log could not be had."""
    task: "asyncio.Task[None] | None" = None

    def hold(self, entries: list[Entry]) -> bool:
        """Adds entries that follow; false if some are too many, they and all after them are not."""
        for entry in entries:
            seq = _seq(entry)
            if seq <= self.last:
                continue
            size_bytes = _size_bytes(entry)
            if self.messages >= HELD_MESSAGES or self.size_bytes + size_bytes > HELD_BYTES:
                return False
            self.held.append(entry)
            self.last = seq
            self.messages += 1
            self.size_bytes += size_bytes
        return True

    def put_back(self, entries: list[Entry]) -> None:
        """Of the entries that were taken out to be delivered these are left."""
        self.held[:0] = entries
        self.messages = len(self.held)
        self.size_bytes = sum(map(_size_bytes, self.held))


class Feed:
    """Feeds one hub with the messages of one history; ``message_log`` has what a bus lacks."""

    def __init__(
        self,
        hub: Hub,
        message_log: Log,
        epoch: str,
        suspect: Callable[[], None],
        read_again: Callable[[int], None],
    ) -> None:
        """``suspect`` is called when the log contradicts the epoch, ``read_again`` when a shard
        that was left out of ``wanted`` is in it again."""
        self.positions = hub.positions
        """Shard → seq up to which it was delivered; shards that have subscribers."""
        self.rereads: set[int] = set()
        """Shards of which entries were dropped: whoever reads one must begin anew at its position,
        and takes it out of here."""
        self.failure: BaseException | None = None
        """What ended a task that must not end."""
        self._hub = hub
        self._log = message_log
        self._epoch = epoch
        self._suspect = suspect
        self._read_again = read_again
        self._fillings: dict[int, _Filling] = {}
        self._full: set[int] = set()
        """Shards being filled that can hold no more."""
        self._turns = asyncio.Semaphore(FILLS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def wanted(self) -> Mapping[int, int]:
        """The shards that are to be read now, with their positions."""
        if not self._full:
            return self.positions
        return {s: position for s, position in self.positions.items() if s not in self._full}

    @property
    def held(self) -> tuple[int, int]:
        """Entries that wait for holes to be filled, and their bytes."""
        fillings = self._fillings.values()
        return sum(f.messages for f in fillings), sum(f.size_bytes for f in fillings)

    async def deliver(self, shard: int, entries: list[Entry]) -> None:
        """Delivers entries, which are in order, as far as there is no hole.

        For one shard it must not run twice at the same time.
        """
        filling = self._fillings.get(shard)
        if filling is not None:
            self._hold(shard, filling, entries)
        elif shard not in self.rereads:
            hole = await self._advance(shard, entries)
            if hole is not None:
                self._begin(shard, *hole)

    def forget(self, shard: int) -> None:
        """The shard gets another position: what is held of it belongs to the one before."""
        filling = self._fillings.get(shard)
        if filling is not None:
            self._end(shard, filling)
            self.rereads.add(shard)
            if filling.task is not None:
                filling.task.cancel()

    async def end(self) -> None:
        """Nothing reaches the hub any more. To be called when nobody delivers."""
        self._closed = True
        self._fillings.clear()
        self._full.clear()
        # The driver first tries to have Postgres give up what it was asked, for some seconds.
        await tasks.end(list(self._tasks))

    async def _advance(self, shard: int, entries: list[Entry]) -> tuple[int, list[Entry]] | None:
        """Delivers entries up to the first hole.

        Gives the last seq of the hole, and what follows it; None if there is no hole.
        """
        position = self.positions.get(shard)
        if position is None:
            return None
        messages: list[Message] = []
        expected = position + 1
        for entry_id, fields in entries:
            seq = int(entry_id[:-2])  # ids are "<seq>-0"
            if seq < expected:
                continue
            message = _message(shard, fields) if seq == expected else None
            if message is None:
                await self._emit(shard, messages)
                until = seq if seq == expected else seq - 1
                return until, [entry for entry in entries if _seq(entry) > until]
            expected += 1
            messages.append(message)
        await self._emit(shard, messages)
        return None

    async def _emit(self, shard: int, messages: list[Message]) -> None:
        if messages:
            for _ in self._hub.deliver(shard, messages):
                await asyncio.sleep(0)

    # Holes

    def _begin(self, shard: int, until: int, entries: list[Entry]) -> None:
        filling = self._fillings[shard] = _Filling(until)
        self._hold(shard, filling, entries)
        filling.task = asyncio.create_task(self._fill(shard, filling))
        self._tasks.add(filling.task)
        filling.task.add_done_callback(self._ended)

    def _hold(self, shard: int, filling: _Filling, entries: list[Entry]) -> None:
        if shard not in self._full and not filling.hold(entries):
            self._full.add(shard)
            self.rereads.add(shard)

    def _end(self, shard: int, filling: _Filling) -> None:
        if self._fillings.get(shard) is filling:
            del self._fillings[shard]
            self._full.discard(shard)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = error

    async def _fill(self, shard: int, filling: _Filling) -> None:
        """Delivers hole after hole from the log and in between what is held, until all is."""
        try:
            while await self._fill_hole(shard, filling):
                entries, filling.held = filling.held, []
                hole = await self._advance(shard, entries)
                filling.until, left = hole or (0, [])
                filling.put_back(left)
                if hole is None and not filling.held:
                    break
            else:
                # Nobody wants the shard any more. Should that change, it is from another position.
                self.rereads.add(shard)
        finally:
            self._end(shard, filling)
        if filling.troubled:
            log.info("hole filled at last", shard=shard, position=self.positions.get(shard))
        if shard in self.rereads and shard in self.positions:
            self._read_again(shard)

    async def _fill_hole(self, shard: int, filling: _Filling) -> bool:
        """Delivers from the log what a bus does not have; false if nobody wants it any more."""
        backoff = Backoff(*BACKOFF_S)
        until = filling.until
        if (after := self._position(shard)) is not None and after < until:
            log.info("hole in a bus, filled from the log", shard=shard, after=after, until=until)
        while (after := self._position(shard)) is not None and after < until:
            try:
                messages = await self._span(shard, after, until)
            except OutboxError as error:
                if not filling.troubled:
                    log.warning("hole in a bus must wait", shard=shard, error=str(error))
                filling.troubled = True
                await asyncio.sleep(backoff.next_s())
                continue
            if self._position(shard) != after:
                continue
            backoff.reset()
            if not messages or messages[0].seq != after + 1:
                self._hub.lose(shard, until)
            else:
                await self._emit(shard, messages)
        return after is not None

    def _position(self, shard: int) -> int | None:
        return None if self._closed else self.positions.get(shard)

    async def _span(self, shard: int, after: int, until: int) -> list[Message]:
        """Raises OutboxError if the log cannot be had, or is not the one that the bus came from."""
        async with self._turns:
            messages = await self._log.span(shard, after, until, SPAN_LIMIT)
            # Asked afterwards: an epoch that still holds has held before.
            epoch, heads = await self._log.heads()
        if epoch != self._epoch or heads.get(shard, 0) < until:
            # The bus went beyond this: such a log has lost commits.
            self._suspect()
            raise OutboxError("the log has another history than the streams")
        return messages


def _seq(entry: Entry) -> int:
    return int(entry[0][:-2])


def _size_bytes(entry: Entry) -> int:
    return sum(map(len, entry[1]))


def _message(shard: int, fields: list[bytes]) -> Message | None:
    """None if the entry is not one of ours: the log has the message."""
    batch, blob = b"", b""
    for name, value in zip(fields[::2], fields[1::2], strict=True):
        if name == MESSAGE_FIELD:
            blob = value
        elif name == BATCH_FIELD:
            batch = value
    try:
        return decode(shard, batch.decode(), blob)
    except (ValueError, TypeError):
        log.warning("an entry of a bus cannot be read", shard=shard)
        return None
