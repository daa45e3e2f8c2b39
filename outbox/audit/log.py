"""The audit of Postgres: whether the log is what the argument for delivery takes it for.

Reads only, in pages, each a statement with a snapshot of its own: no old snapshot is held, and what
is compared with each other comes from one snapshot. So nothing that moves meanwhile is a mismatch.
"""

from typing import Any

from psycopg import errors

from outbox.audit.findings import NAMED, Findings
from outbox.database import Connection
from outbox.layout import Layout

PAGE_SEQS = 20_000
PAGE_ROOMS = 500

_HEADS = """
    SELECT s.id, s.head,
           (SELECT min(l.seq) FROM tidegate.message l WHERE l.shard = s.id),
           (SELECT max(l.seq) FROM tidegate.message l WHERE l.shard = s.id)
    FROM tidegate.shard s ORDER BY s.id
"""
_FIRST = "SELECT min(seq) FROM tidegate.message WHERE shard = %(shard)s AND seq > %(after)s"
_PAGE = """
    SELECT count(*), count(DISTINCT l.seq),
           count(*) FILTER (WHERE l.shard <> tidegate.shard_of(l.tenant, l.room)),
           count(*) FILTER (WHERE num_nonnulls(l.payload, l.payload_bin) <> 1)
    FROM tidegate.message l
    WHERE l.shard = %(shard)s AND l.seq > %(after)s AND l.seq <= %(until)s
"""
_ROOMLESS = """
    SELECT DISTINCT l.tenant, l.room FROM tidegate.message l
    WHERE l.shard = %(shard)s AND l.seq > %(after)s AND l.seq <= %(until)s
      AND NOT EXISTS (SELECT FROM tidegate.room r WHERE r.tenant = l.tenant AND r.name = l.room)
    LIMIT %(named)s
"""
_MISSING = """
    SELECT g.seq FROM generate_series(%(after)s + 1, %(until)s) AS g (seq)
    WHERE NOT EXISTS (SELECT FROM tidegate.message l WHERE l.shard = %(shard)s AND l.seq = g.seq)
    ORDER BY g.seq LIMIT %(named)s
"""
_DOUBLED = """
    SELECT l.seq FROM tidegate.message l
    WHERE l.shard = %(shard)s AND l.seq > %(after)s AND l.seq <= %(until)s
    GROUP BY l.seq HAVING count(*) > 1 ORDER BY l.seq LIMIT %(named)s
"""
_ROOMS = """
    SELECT r.tenant, r.name, r.shard, r.head, tidegate.shard_of(r.tenant, r.name), l.*
    FROM (SELECT tenant, name, shard, head FROM tidegate.room
          WHERE (tenant, name) > (%(tenant)s, %(room)s) OR %(only)s
                AND (tenant, name) = (%(tenant)s, %(room)s)
          ORDER BY tenant, name LIMIT %(limit)s) r
    LEFT JOIN LATERAL (
        SELECT count(*), count(DISTINCT "offset"), min("offset"), max("offset"),
               count(*) FILTER (WHERE seq <= seq_before)
        FROM (SELECT "offset", seq, lag(seq) OVER (ORDER BY "offset") AS seq_before
              FROM tidegate.message m WHERE m.tenant = r.tenant AND m.room = r.name) m
    ) l ON true
    ORDER BY r.tenant, r.name
"""
_TWO_HEADS = """
    SELECT tenant, name FROM tidegate.room GROUP BY tenant, name HAVING count(*) > 1
    ORDER BY tenant, name LIMIT %(named)s
"""
_OUTBOX = """
    SELECT count(*),
           count(*) FILTER (WHERE shard IS DISTINCT FROM tidegate.shard_of(tenant, room)),
           count(*) FILTER (WHERE num_nonnulls(payload, payload_bin) <> 1
                                  OR num_nulls(tenant, room, txid, created_at) > 0)
    FROM tidegate.outbox
"""
_CONTENTS = """
    SELECT d.tenant, d.room, d."offset"
    FROM tidegate.redaction d JOIN tidegate.message l USING (tenant, room, "offset")
    WHERE l.payload IS NULL OR l.payload::text <> 'null' LIMIT %(named)s
"""


