"""A room as one worker sees it: its head, its recent messages, its subscriptions.

Pure: no I/O and no clock. The invariants that delivery rests on:

* ``top`` is the offset up to which this worker knows the room, or None if it does not know yet.
* ``memory.ring`` holds the newest messages up to ``top`` without a hole (it may be empty).
* A *live* subscription has been given everything up to ``top`` (while a large room is written to in
  slices, those not yet written to stand at ``_before``). Its own ``offset`` is stale.
* A subscription that is not live has been given everything up to its ``offset`` and gets the rest
  by replay. It becomes live only in the moment in which its ``offset`` equals ``top``.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from typing import Protocol, TypeAlias

from gateway.memory import Budget, Memory, Messages
from gateway.protocols.base import ClientProtocol
from outbox.message import Message
from outbox.tombstone import redacted_offset

Key: TypeAlias = tuple[str, str]
"""Tenant and room name."""

FRAME_MAX_BYTES = 65_536
"""Publications of one read are joined in a frame up to about this size."""
PORTION_BYTES = 262_144
"""Payload that is written to a subscription in one go; a single message may be larger."""
SLICE = 500
"""Subscriptions written to before the event loop gets its turn."""


class Owner(Protocol):
    """Whose subscription it is."""

    def wake(self, subscription: "Subscription") -> None:
        """The subscription must be caught up by replay."""
        ...


class Sink(Protocol):
    """Where the frames of a subscription go."""

    @property
    def send(self) -> Callable[[bytes], int]:
        """Takes a finished frame, or a beginning of it: gives how many bytes, or raises OSError if
        none. Whatever it did not take must be given to ``spill`` before anything else is sent."""
        ...

    def spill(self, frame: bytes, sent: int) -> None:
        """Keeps the rest of a frame of which so many bytes were sent."""
        ...


class Subscription:
    """A session's place in a room."""

    __slots__ = ("live", "offset", "owner", "protocol", "room", "sink")

    def __init__(
        self,
        room: "Room",
        protocol: ClientProtocol,
        sink: Sink,
        owner: "Owner",
    ) -> None:
        self.room = room
        self.protocol = protocol
        self.sink = sink
        self.owner = owner
        self.offset = 0
        self.live = False


@dataclass(frozen=True, slots=True)
class Glance:
    """How often a room was told that what it knew is void, at the time when a read began."""

    generation: int
    redactions: int


