"""What a worker keeps of a room's messages, so that those who return need no store.

Pure: no I/O and no clock. A message never changes but by a redaction, whose notice makes the room
drop what it has (``drop_until``). Three things are kept, each within bounds of its own, and all of
them together, over all rooms of a worker, within those of a ``Budget``:

* the *ring*: the newest messages up to the room's top, without a hole. It grows forwards by what is
  delivered and backwards by what was read from a store;
* *pages* from a store that the ring does not hold: older ones, or larger than it may be;
* what was *encoded* of these for those who return.

Pages and what was encoded go when nobody asks for them any more.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice

from gateway.protocols.base import ClientProtocol
from outbox.message import Message

MESSAGE_BYTES = 512
"""What a message takes beside its payload, in CPython 3.11: the tuple and its strings."""
ENCODED_BYTES = 128
"""What an encoded publication takes beside its text."""
PAGES_SHARE = 4
"""The pages of one room may take this part of the budget. Beyond it no page is added: of many who
read the same long past one behind the other, each would find just the pages gone that it needs."""

Messages = tuple[Message, ...]


class Budget:
    """How much all rooms of a worker may keep together. The room that was neither written to nor
    returned to for the longest time is the first to lose what it has."""

    __slots__ = ("_memories", "max_bytes", "used_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._memories: OrderedDict[Memory, None] = OrderedDict()

    def charge(self, memory: "Memory", size_bytes: int) -> None:
        """``memory`` was used and is so large now. It may be empty afterwards."""
        self.used_bytes += size_bytes - memory.charged_bytes
        memory.charged_bytes = size_bytes
        if size_bytes:
            self._memories[memory] = None
            self._memories.move_to_end(memory)
        else:
            self._memories.pop(memory, None)
        while self.used_bytes > self.max_bytes:
            oldest, _ = self._memories.popitem(last=False)
            self.used_bytes -= oldest.charged_bytes
            oldest.charged_bytes = 0
            oldest.lose()


class _Page:
    __slots__ = ("encoded", "messages", "size_bytes", "used")

    def __init__(self, messages: Messages) -> None:
        self.messages = messages
        self.used = True
        self.size_bytes = _size_bytes(messages)
        self.encoded: dict[ClientProtocol, tuple[bytes, ...]] = {}


class _Replay:
    """What only those who return need: made by the first of them."""

    __slots__ = ("encoded", "encoded_bytes", "joined", "pages", "pages_bytes", "recent", "used")

    def __init__(self) -> None:
        self.pages: dict[int, _Page] = {}
        """By the offset that they follow."""
        self.pages_bytes = 0
        """With what was encoded of them."""
        self.recent: Messages = ()
        """The page that was last made of the ring."""
        self.encoded: dict[ClientProtocol, dict[int, bytes]] = {}
        """Of the ring's messages, by offset."""
        self.joined: dict[ClientProtocol, tuple[Messages, bytes]] = {}
        """The page that was last answered, and how."""
        self.encoded_bytes = 0
        """Of ``encoded`` and ``joined``."""
        self.used = True
        """Whether anyone asked for more than pages."""

    def forget_ring(self) -> None:
        """Drops all but the pages."""
        self.recent = ()
        self.encoded.clear()
        self.joined.clear()
        self.encoded_bytes = 0