class LogAudit:
    """One audit over one connection, which it makes read-only."""

    def __init__(self, connection: Connection, layout: Layout, findings: Findings) -> None:
        self._connection = connection
        self._layout = layout
        self._findings = findings

    async def all(self) -> None:
        """Everything: heads, seqs, rooms, outbox, redactions. Raises psycopg.Error."""
        firsts = await self._heads()
        for shard, (first, head) in firsts.items():
            await self._shard(shard, first, head)
        await self._rooms()
        await self._outbox()
        if self._layout.schema_version >= 2:
            await self._redactions()

    async def room(self, tenant: str, room: str) -> None:
        """One room only."""
        found = await self._rows(_ROOMS, {"tenant": tenant, "room": room, "only": True, "limit": 1})
        if not found or found[0][:2] != (tenant, room):
            self._findings.notes.append(f"room {tenant} {room} never had a message")
            return
        self._judge_room(found[0])

    async def _rows(self, statement: Any, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        async with self._connection.transaction():
            await self._connection.execute("SET TRANSACTION READ ONLY")
            cursor = await self._connection.execute(statement, parameters)
            return await cursor.fetchall()

    async def _heads(self) -> dict[int, tuple[int, int]]:
        found = await self._rows(_HEADS, {})
        wrong = self._findings.wrong
        ids = [row[0] for row in found]
        if ids != list(range(self._layout.shards)):
            wrong(
                f"table tidegate.shard has rows {ids}, not one for each of 0 … "
                f"{self._layout.shards - 1}"
            )
        starts = {}
        for shard, head, first, last in found:
            self._findings.done("shards")
            if last is None:
                continue  # no message yet, or retention dropped all of them
            if last != head:
                wrong(f"shard {shard}: its head is {head}, the log ends at seq {last}")
            starts[shard] = (first, min(head, last))
        return starts

    async def _shard(self, shard: int, first: int, head: int) -> None:
        after = first - 1
        while after < head:
            until = min(after + PAGE_SEQS, head)
            page = {"shard": shard, "after": after, "until": until, "named": NAMED}
            ((count, distinct, stray, odd),) = await self._rows(_PAGE, page)
            if count != until - after or distinct != count:
                ((begin,),) = await self._rows(_FIRST, {"shard": shard, "after": 0})
                if begin is None or begin > after + 1:
                    # Retention has dropped the beginning meanwhile.
                    after = head if begin is None else begin - 1
                    continue
                await self._name_seqs(shard, page)
            if stray:
                self._findings.wrong(f"shard {shard}: {stray} messages belong to another shard")
            if odd:
                self._findings.wrong(f"shard {shard}: {odd} messages have no payload, or two")
            for tenant, room in await self._rows(_ROOMLESS, page):
                self._findings.wrong(f"room {tenant} {room} has messages and no head")
            self._findings.done("messages in the log", count)
            after = until

    async def _name_seqs(self, shard: int, page: dict[str, Any]) -> None:
        for statement, what in ((_MISSING, "missing from"), (_DOUBLED, "twice in")):
            seqs = [str(row[0]) for row in await self._rows(statement, page)]
            if seqs:
                more = " …" if len(seqs) == NAMED else ""
                self._findings.wrong(f"shard {shard}: {what} the log: seq {', '.join(seqs)}{more}")

    async def _rooms(self) -> None:
        for tenant, room in await self._rows(_TWO_HEADS, {"named": NAMED}):
            self._findings.wrong(f"room {tenant} {room} has two heads")
        tenant, room = "", ""
        while found := await self._rows(
            _ROOMS, {"tenant": tenant, "room": room, "only": False, "limit": PAGE_ROOMS}
        ):
            for row in found:
                tenant, room = row[:2]
                self._judge_room(row)

    def _judge_room(self, row: tuple[Any, ...]) -> None:
        tenant, name, shard, head, right_shard, count, distinct, first, last, inverted = row
        wrong = self._findings.wrong
        self._findings.done("rooms")
        if shard != right_shard:
            wrong(f"room {tenant} {name} is in shard {shard}, by its name in {right_shard}")
        if count == 0:
            return  # retention dropped all of them
        if last != head:
            wrong(f"room {tenant} {name}: its head is {head}, the log ends at offset {last}")
        if distinct != last - first + 1:
            wrong(
                f"room {tenant} {name}: {last - first + 1 - distinct} offsets between {first} and "
                f"{last} are missing from the log"
            )
        if count != distinct:
            wrong(f"room {tenant} {name}: {count - distinct} offsets are twice in the log")
        if inverted:
            wrong(f"room {tenant} {name}: {inverted} messages stand in another order by seq")

    async def _outbox(self) -> None:
        ((count, stray, odd),) = await self._rows(_OUTBOX, {})
        self._findings.done("messages in the outbox", count)
        if stray:
            self._findings.wrong(f"outbox: {stray} messages belong to another shard")
        if odd:
            self._findings.wrong(f"outbox: {odd} messages lack what the log needs")

    async def _redactions(self) -> None:
        try:
            found = await self._rows(_CONTENTS, {"named": NAMED})
        except errors.InsufficientPrivilege:
            self._findings.notes.append(
                "redactions were not looked at: the role may not read tidegate.redaction"
            )
            return
        for tenant, room, offset in found:
            self._findings.wrong(
                f"room {tenant} {room}: offset {offset} was redacted and has content"
            )
