"""From a row of ``tidegate.message`` to a Message: one place for what is read from the log."""

from typing import Any

from outbox.message import Message

COLUMNS = (
    'shard, seq, tenant, room, "offset", batch, txid::text, tags, payload, payload_bin, '
    "(extract(epoch FROM created_at) * 1000000)::bigint"
)
"""What ``message`` takes. ``payload`` must arrive as bytes (``database.RawJsonLoader``)."""


def message(row: tuple[Any, ...]) -> Message:
    """The message of a row whose first columns are COLUMNS.

    JSON comes out without line feeds: it allows them as white space only, where a space says the
    same, and the client protocol splits frames at them.
    """
    shard, seq, tenant, room, offset, batch, txid, tags, payload, payload_bin, created_us = row[:11]
    if payload is None:
        return Message(
            shard, seq, tenant, room, offset, batch, txid, tags, payload_bin, True, created_us
        )
    if b"\n" in payload:
        payload = payload.replace(b"\n", b" ")
    return Message(shard, seq, tenant, room, offset, batch, txid, tags, payload, False, created_us)
