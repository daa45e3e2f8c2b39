"""Where a room stands."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoomHead:
    """A room's last offset, 0 if it never had a message, as of a seq of its shard."""

    offset: int
    seq: int
