"""Reading the log: what a room or a shard has had.

Each answer comes from one statement, so from one snapshot, together with the epoch and the seq that
it is true for. Read from the primary: a standby may lag behind what clients have seen.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import errors

from outbox import rows
from outbox.database import Pool, awaited, first_line, reached
from outbox.errors import OutboxError, SchemaMismatch
from outbox.head import RoomHead
from outbox.message import Message
from outbox.tombstone import Redacted, redacted_offset

LIMIT_BYTES = 8_388_608
"""Payload bytes of one answer; a single message may exceed them."""
TIMEOUT_S = 10.0
NO_OFFSET = 2**63 - 1
"""Above every offset."""

_STATE = """
    WITH state AS (
        SELECT m.epoch, s.head AS seq,
               coalesce((SELECT r.head FROM tidegate.room r
                         WHERE r.tenant = %(tenant)s AND r.name = %(room)s
                         ORDER BY r.head DESC LIMIT 1), 0) AS head,
               (SELECT min(l."offset") FROM tidegate.message l
                WHERE l.tenant = %(tenant)s AND l.room = %(room)s) AS first
        FROM tidegate.meta m CROSS JOIN LATERAL (
            SELECT s.head FROM tidegate.shard s
            WHERE s.id = %(shard)s
            ORDER BY s.head DESC LIMIT 1
        ) s
    )
    SELECT p.*, state.* FROM state LEFT JOIN LATERAL ({}) p ON true
"""


def _statement(condition: LiteralString, order: LiteralString) -> LiteralString:
    """Rows of the log up to both limits: large payloads beyond them are not even read."""
    return f"""
        SELECT {rows.COLUMNS}
        FROM (SELECT l.*, sum(size_bytes) OVER (ORDER BY {order}) - size_bytes AS bytes_before
              FROM (SELECT * FROM tidegate.message
                    WHERE {condition} ORDER BY {order} LIMIT %(limit)s) l) l
        WHERE bytes_before < %(limit_bytes)s
    """  # noqa: S608


_IN_ROOM: LiteralString = "tenant = %(tenant)s AND room = %(room)s"
_PAGE = _STATE.format(_statement(_IN_ROOM + ' AND "offset" > %(after)s', '"offset"'))
_LATEST = _STATE.format(_statement(_IN_ROOM + ' AND "offset" < %(before)s', '"offset" DESC'))
_SPAN = _statement("shard = %(shard)s AND seq > %(after)s AND seq <= %(until)s", "seq")
_TOMBSTONES = """
    SELECT l.tenant, l.room, l."offset", l.seq
    FROM unnest(%(tenants)s::text[], %(rooms)s::text[], %(offsets)s::bigint[])
         AS a (tenant, room, "offset")
    JOIN tidegate.message l USING (tenant, room, "offset")
    WHERE l.tags = '{"redacted": "true"}' AND l.payload::text = 'null'
"""
_OFFSET_AT = """
    SELECT "offset" FROM tidegate.message
    WHERE tenant = %(tenant)s AND room = %(room)s AND seq <= %(seq)s
    ORDER BY "offset" DESC LIMIT 1
"""
_BEGIN = """
    SELECT (extract(epoch FROM min(to_date(right(c.relname, 8), 'YYYYMMDD'))) * 1000000)::bigint
    FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'tidegate.message'::regclass AND c.relname ~ '^message_[0-9]{8}$'
"""
_HEADS = """
    SELECT a.id, s.head, m.epoch
    FROM tidegate.meta m
    CROSS JOIN generate_series(0, m.shards - 1) AS a (id)
    CROSS JOIN LATERAL (
        SELECT s.head FROM tidegate.shard s
        WHERE s.id = a.id
        ORDER BY s.head DESC LIMIT 1
    ) s
