"""The hub: all rooms of one worker, and the point up to which it has read each shard.

Pure and synchronous. ``deliver`` is the hot path: no await, lock or log; a message is encoded once
for each client protocol and the same bytes are written to every live subscription.
"""

from collections.abc import Iterable, Iterator

from gateway.memory import Budget
from gateway.room import Key, Room
from outbox.message import Message
from outbox.sharding import shard_of

MEMORY_BYTES = 268_435_456


class Hub:
    """``shards`` and ``spread`` are those of the database (``tidegate.meta``). ``ring_messages``
    and ``ring_bytes`` bound what each room keeps of its newest messages, ``memory_bytes`` what all
    rooms keep together."""

    __slots__ = (
        "_ring_bytes",
        "_ring_messages",
        "_shards",
        "_spread",
        "budget",
        "positions",
        "rooms",
    )

    def __init__(
        self,
        shards: int,
        spread: int,
        ring_messages: int,
        ring_bytes: int,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self.rooms: dict[Key, Room] = {}
        self.positions: dict[int, int] = {}
        """Shard → seq up to which messages were taken for delivery; only shards that are read."""
        self._shards = shards
        self._spread = spread
        self._ring_messages = ring_messages
        self._ring_bytes = ring_bytes
        self.budget = Budget(memory_bytes)

    def shard(self, key: Key) -> int:
        """The shard that carries the room."""
        return shard_of(key[0], key[1], self._shards, self._spread)

    def open(self, key: Key) -> Room:
        """The room, made if it is new. Its shard must be one that is read."""
        room = self.rooms.get(key)
        if room is None:
            room = self.rooms[key] = Room(
                key, self.shard(key), self._ring_messages, self._ring_bytes, self.budget
            )
        room.empty_since = None
        return room

    def deliver(self, shard: int, messages: list[Message]) -> Iterator[None]:
        """Deliver messages of a shard that follow its position without a hole, in order of seq.

        A generator, see ``Room.deliver``. The position moves at once: a room that is opened between
        two slices is not given these messages, so it needs a history that holds them.
        """
        rooms = self.rooms
        batches: dict[Room, list[Message]] = {}
        for message in messages:
            room = rooms.get((message.tenant, message.room))
            if room is not None:
                batch = batches.get(room)
                if batch is None:
                    batches[room] = [message]
                else:
                    batch.append(message)
        if shard in self.positions:
            self.positions[shard] = messages[-1].seq
        try:
            for room in list(batches):
                yield from room.deliver(batches.pop(room))
        finally:
            # The driver gave up between two slices.
            for room in batches:
                room.forget()

    def lose(self, shard: int, position: int) -> None:
        """Messages of the shard up to ``position`` cannot be had any more: each room must ask the
        log where it stands, which tells those who missed something."""
        for room in self.rooms.values():
            if room.shard == shard:
                room.forget()
        if shard in self.positions:
            self.positions[shard] = position

    def restart(self) -> list[Room]:
        """The epoch changed: forget every position. Returns the rooms, whose subscribers must be
        told to subscribe again."""
        rooms = list(self.rooms.values())
        self.rooms.clear()
        # Reads of these rooms may be under way: what they bring is of no interest.
        self.budget = Budget(self.budget.max_bytes)
        self.positions.clear()
        return rooms

    def sweep(self, now: float, linger_s: float, rooms: Iterable[Room] | None = None) -> set[int]:
        """Drop rooms that have been empty for ``linger_s``, and what rooms keep for those who
        return if nobody did since the last sweep; returns shards nobody needs any more.

        Rooms linger since those who lose a connection come back within seconds. ``rooms`` are some
        that were there a moment ago, without it it is all of them: with very many that takes long.
        """
        for room in list(self.rooms.values()) if rooms is None else rooms:
            room.memory.age()
            if room.occupied:
                room.empty_since = None
            elif room.empty_since is None:
                room.empty_since = now
            elif now - room.empty_since >= linger_s and self.rooms.get(room.key) is room:
                del self.rooms[room.key]
                # A read may be under way for someone who has left.
                room.memory.close()
        unneeded = set(self.positions)
        for room in self.rooms.values():
            if not unneeded:
                break
            unneeded.discard(room.shard)
        return unneeded