class Memory:
    """One room's. ``ring_messages`` and ``ring_bytes`` (of payload) bound the ring."""

    __slots__ = (
        "_budget",
        "_closed",
        "_replay",
        "_ring_bytes",
        "_ring_max_bytes",
        "charged_bytes",
        "ring",
    )

    def __init__(self, ring_messages: int, ring_bytes: int, budget: Budget) -> None:
        self.ring: deque[Message] = deque(maxlen=ring_messages)
        self.charged_bytes = 0
        """For the budget alone."""
        self._budget = budget
        self._ring_bytes = 0
        self._ring_max_bytes = ring_bytes
        self._replay: _Replay | None = None
        self._closed = False

    # What comes

    def append(self, messages: list[Message]) -> None:
        """Messages that follow the ring's last (any, if it is empty)."""
        ring = self.ring
        if self._closed or not ring.maxlen:
            return
        for message in messages:
            if len(ring) == ring.maxlen:
                self._drop_first()
            ring.append(message)
            self._ring_bytes += len(message.payload)
        while self._ring_bytes > self._ring_max_bytes:
            self._drop_first()
        self._charge()

    def take(self, messages: Messages, top: int) -> None:
        """A page from a store, dense; ``top`` is where the ring ends or, if it is empty, would."""
        first = self.ring[0].offset if self.ring else top + 1
        if self._closed or not messages or messages[0].offset >= first:
            return
        if messages[-1].offset < first - 1 or not self._prepend(
            messages[: first - messages[0].offset]
        ):
            self._keep(messages)
        self._charge()

    def _prepend(self, messages: Messages) -> bool:
        """As many as fit, the newest of them; whether all did."""
        ring = self.ring
        for message in reversed(messages):
            size_bytes = self._ring_bytes + len(message.payload)
            if len(ring) == ring.maxlen or size_bytes > self._ring_max_bytes:
                return False
            ring.appendleft(message)
            self._ring_bytes = size_bytes
        return True

    def _keep(self, messages: Messages) -> None:
        replay = self._returning()
        after = messages[0].offset - 1
        if after in replay.pages:
            return
        page = _Page(messages)
        if replay.pages_bytes + page.size_bytes <= self._budget.max_bytes // PAGES_SHARE:
            replay.pages[after] = page
            replay.pages_bytes += page.size_bytes

    # What is known

    def page(self, offset: int, top: int | None, limit: int, limit_bytes: int) -> Messages | None:
        """Messages right after ``offset``, at most so many and about so large; none of them if
        that is ``top``, where the ring ends; None if they are not here."""
        held = len(self.ring)
        if top is not None and 0 <= top - offset <= held:
            return self._of_ring(held - (top - offset), limit, limit_bytes)
        replay = self._replay
        if replay is None or (page := replay.pages.get(offset)) is None:
            return None
        page.used = True
        return page.messages

    def _of_ring(self, start: int, limit: int, limit_bytes: int) -> Messages:
        ring = self.ring
        if start == len(ring):
            return ()
        replay = self._returning()
        recent = replay.recent
        if not recent or recent[0] is not ring[start] or recent[-1] is not ring[-1]:
            recent = replay.recent = _within(islice(ring, start, None), limit, limit_bytes)
        return recent

    def publications(self, protocol: ClientProtocol, messages: Messages) -> tuple[bytes, ...]:
        """Encoded, once for all who return if the messages are kept here."""
        if self._in_ring(messages):
            replay = self._returning()
            made = replay.encoded.setdefault(protocol, {})
            for message in messages:
                if message.offset not in made:
                    part = made[message.offset] = protocol.publication(message)
                    replay.encoded_bytes += len(part) + ENCODED_BYTES
            found = tuple(made[message.offset] for message in messages)
            self._charge()
            return found
        page = self._page_of(messages)
        if page is None:
            return tuple(map(protocol.publication, messages))
        if protocol not in page.encoded:
            found = page.encoded[protocol] = tuple(map(protocol.publication, messages))
            size_bytes = sum(map(len, found)) + ENCODED_BYTES * len(found)
            page.size_bytes += size_bytes
            self._returning().pages_bytes += size_bytes
            self._charge()
            return found
        return page.encoded[protocol]

    def joined(self, protocol: ClientProtocol, messages: Messages) -> bytes:
        """The same as a reply carries them: made once for those who come from the same offset."""
        replay = self._replay
        known = None if replay is None else replay.joined.get(protocol)
        if replay is not None and known is not None and known[0] is messages:
            replay.used = True
            return known[1]
        page = protocol.page(self.publications(protocol, messages))
        if self._in_ring(messages) or self._page_of(messages) is not None:
            replay = self._returning()
            before = replay.joined.get(protocol)
            replay.joined[protocol] = (messages, page)
            replay.encoded_bytes += len(page) - (0 if before is None else len(before[1]))
            self._charge()
        return page

    def _in_ring(self, messages: Messages) -> bool:
        ring = self.ring
        if not ring or not messages:
            return False
        # The ends decide: between them a page and the ring are dense, and what the ring took of a
        # page is a whole part of it.
        first = messages[0].offset - ring[0].offset
        last = first + len(messages) - 1
        return (
            first >= 0
            and last < len(ring)
            and ring[first] is messages[0]
            and ring[last] is messages[-1]
        )

    def _page_of(self, messages: Messages) -> _Page | None:
        if self._replay is None or not messages:
            return None
        page = self._replay.pages.get(messages[0].offset - 1)
        return page if page is not None and page.messages is messages else None

    # What goes

    def drop_until(self, offset: int) -> None:
        """A message up to ``offset`` may not be told any more: those before it go with it, since
        the ring has no hole, and whatever was kept for those who return."""
        self._replay = None
        while self.ring and self.ring[0].offset <= offset:
            self._drop_first()
        self._charge()

    def age(self) -> None:
        """Drop what is kept for those who return and none has asked for since this was last
        called."""
        replay = self._replay
        if replay is None:
            return
        for after, page in list(replay.pages.items()):
            if not page.used:
                del replay.pages[after]
                replay.pages_bytes -= page.size_bytes
            page.used = False
        if not replay.used:
            replay.forget_ring()
            if not replay.pages:
                self._replay = None
        replay.used = False
        self._charge()

    def clear(self) -> None:
        """Drop everything."""
        self.lose()
        self._charge()

    def close(self) -> None:
        """Drop everything, and keep nothing from now on."""
        self.clear()
        self._closed = True

    def lose(self) -> None:
        """For the budget: ``clear`` without a charge."""
        self.ring.clear()
        self._ring_bytes = 0
        self._replay = None

    def _drop_first(self) -> None:
        message = self.ring.popleft()
        self._ring_bytes -= len(message.payload)
        replay = self._replay
        if replay is not None:
            for made in replay.encoded.values():
                part = made.pop(message.offset, None)
                if part is not None:
                    replay.encoded_bytes -= len(part) + ENCODED_BYTES

    def _returning(self) -> _Replay:
        if self._replay is None:
            self._replay = _Replay()
        self._replay.used = True
        return self._replay

    def _charge(self) -> None:
        size_bytes = self._ring_bytes + MESSAGE_BYTES * len(self.ring)
        if self._replay is not None:
            size_bytes += self._replay.pages_bytes + self._replay.encoded_bytes
        self._budget.charge(self, size_bytes)


def _within(messages: Iterable[Message], limit: int, limit_bytes: int) -> Messages:
    """The first of them: at least one, at most ``limit``, about ``limit_bytes`` of payload."""
    page: list[Message] = []
    for message in islice(messages, limit):
        limit_bytes -= len(message.payload)
        if page and limit_bytes < 0:
            break
        page.append(message)
    return tuple(page)


def _size_bytes(messages: Messages) -> int:
    return sum(len(message.payload) for message in messages) + MESSAGE_BYTES * len(messages)
