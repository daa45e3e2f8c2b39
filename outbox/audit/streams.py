"""The audit of Redis: whether the streams hold what the log has, and nothing else.

Under live traffic the streams move while they are read: entries are appended, trimmed, redacted;
streams are lost and begun anew. So a bus is read up to a seq that was read before the log's heads,
and whatever differs is looked at again, for a time, before it counts.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

from redis.exceptions import ResponseError

from outbox import keys
from outbox.audit.findings import NAMED, Findings
from outbox.entry import BATCH_FIELD, MESSAGE_FIELD, decode
from outbox.layout import Layout
from outbox.log import Log
from outbox.message import Message
from outbox.sharding import shard_of
from outbox.streams import Streams
from outbox.tombstone import is_tombstone

PAGE_ENTRIES = (1, 500)
"""The least and the most entries of one read."""
PAGE_BYTES = 2_097_152
"""Payload of one page at about which the next is made smaller."""
PATIENCE_S = 10.0
"""How long an audit waits in all for buses that are behind and for differences to pass: what moves
is done sooner, and what is wrong is not waited for again and again."""
LOOK_AGAIN_S = 0.1
FOREIGN_WAIT_S = 2.0
"""Between two looks at the streams of another epoch."""

_KEY = re.compile(r"tg:\{([0-9a-f]+):(\d+)\}:(?:bus|room:([^:]+):(.+))")
_TOP = re.compile(rb"(\d+) (\d+)")


class StreamAudit:
    """One audit. Errors of the stores come through."""

    def __init__(self, streams: Streams, log: Log, layout: Layout, findings: Findings) -> None:
        self._streams = streams
        self._log = log
        self._layout = layout
        self._epoch = layout.epoch
        self._findings = findings
        self._count = PAGE_ENTRIES[1]
        self._patience_s = PATIENCE_S

    async def _look_again(self) -> bool:
        """Waits a moment; false if the patience is over."""
        if self._patience_s <= 0:
            return False
        await asyncio.sleep(LOOK_AGAIN_S)
        self._patience_s -= LOOK_AGAIN_S
        return True

    async def all(self) -> None:
        """All buses and room streams, and what is there of other epochs."""
        await self._told_epoch()
        for shard in range(self._layout.shards):
            await self.bus(shard)
        foreign: dict[tuple[str, int], int] = {}
        async for key in self._keys():
            match = _KEY.fullmatch(key)
            if match is None:
                continue
            epoch, shard, tenant, room = match[1], int(match[2]), match[3], match[4]
            if epoch == self._epoch:
                if tenant is not None:
                    await self._room_key(shard, tenant, room)
            elif tenant is None:
                foreign[epoch, shard] = (await self._streams.last_ids(epoch, [shard]))[shard]
        await self._foreign(foreign)

    async def room(self, tenant: str, room: str) -> None:
        """One room's stream, and the bus that carries the room."""
        await self._told_epoch()
        shard = shard_of(tenant, room, self._layout.shards, self._layout.spread)
        await self.bus(shard)
        await self._room_key(shard, tenant, room)

    async def _told_epoch(self) -> None:
        while (told := await self._streams.epoch()) != self._epoch:
            if not await self._look_again():
                self._findings.wrong(
                    f"Redis has epoch {told or '(none)'}, Postgres {self._epoch}: a relay that "
                    "reaches both must run"
                )
                return

    # A shard's bus

    async def bus(self, shard: int) -> None:
        """Compares a bus with the log, from its beginning to its end."""
        last = await self._last(shard)
        # Read after the bus: appends follow commits.
        _, heads = await self._log.heads()
        if shard not in heads:
            return  # the audit of Postgres says so
        if last > heads[shard]:
            self._findings.wrong(
                f"shard {shard}: the bus ends at seq {last}, the log at {heads[shard]}: "
                "Postgres lost commits"
            )
            last = heads[shard]
        else:
            last = await self._caught_up(shard, heads[shard])
        key = keys.bus(self._epoch, shard)
        position: int | None = None
        while position is None or position < last:
            entries = await self._entries(key, (position or 0) + 1, last)
            if not entries:
                # Trimming leaves the end, and deletion leaves the last id.
                after = last - 1 if position is None else position
                await self._compare_bus(shard, key, after, last, {})
                break
            # Before the first entry the bus was trimmed or begun.
            after = entries[0][0] - 1 if position is None else position
            await self._compare_bus(shard, key, after, entries[-1][0], dict(entries))
            position = entries[-1][0]
            self._findings.done("messages on the buses", len(entries))

    async def _last(self, shard: int) -> int:
        return (await self._streams.last_ids(self._epoch, [shard])).get(shard, 0)

    async def _caught_up(self, shard: int, head: int) -> int:
        """The bus' last seq, once it has come to ``head`` or the patience is over."""
        while (last := await self._last(shard)) < head:
            if not await self._look_again():
                if await self._log.span(shard, last, head, 1):
                    self._findings.wrong(
                        f"shard {shard}: the bus ends at seq {last}, the log at {head}: a relay "
                        "must run"
                    )
                return last
        return last

    async def _compare_bus(
        self, shard: int, key: str, after: int, until: int, found: Mapping[int, Message | None]
    ) -> None:
        """``found`` is what the bus has between ``after`` and ``until``."""
        logged = await self._span(shard, after, until)
        # What retention has dropped cannot be compared.
        begin = min(logged, default=until + 1)
        await self._kept(shard, [m for seq, m in found.items() if seq < begin and m is not None])
        for seq in range(max(after + 1, begin), until + 1):
            if not _agree(found.get(seq), seq in found, logged.get(seq)):
                difference = await self._differs(shard, key, seq)
                if difference:
                    self._findings.wrong(f"shard {shard}, seq {seq}: {difference}")

    async def _kept(self, shard: int, unlogged: Sequence[Message]) -> None:
        """Whether retention may have dropped what the bus has and the log has no more."""
        if not unlogged:
            return
        # Asked afterwards: a day that is dropped meanwhile is gone from this, too.
        begin_us = await self._log.begin_us()
        lost = [str(message.seq) for message in unlogged if message.created_us >= begin_us]
        if lost:
            more = " …" if len(lost) > NAMED else ""
            self._findings.wrong(
                f"shard {shard}: on the bus and missing from the log, not by retention: "
                f"seq {', '.join(lost[:NAMED])}{more}"
            )

    async def _span(self, shard: int, after: int, until: int) -> dict[int, Message]:
        found: dict[int, Message] = {}
        while messages := await self._log.span(shard, after, until, PAGE_ENTRIES[1]):
            found |= {message.seq: message for message in messages}
            after = messages[-1].seq
        return found

    async def _differs(self, shard: int, key: str, seq: int) -> str | None:
        """What is wrong with one entry of a bus, if it stays so; None if it does not."""
        while True:
            first = await self._entries(key, 0, None, count=1)
            entries = await self._entries(key, seq, seq)
            logged = await self._log.span(shard, seq - 1, seq, 1)
            begun = first[0][0] if first else await self._last(shard)
            if not logged or begun > seq or (not first and begun < seq):
                return None  # trimmed, begun anew, lost, or dropped from the log meanwhile
            entry = entries[0][1] if entries else None
            if _agree(entry, bool(entries), logged[0]):
                return None
            if not await self._look_again():
                return _difference(entry, bool(entries), logged[0])

    # A room's replay stream

    async def _room_key(self, shard: int, tenant: str, room: str) -> None:
        name = f"room {tenant} {room}"
        right = shard_of(tenant, room, self._layout.shards, self._layout.spread)
        if shard != right:
            self._findings.wrong(f"{name} has a stream in shard {shard}, it belongs to {right}")
            return
        while difference := await self._compare_room(shard, tenant, room):
            if not await self._look_again():
                self._findings.wrong(f"{name}: {difference}")
                break
        self._findings.done("room streams")

    async def _compare_room(self, shard: int, tenant: str, room: str) -> str | None:
        key = keys.room(self._epoch, shard, tenant, room)
        # Read before the stream: it moves on from there only.
        told = await self._top(shard, tenant, room)
        position: int | None = None
        head_then = 0, 0
        while entries := await self._entries(key, (position or 0) + 1, None):
            if position is None:
                position = entries[0][0] - 1
            page = await self._log.page(tenant, room, shard, position, len(entries))
            head_then = page.seq, page.head
            logged = {message.offset: message for message in page.messages}
            for offset, entry in entries:
                if offset != position + 1:
                    return f"offset {position + 1} is missing from its stream"
                position = offset
                message = logged.get(offset)
                if message is not None and entry != message:
                    return f"offset {offset}: {_difference(entry, True, message)}"
                if message is None and page.first <= offset <= page.head and logged:
                    position = offset - 1  # the log's page was ended by its limit of bytes
                    break
                if message is None and offset > page.head:
                    return f"offset {offset} is on its stream and not in the log"
            if position == page.head:
                break
        if (position or 0) < told:
            return (
                f"its stream ends at offset {position or 0}, it stood at {told}: Redis lost its end"
            )
        replay = await self._streams.replay(self._epoch, shard, tenant, room, 0, 0)
        if replay is None:
            return None  # not served: the log would be asked
        seq, head = head_then
        if seq >= replay.seq and head == replay.top:
            return None
        top = await self._log.offset_at(tenant, room, replay.seq)
        if top is not None and top != replay.top:
            return f"its stream ends at offset {replay.top}, as of the same seq the log at {top}"
        return None

    async def _top(self, shard: int, tenant: str, room: str) -> int:
        """Where a room's stream is said to stand; 0 if it is not said."""
        client = cast(Any, self._streams.client)
        # Unlike GET it is no error where the key is of another type.
        (value,) = await client.mget(keys.top(self._epoch, shard, tenant, room))
        match = _TOP.fullmatch(value or b"")
        return int(match[1]) if match else 0

    # What is in Redis

    async def _entries(
        self, key: str, first: int, last: int | None, count: int = 0
    ) -> list[tuple[int, Message | None]]:
        """A page of a stream: numbers and messages, None for what is no message of ours."""
        client = cast(Any, self._streams.client)
        try:
            raw = await client.xrange(
                key, f"{first}-0", "+" if last is None else f"{last}-0", count or self._count
            )
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            raw = []  # no stream is as good as an empty one
        size_bytes = sum(len(fields.get(MESSAGE_FIELD, b"")) for _, fields in raw)
        least, most = PAGE_ENTRIES
        if size_bytes > PAGE_BYTES:
            self._count = max(self._count // 2, least)
        elif len(raw) == self._count and size_bytes < PAGE_BYTES // 4:
            self._count = min(self._count * 2, most)
        match = _KEY.fullmatch(key)
        assert match is not None
        return [(int(id.partition(b"-")[0]), _message(int(match[2]), fields)) for id, fields in raw]

    async def _keys(self) -> AsyncIterator[str]:
        for server in await self._streams.client.servers():
            async for key in cast(Any, server).scan_iter(match="tg:{*", count=1000):
                yield key.decode(errors="replace")

    async def _foreign(self, before: dict[tuple[str, int], int]) -> None:
        if not before:
            return
        await asyncio.sleep(FOREIGN_WAIT_S)
        written = set()
        for (epoch, shard), last in before.items():
            if (await self._streams.last_ids(epoch, [shard])).get(shard, 0) > last:
                written.add(epoch)
        for epoch in sorted({epoch for epoch, _ in before}):
            if epoch in written:
                self._findings.wrong(
                    f"epoch {epoch} is being written to: a relay of another database uses this "
                    "Redis"
                )
            else:
                self._findings.notes.append(
                    f"streams of epoch {epoch} are left, nobody writes them"
                )


def _message(shard: int, fields: dict[bytes, bytes]) -> Message | None:
    try:
        return decode(shard, fields[BATCH_FIELD].decode(), fields[MESSAGE_FIELD])
    except (KeyError, ValueError, TypeError):
        return None


def _agree(entry: Message | None, present: bool, logged: Message | None) -> bool:
    """Whether a place on the bus is right: the log's message, or a hole where it was redacted."""
    if logged is None:
        return False
    return entry == logged if present else is_tombstone(logged)


def _difference(entry: Message | None, present: bool, logged: Message) -> str:
    if not present:
        return "missing from the bus"
    if entry is None:
        return "the entry cannot be read"
    if is_tombstone(logged):
        return "redacted in the log, and the content is in Redis"
    fields = [
        name
        for name, one, other in zip(Message._fields, entry, logged, strict=True)
        if one != other
    ]
    return f"Redis and the log differ in {', '.join(fields)}"