"""
# Without the table of messages: planning over all its partitions costs more than this whole read.
_ROOM_HEADS = """
    SELECT m.epoch,
           ARRAY(SELECT (SELECT s.head FROM tidegate.shard s
                         WHERE s.id = a.id
                         ORDER BY s.head DESC LIMIT 1)
                 FROM unnest(%(shards)s::int[]) WITH ORDINALITY AS a (id, n) ORDER BY n),
           ARRAY(SELECT coalesce((SELECT r.head FROM tidegate.room r
                                  WHERE r.tenant = a.tenant AND r.name = a.name
                                  ORDER BY r.head DESC LIMIT 1), 0)
                 FROM unnest(%(tenants)s::text[], %(rooms)s::text[])
                      WITH ORDINALITY AS a (tenant, name, n) ORDER BY n)
    FROM tidegate.meta m
"""
_EMPTY = "table tidegate.meta is empty: restore it from a backup"


@dataclass(frozen=True, slots=True)
class LogPage:
    """A stretch of a room's messages and where the room stood."""

    epoch: str
    seq: int
    """The head of the room's shard: the answer is true for this moment."""
    head: int
    """The room's last offset; 0 if it never had a message."""
    first: int
    """The lowest offset that is still there; ``head`` + 1 if none is."""
    messages: tuple[Message, ...]
    """Ascending, without a hole."""