class Room:
    """One room's state. ``ring_messages`` and ``ring_bytes`` bound its ring, ``budget`` the memory
    of all rooms together."""

    __slots__ = (
        "_before",
        "_redactions",
        "_slices",
        "_waiting",
        "empty_since",
        "generation",
        "key",
        "live",
        "memory",
        "others",
        "shard",
        "top",
    )

    def __init__(
        self,
        key: Key,
        shard: int,
        ring_messages: int,
        ring_bytes: int,
        budget: Budget,
    ) -> None:
        self.key = key
        self.shard = shard
        self.top: int | None = None
        self.memory = Memory(ring_messages, ring_bytes, budget)
        self.live: dict[ClientProtocol, dict[Subscription, None]] = {}
        self.others: set[Subscription] = set()
        """Subscriptions that are being caught up."""
        self.empty_since: float | None = None
        self.generation = 0
        """Counts how often the room was forgotten."""
        self._redactions = 0
        """Counts the notices of redactions."""
        self._waiting: set[Subscription] = set()
        self._slices: Slices | None = None
        self._before = 0

    @property
    def occupied(self) -> bool:
        """Whether anyone is in the room."""
        return bool(self.others) or any(self.live.values())

    def subscriptions(self) -> list[Subscription]:
        """Everyone in the room."""
        return [*self.others, *(s for of_protocol in self.live.values() for s in of_protocol)]

    # Coming, going, catching up

    def join(self, subscription: Subscription) -> None:
        """Enter the room; nothing is written until ``go_live``."""
        self.others.add(subscription)

    def leave(self, subscription: Subscription) -> None:
        """Leave the room, whatever the state."""
        if subscription.live:
            self.fall_behind(subscription)
        self.others.discard(subscription)
        self._waiting.discard(subscription)

    def go_live(self, subscription: Subscription) -> bool:
        """Hand over to live delivery if the subscription has all there is; else False."""
        if subscription.live:
            return True
        if self.top is None or subscription.offset != self.top or subscription not in self.others:
            return False
        self.others.remove(subscription)
        self._waiting.discard(subscription)
        self.live.setdefault(subscription.protocol, {})[subscription] = None
        subscription.live = True
        return True

    def fall_behind(self, subscription: Subscription) -> None:
        """Stop writing to a live subscription and note up to where it was given messages."""
        if not subscription.live:
            return
        assert self.top is not None
        subscription.live = False
        del self.live[subscription.protocol][subscription]
        self.others.add(subscription)
        subscription.offset = self.top
        if self._slices is not None and self._slices.withdraw(subscription):
            subscription.offset = self._before

    def await_offset(self, subscription: Subscription) -> None:
        """The subscription stands ahead of ``top``: it is woken when the room has come as far."""
        self._waiting.add(subscription)

    def anchor(self, head: int, generation: int) -> None:
        """The room's head, from a store that is not behind this worker.

        Does nothing once the room is known (deliveries know better), nor if it was forgotten since
        the reading began at ``generation``: what was delivered in between could lie beyond it.
        """
        if self.top is None and generation == self.generation:
            self.top = head

    def forget(self) -> None:
        """This worker may have missed messages: trust nothing, replay everyone."""
        for of_protocol in list(self.live.values()):
            for subscription in list(of_protocol):
                self.fall_behind(subscription)
        self.generation += 1
        self.top = None
        self.memory.clear()
        self._waiting.clear()
        for subscription in list(self.others):
            subscription.owner.wake(subscription)

    # Replay

    def page(self, offset: int, limit: int, limit_bytes: int) -> Messages | None:
        """The messages after ``offset`` from memory, see ``Memory.page``."""
        return self.memory.page(offset, self.top, limit, limit_bytes)

    def glance(self) -> Glance:
        """To be taken before a read of a store begins, for ``take``."""
        return Glance(self.generation, self._redactions)

    def take(self, messages: Messages, glance: Glance) -> None:
        """Remember a page of a store, which was read since ``glance``: dense, and true for a seq
        that is not before what this worker had taken for delivery then.

        Does nothing if the room was forgotten meanwhile or a redaction became known: the page may
        hold the content, and the notice, which drops it from memory, does not come again.
        """
        if self.top is not None and glance == self.glance():
            self.memory.take(messages, self.top)

    # Delivery

    def deliver(self, messages: list[Message]) -> Iterator[None]:
        """Take messages in order and write them to the live subscriptions.

        A generator: between two slices of a large room it yields, so that the driver can let the
        event loop run. It must be exhausted before this room's next call.
        """
        portions = _portions(messages)
        try:
            while portions:
                yield from self._deliver(portions.popleft())
        finally:
            if portions:
                # The driver gave up between two slices.
                self.forget()

    def _deliver(self, messages: list[Message]) -> Iterator[None]:
        if self.top is not None:
            if messages[0].offset <= self.top:
                # Read again after a reconnect, or already known from a store. What that told of
                # older messages may have been older than the notice.
                self._redact([m for m in messages if m.offset <= self.top])
                messages = [m for m in messages if m.offset > self.top]
                if not messages:
                    return
            if messages[0].offset != self.top + 1:
                self.forget()
        before = messages[0].offset - 1
        self.top = messages[-1].offset
        self.memory.append(messages)
        self._redact(messages)
        if self._waiting:
            self._wake_waiting()
        batches = [
            (encode(protocol, self.key[1], messages), list(subscriptions))
            for protocol, subscriptions in self.live.items()
            if subscriptions
        ]
        if sum(len(subscriptions) for _, subscriptions in batches) <= SLICE:
            for frames, subscriptions in batches:
                _send(frames, subscriptions)
            return
        # All of them at once: who goes live between two slices has these messages already.
        slices = self._slices = Slices(batches)
        self._before = before
        try:
            while slices.send(SLICE):
                yield
        finally:
            # The driver gave up between two slices: those left over get the rest by replay.
            self._slices = None
            for subscription in slices.rest():
                self.fall_behind(subscription)
                subscription.offset = before
                subscription.owner.wake(subscription)

    def _redact(self, messages: list[Message]) -> None:
        """Notices of redactions among them: what they speak of is for the stores to tell."""
        for message in messages:
            if message.tags and (offset := redacted_offset(message)) is not None:
                self._redactions += 1
                self.memory.drop_until(min(offset, message.offset - 1))

    def _wake_waiting(self) -> None:
        assert self.top is not None
        for subscription in [s for s in self._waiting if s.offset <= self.top]:
            self._waiting.discard(subscription)
            subscription.owner.wake(subscription)


