"""The message: what travels from the log to the clients."""

from typing import NamedTuple


class Message(NamedTuple):
    """A message with its two positions.

    A tuple and not a dataclass because one is made for each message on the hot path.
    """

    shard: int
    seq: int
    """Position in the shard, dense from 1: proves continuity between log, stream and worker."""
    tenant: str
    room: str
    offset: int
    """Position in the room, dense from 1: what clients hold."""
    batch: str
    """Identity of the sequencing transaction: tells the same seq twice from a fork."""
    txid: str
    """The publisher's transaction id (decimal): clients see it as the tag ``txid``."""
    tags: dict[str, str] | None
    payload: bytes
    """JSON text in UTF-8 without line feeds, or any bytes if ``binary``."""
    binary: bool
    created_us: int
    """When the row was inserted, microseconds since 1970 UTC."""