class Log:
    """The log, read through a pool.

    Every method raises PostgresUnavailable if there is no answer within ``timeout_s``.
    """

    def __init__(self, pool: Pool, timeout_s: float = TIMEOUT_S) -> None:
        self._pool = pool
        self._timeout_s = timeout_s

    async def page(
        self,
        tenant: str,
        room: str,
        shard: int,
        after: int,
        limit: int,
        limit_bytes: int = LIMIT_BYTES,
    ) -> LogPage:
        """The messages that follow offset ``after``.

        The first of them is ``after`` + 1, or there are none: the room ends there, ``limit`` is 0,
        or the log no longer has it (``first`` > ``after`` + 1).
        """
        found = await self._rows(
            _PAGE,
            {
                "tenant": tenant,
                "room": room,
                "shard": shard,
                "after": after,
                "limit": limit,
                "limit_bytes": limit_bytes,
            },
        )
        page = _page(found, shard)
        messages = page.messages
        if messages and messages[0].offset != after + 1:
            # Partitions were dropped, the last one with a message in the middle of it if the clock
            # had jumped: what is left begins here.
            return LogPage(page.epoch, page.seq, page.head, messages[0].offset, ())
        return page

    async def latest(
        self,
        tenant: str,
        room: str,
        shard: int,
        limit: int,
        limit_bytes: int = LIMIT_BYTES,
        before: int = NO_OFFSET,
    ) -> LogPage:
        """The newest messages of a room below offset ``before``, at most ``limit``, ascending."""
        found = await self._rows(
            _LATEST,
            {
                "tenant": tenant,
                "room": room,
                "shard": shard,
                "limit": limit,
                "limit_bytes": limit_bytes,
                "before": before,
            },
        )
        return _page(found, shard, newest=True)

    async def span(
        self, shard: int, after: int, until: int, limit: int, limit_bytes: int = LIMIT_BYTES
    ) -> list[Message]:
        """A shard's messages with ``after`` < seq <= ``until``, the first ``limit``, ascending.

        They are without a hole; they begin above ``after`` + 1 if retention has dropped the rest.
        """
        found = await self._rows(
            _SPAN,
            {
                "shard": shard,
                "after": after,
                "until": until,
                "limit": limit,
                "limit_bytes": limit_bytes,
            },
        )
        messages = sorted(rows.message(row) for row in found)
        for index, message in enumerate(messages):
            if message.seq != messages[0].seq + index:
                return messages[:index]
        return messages

    async def redacted(self, notices: Iterable[Message]) -> Redacted:
        """For notices of redactions: which tombstones they speak of.

        Other messages, and notices of what is no tombstone, are left out. Without a notice among
        the messages the database is not asked.
        """
        asked = {
            (message.tenant, message.room, offset): (message.shard, message.seq)
            for message in notices
            if (offset := redacted_offset(message)) is not None
        }
        if not asked:
            return {}
        tenants, names, offsets = zip(*asked, strict=True)
        found = await self._rows(
            _TOMBSTONES,
            {"tenants": list(tenants), "rooms": list(names), "offsets": list(offsets)},
        )
        return {asked[tenant, room, offset]: seq for tenant, room, offset, seq in found}

    async def offset_at(self, tenant: str, room: str, seq: int) -> int | None:
        """The room's last offset as of a seq of its shard; None if the log has none so old."""
        found = await self._rows(_OFFSET_AT, {"tenant": tenant, "room": room, "seq": seq})
        offset: int | None = found[0][0] if found else None
        return offset

    async def heads(self) -> tuple[str, dict[int, int]]:
        """The epoch, and each shard's last seq."""
        found = await self._rows(_HEADS, {})
        if not found:
            raise SchemaMismatch(_EMPTY)
        return found[0][2], {shard: head for shard, head, _ in found}

    async def room_heads(
        self, rooms: Sequence[tuple[int, str, str]]
    ) -> tuple[str, tuple[RoomHead, ...]]:
        """The epoch, and where each of the rooms stands, given as shard, tenant and name."""
        shards = sorted({shard for shard, _, _ in rooms})
        found = await self._rows(
            _ROOM_HEADS,
            {
                "shards": shards,
                "tenants": [tenant for _, tenant, _ in rooms],
                "rooms": [room for _, _, room in rooms],
            },
        )
        if not found:
            raise SchemaMismatch(_EMPTY)
        epoch, shard_heads, offsets = found[0]
        seqs = dict(zip(shards, shard_heads, strict=True))
        for shard, seq in seqs.items():
            if seq is None:
                raise _no_shard(shard)
        return epoch, tuple(
            RoomHead(offset, seqs[shard])
            for (shard, _, _), offset in zip(rooms, offsets, strict=True)
        )

    async def begin_us(self) -> int:
        """From when on nothing was dropped by retention, microseconds since 1970 UTC."""
        ((begin_us,),) = await self._rows(_BEGIN, {})
        return NO_OFFSET if begin_us is None else int(begin_us)

    async def _rows(
        self, statement: LiteralString, parameters: dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        try:
            with awaited(self._pool):
                async with reached(), asyncio.timeout(self._timeout_s):
                    return await self._fetched(statement, parameters)
        except (errors.UndefinedTable, errors.InvalidSchemaName):
            raise SchemaMismatch("the schema is missing: run `tidegate migrate`") from None
        except errors.Error as error:
            raise OutboxError(f"the log cannot be read: {first_line(error)}") from error

    async def _fetched(
        self, statement: LiteralString, parameters: dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        attempts = self._pool.max_size + 1
        while True:
            attempts -= 1
            async with self._pool.connection() as connection:
                try:
                    cursor = await connection.execute(statement, parameters)
                    return await cursor.fetchall()
                except errors.OperationalError:
                    # Reading again is harmless. The server may be up again, or another one in its
                    # place, while the pool still holds connections from before.
                    if not connection.closed or not attempts:
                        raise


def _no_shard(shard: int) -> SchemaMismatch:
    return SchemaMismatch(f"the database has no shard {shard}: compare its layout")


def _page(found: list[tuple[Any, ...]], shard: int, newest: bool = False) -> LogPage:
    if not found:
        raise _no_shard(shard)
    epoch, seq, head, first = found[0][11:]
    messages = sorted(
        (rows.message(row) for row in found if row[1] is not None), key=_offset, reverse=newest
    )
    dense = tuple(_dense(messages, -1 if newest else 1))
    if newest:
        dense = dense[::-1]
    return LogPage(epoch, seq, head, head + 1 if first is None else first, dense)


def _dense(messages: list[Message], step: int) -> Iterable[Message]:
    for index, message in enumerate(messages):
        if message.offset != messages[0].offset + index * step:
            return
        yield message


def _offset(message: Message) -> int:
    return message.offset
