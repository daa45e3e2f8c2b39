"""What a room keeps for those who return, rule by rule; in any order: ``test_hub_delivery.py``."""

import pytest

from gateway.memory import ENCODED_BYTES, MESSAGE_BYTES, PAGES_SHARE, Budget, Memory, Messages
from gateway.protocols.centrifuge_json import CentrifugeJSON
from outbox.message import Message

ONE, OTHER = CentrifugeJSON(), CentrifugeJSON()
MANY = 1_000_000
TOP = 20
ONE_BYTES = MESSAGE_BYTES + 8
"""What is counted for a message."""


class Counting(CentrifugeJSON):
    """Knows how much it had to encode."""

    encoded = 0

    def publication(self, message: Message) -> bytes:
        self.encoded += 1
        return super().publication(message)


def message(offset: int, size: int = 8) -> Message:
    return Message(0, offset, "t", "r", offset, "b", "1", None, b"%*d" % (size, offset), False, 0)


def page(first: int, last: int) -> Messages:
    return tuple(message(offset) for offset in range(first, last + 1))


def make(messages: int = 100, size_bytes: int = MANY, held: Messages = ()) -> Memory:
    memory = Memory(messages, size_bytes, Budget(MANY))
    memory.append(list(held))
    return memory


def offsets(memory: Memory) -> list[int]:
    return [message.offset for message in memory.ring]


def after(memory: Memory, offset: int, top: int | None = TOP) -> list[int] | None:
    found = memory.page(offset, top, 500, MANY)
    return None if found is None else [message.offset for message in found]


# The ring grows backwards


@pytest.mark.parametrize(
    ("held", "found", "ring"),
    [
        ((), (15, 20), (15, 20)),
        # Right before its first message, and over it.
        ((18, 20), (15, 17), (15, 20)),
        ((18, 20), (15, 19), (15, 20)),
        ((18, 20), (15, 25), (15, 20)),
        # Beyond the top: the ring ends there, the rest will be delivered.
        ((), (15, 25), (15, 20)),
        # With a hole between.
        ((18, 20), (10, 16), (18, 20)),
        ((), (10, 19), ()),
        # Nothing new.
        ((18, 20), (18, 20), (18, 20)),
        ((18, 20), (19, 22), (18, 20)),
        ((), (21, 25), ()),
    ],
)
def test_a_page_that_reaches_the_ring_is_put_before_it(
    held: tuple[int, int] | tuple[()], found: tuple[int, int], ring: tuple[int, int] | tuple[()]
) -> None:
    memory = make(held=page(*held) if held else ())
    memory.take(page(*found), TOP)
    assert offsets(memory) == (list(range(ring[0], ring[1] + 1)) if ring else [])


@pytest.mark.parametrize(("messages", "size_bytes"), [(5, MANY), (100, 47)])
def test_the_newest_that_fit_are_taken_and_none_of_the_ring_goes(
    messages: int, size_bytes: int
) -> None:
    memory = make(messages, size_bytes, page(19, 20))
    memory.take(page(10, 18), TOP)
    assert offsets(memory) == [16, 17, 18, 19, 20]
    assert after(memory, 15) == [16, 17, 18, 19, 20]
    # Those who stand where the page began are served all the same.
    assert after(memory, 9) == list(range(10, 19))


def test_what_the_ring_had_stays_where_a_page_lies_over_it() -> None:
    held = page(18, 20)
    memory = make(held=held)
    memory.take(page(15, 19), TOP)
    assert all(a is b for a, b in zip(held, list(memory.ring)[-3:], strict=True))


def test_without_a_ring_pages_are_kept() -> None:
    memory = make(messages=0)
    memory.append(list(page(20, 20)))
    memory.take(page(15, 20), TOP)
    assert offsets(memory) == []
    assert after(memory, 14) == [15, 16, 17, 18, 19, 20]


# Pages


def test_pages_that_do_not_reach_the_ring_serve_those_behind_each_other() -> None:
    memory = make(held=page(18, 20))
    memory.take(page(1, 6), TOP)
    memory.take(page(7, 12), TOP)
    assert after(memory, 0) == [1, 2, 3, 4, 5, 6]
    assert after(memory, 6) == [7, 8, 9, 10, 11, 12]
    assert after(memory, 12) is None
    assert after(memory, 3) is None
    assert after(memory, 0, None) == [1, 2, 3, 4, 5, 6]