def _send(frames: bytes, subscriptions: Iterable[Subscription]) -> None:
    """The innermost loop."""
    size = len(frames)
    for subscription in subscriptions:
        sink = subscription.sink
        try:
            sent = sink.send(frames)
        except OSError:
            sent = 0
        if sent != size:
            sink.spill(frames, sent)


class Slices:
    """Finished frames on their way to many subscriptions, some at a time, each to its own.

    What is done for each is next to nothing: the iterators know how far they are, and who is still
    to come is worked out only when one of them leaves between two slices.
    """

    __slots__ = ("_batches", "_places", "_withdrawn")

    def __init__(self, batches: list[tuple[bytes, list[Subscription]]]) -> None:
        self._batches = [(frames, iter(to), to) for frames, to in batches]
        self._places: dict[Subscription, tuple[int, int]] | None = None
        self._withdrawn: set[Subscription] = set()

    def send(self, count: int) -> bool:
        """Sends to so many more; whether any are left then."""
        withdrawn = self._withdrawn
        for frames, left, _ in self._batches:
            before = length_hint(left)
            some: Iterable[Subscription] = islice(left, count)
            _send(frames, (s for s in some if s not in withdrawn) if withdrawn else some)
            count -= before - length_hint(left)
        return any(length_hint(left) for _, left, _ in self._batches)

    def withdraw(self, subscription: Subscription) -> bool:
        """Takes out one that was not sent to yet; False if it was, or is not among them."""
        if self._places is None:
            self._places = {
                subscription: (batch, index)
                for batch, (_, _, to) in enumerate(self._batches)
                for index, subscription in enumerate(to)
            }
        place = self._places.get(subscription)
        if place is None or subscription in self._withdrawn:
            return False
        _, left, to = self._batches[place[0]]
        if place[1] < len(to) - length_hint(left):
            return False
        self._withdrawn.add(subscription)
        return True

    def rest(self) -> list[Subscription]:
        """Those that were not sent to and were not taken out. Ends it."""
        return [s for _, left, _ in self._batches for s in left if s not in self._withdrawn]


def _portions(messages: list[Message]) -> deque[list[Message]]:
    """Portions of limited size: a full buffer is noticed between two of them."""
    portions: deque[list[Message]] = deque()
    left_bytes = 0
    for message in messages:
        left_bytes -= len(message.payload)
        if left_bytes < 0 or not portions:
            portions.append([])
            left_bytes = PORTION_BYTES - len(message.payload)
        portions[-1].append(message)
    return portions


def encode(protocol: ClientProtocol, channel: str, messages: list[Message]) -> bytes:
    """Finished WebSocket frames of the messages as pushes, joined for one write."""
    return pushes(protocol, channel, map(protocol.publication, messages))


def pushes(protocol: ClientProtocol, channel: str, publications: Iterable[bytes]) -> bytes:
    """The same of encoded publications."""
    frames: list[bytes] = []
    parts: list[bytes] = []
    size = 0
    for publication in publications:
        part = protocol.deliver(channel, publication)
        if parts and size + len(part) > FRAME_MAX_BYTES:
            frames.append(protocol.frame(parts))
            parts, size = [], 0
        parts.append(part)
        size += len(part)
    frames.append(protocol.frame(parts))
    return b"".join(frames)
