"""The form of a stream entry: what the relay appends and the gateways read.

An entry has two fields: ``b``, the batch (read by the append script to tell a repetition from a
fork), and ``m``, msgpack of ``[seq, tenant, room, offset, created_us, txid, tags, payload,
binary]``. The bus and a room's replay stream hold the same blob; the entry's id is the seq in the
one and the offset in the other. New fields go to the end of the array: readers ignore what they do
not know.
"""

import msgpack

from outbox.message import Message

BATCH_FIELD = b"b"
MESSAGE_FIELD = b"m"


def encode(message: Message) -> bytes:
    """The blob of field ``m``."""
    packed: bytes = msgpack.packb(
        (
            message.seq,
            message.tenant,
            message.room,
            message.offset,
            message.created_us,
            message.txid,
            message.tags,
            message.payload,
            message.binary,
        )
    )
    return packed


def decode(shard: int, batch: str, blob: bytes) -> Message:
    """The message of a blob; ``shard`` comes from the stream's key, ``batch`` from field ``b``."""
    seq, tenant, room, offset, created_us, txid, tags, payload, binary, *_ = msgpack.unpackb(blob)
    return Message(shard, seq, tenant, room, offset, batch, txid, tags, payload, binary, created_us)