def test_so_many_pages_are_kept_and_those_that_are_read_stay() -> None:
    kept_max = 4
    memory = Memory(100, MANY, Budget(kept_max * PAGES_SHARE * 5 * ONE_BYTES))
    memory.append([message(1_000)])

    def kept() -> list[int]:
        return [n for n in range(10) if after(memory, 10 * n, 1_000) is not None]

    for number in range(10):
        memory.take(page(10 * number + 1, 10 * number + 5), 1_000)
    assert kept() == [0, 1, 2, 3]
    memory.age()
    for _ in range(3):
        assert after(memory, 10, 1_000) is not None
        memory.age()
    memory.take(page(91, 95), 1_000)
    assert kept() == [1, 9]


def test_a_page_is_made_of_the_ring_within_the_limits() -> None:
    memory = make(held=page(1, 20))
    for limit, limit_bytes, count in ((3, MANY, 3), (100, 40, 5), (100, 41, 5), (100, 0, 1)):
        found = memory.page(4, TOP, limit, limit_bytes)
        memory.age()
        memory.age()
        assert found == page(5, 4 + count)
    assert after(memory, TOP) == []
    assert after(memory, TOP + 1) is None
    assert after(memory, 4, None) is None


def test_a_page_of_the_ring_is_the_same_until_something_is_delivered() -> None:
    memory = make(held=page(1, 20))
    first = memory.page(4, TOP, 500, MANY)
    assert memory.page(4, TOP, 500, MANY) is first
    assert after(memory, 5) == list(range(6, 21))
    memory.append(list(page(21, 22)))
    assert after(memory, 5, 22) == list(range(6, 23))
    assert after(memory, 4, 22) == list(range(5, 23))


# Encoded


def test_those_who_return_are_encoded_for_once() -> None:
    protocol = Counting()
    memory = make(held=page(1, 20))
    for offset in (4, 9, 4, 2):
        found = memory.page(offset, TOP, 500, MANY)
        assert found is not None
        wanted = tuple(map(ONE.publication, found))
        assert memory.publications(protocol, found) == wanted
        assert memory.joined(protocol, found) == ONE.page(wanted)
    assert protocol.encoded == 18
    other = Counting()
    memory.publications(other, page_of(memory, 2))
    assert (protocol.encoded, other.encoded) == (18, 18)


def test_pages_are_encoded_once_too() -> None:
    protocol = Counting()
    memory = make(held=page(20, 20))
    memory.take(page(1, 6), TOP)
    for _ in range(3):
        found = page_of(memory, 0)
        assert memory.publications(protocol, found) == tuple(map(ONE.publication, page(1, 6)))
        assert memory.joined(protocol, found) == ONE.page(map(ONE.publication, page(1, 6)))
    assert protocol.encoded == 6


def page_of(memory: Memory, offset: int) -> Messages:
    found = memory.page(offset, TOP, 500, MANY)
    assert found is not None
    return found


def test_what_is_not_kept_is_not_kept_encoded() -> None:
    """A page that the room did not take may hold what it must not."""
    memory = make(held=page(15, 20))
    stale = tuple(m._replace(payload=b"stale") for m in page(15, 20))
    ring = tuple(memory.ring)
    before = memory.charged_bytes
    for messages in (stale, (*stale[:5], ring[5]), (ring[0], *stale[1:]), page(1, 3)):
        wanted = tuple(map(ONE.publication, messages))
        assert memory.publications(ONE, messages) == wanted
        assert memory.joined(ONE, messages) == ONE.page(wanted)
    assert memory.charged_bytes == before
    assert memory.publications(ONE, page_of(memory, 14)) == tuple(
        map(ONE.publication, page(15, 20))
    )


def test_what_is_encoded_goes_with_the_message() -> None:
    memory = make(messages=6, held=page(15, 20))
    memory.publications(ONE, page_of(memory, 14))
    full = memory.charged_bytes
    part = len(ONE.publication(message(15))) + ENCODED_BYTES
    memory.append(list(page(21, 23)))
    assert memory.charged_bytes == full - 3 * part


