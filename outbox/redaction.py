"""Redaction: one message of the log becomes a tombstone, and a notice of it goes out.

Both are one transaction (``tidegate.redact``). The notice is what carries the redaction on: when a
relay appends it, the content leaves Redis in the same step; when a gateway reads it, the content
leaves its memory; when a client gets it, it knows. So a relay, a gateway or a Redis that comes late
meets the notice after the content, whatever failed in between.
"""

from dataclasses import dataclass

from psycopg import errors

from outbox.database import Connection
from outbox.errors import OutboxError, SchemaMismatch
from outbox.layout import layout, version_problem

NEEDED_SCHEMA = 2


@dataclass(frozen=True, slots=True)
class Redaction:
    """What stands in Postgres now."""

    epoch: str
    shard: int
    seq: int
    """Position of the tombstone."""
    first: bool
    """Whether this call redacted it; false if it was before."""
    txid: str
    """The transaction that redacted it: its notice carries it."""
    part: str
    """The partition that holds the message, and until VACUUM its old content."""


async def redact(
    connection: Connection, tenant: str, room: str, offset: int, reason: str | None = None
) -> Redaction:
    """Redacts one message; does nothing if it is redacted already.

    Raises:
        OutboxError: there is no such message: it has no offset yet, or retention dropped it.
        SchemaMismatch: the schema is older than redaction.
        psycopg.Error: among others, the role may not (``tidegate.allow_redact``).
    """
    found = await layout(connection)
    problem = version_problem(found.schema_version, found.oldest_reader, NEEDED_SCHEMA)
    if problem:
        raise SchemaMismatch(problem)
    try:
        cursor = await connection.execute(
            "SELECT shard, seq, first, txid::text, part FROM tidegate.redact(%s, %s, %s, %s)",
            (tenant, room, offset, reason),
        )
    except errors.NoDataFound as error:
        raise OutboxError(error.diag.message_primary or "there is no such message") from None
    row = await cursor.fetchone()
    assert row is not None
    return Redaction(found.epoch, *row)


async def notice_head(connection: Connection, redaction: Redaction) -> int | None:
    """A seq that is not before that of the notice; None while it waits in the outbox.

    Raises OutboxError if the epoch has changed meanwhile: then every gateway has dropped its
    memory, and Redis is filled anew.
    """
    cursor = await connection.execute(
        """
        SELECT m.epoch, s.head,
               EXISTS (SELECT FROM tidegate.outbox o
                       WHERE o.shard = %(shard)s AND o.txid = %(txid)s::xid8)
        FROM tidegate.meta m, tidegate.shard s WHERE s.id = %(shard)s
        ORDER BY s.head DESC LIMIT 1
        """,
        {"shard": redaction.shard, "txid": redaction.txid},
    )
    row = await cursor.fetchone()
    if row is None or row[0] != redaction.epoch:
        raise OutboxError("the epoch has changed meanwhile: run the command again")
    return None if row[2] else int(row[1])