# Going


def test_a_redaction_takes_along_what_was_kept_for_those_who_return() -> None:
    memory = make(held=page(15, 20))
    memory.take(page(1, 6), TOP)
    memory.joined(ONE, page_of(memory, 0))
    memory.joined(ONE, page_of(memory, 14))
    memory.drop_until(16)
    assert offsets(memory) == [17, 18, 19, 20]
    assert after(memory, 0) is None
    assert memory.charged_bytes == sum(MESSAGE_BYTES + 8 for _ in range(4))


def test_what_nobody_asks_for_goes_and_the_ring_stays() -> None:
    memory = make(held=page(15, 20))
    ring_bytes = memory.charged_bytes
    memory.take(page(1, 6), TOP)
    memory.joined(ONE, page_of(memory, 0))
    memory.joined(ONE, page_of(memory, 14))
    for _ in range(3):
        memory.age()
        assert after(memory, 0) is not None
    for _ in range(3):
        memory.age()
        memory.joined(ONE, page_of(memory, 14))
    assert after(memory, 0) is None
    assert memory.charged_bytes > ring_bytes
    memory.age()
    memory.age()
    assert memory.charged_bytes == ring_bytes
    assert after(memory, 14) == [15, 16, 17, 18, 19, 20]


def test_a_memory_that_was_closed_takes_nothing() -> None:
    budget = Budget(MANY)
    memory = Memory(100, MANY, budget)
    memory.append(list(page(15, 20)))
    memory.close()
    memory.append(list(page(21, 22)))
    memory.take(page(1, 20), 22)
    memory.take(page(1, 22), 22)
    memory.joined(ONE, page(21, 22))
    assert offsets(memory) == []
    assert budget.used_bytes == 0


# All rooms together


def test_who_was_idle_for_longest_loses_first() -> None:
    budget = Budget(9 * ONE_BYTES)
    first, second, third, fourth = (Memory(100, MANY, budget) for _ in range(4))
    for memory in (first, second, third):
        memory.append(list(page(1, 3)))
    first.append([message(4)])
    assert [len(memory.ring) for memory in (first, second, third)] == [4, 0, 3]
    assert budget.used_bytes == 7 * ONE_BYTES
    third.append([message(4)])
    fourth.append([message(1)])
    fourth.take((message(0),), 1)
    assert [len(memory.ring) for memory in (first, third, fourth)] == [0, 4, 2]
    assert budget.used_bytes == 6 * ONE_BYTES


def test_who_returns_to_a_room_keeps_it_from_being_the_first_to_lose() -> None:
    budget = Budget(7 * ONE_BYTES + 3_000)
    first, second = (Memory(100, MANY, budget) for _ in range(2))
    for memory in (first, second):
        memory.append(list(page(1, 3)))
    first.publications(ONE, first.page(0, 3, 500, MANY) or ())
    Memory(100, MANY, budget).append(list(page(1, 6)))
    assert [len(memory.ring) for memory in (first, second)] == [3, 0]


@pytest.mark.parametrize("max_bytes", [0, ONE_BYTES, 2 * ONE_BYTES])
def test_a_room_that_is_too_large_by_itself_loses_all(max_bytes: int) -> None:
    budget = Budget(max_bytes)
    memory = Memory(100, MANY, budget)
    memory.append(list(page(1, 3)))
    assert (offsets(memory), budget.used_bytes) == ([], 0)
    memory.take(page(1, 3), 3)
    assert (offsets(memory), budget.used_bytes) == ([], 0)
    assert memory.page(0, 3, 500, MANY) is None


def test_a_message_takes_about_what_is_counted_for_it() -> None:
    from tracemalloc import get_traced_memory, start, stop

    from outbox.entry import decode, encode

    blobs = [
        encode(message(n)._replace(tenant="default", room=f"room:{n % 50}", txid=f"{n:09d}"))
        for n in range(10_000, 12_000)
    ]
    start()
    kept = [decode(0, f"0123456789abcdef{n:06}", blob) for n, blob in enumerate(blobs)]
    size_bytes = get_traced_memory()[0] / len(kept)
    stop()
    assert MESSAGE_BYTES / 2 < size_bytes - 8 < MESSAGE_BYTES * 1.25, size_bytes
