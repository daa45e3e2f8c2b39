"""A room forgets what a notice speaks of, and stays as dense as it was."""

import pytest

from gateway.memory import Budget
from gateway.room import Room
from outbox.message import Message

RING = 100


def message(offset: int, tags: dict[str, str] | None = None) -> Message:
    return Message(0, offset, "t", "r", offset, "b", "1", tags, b'"%d"' % offset, False, 0)


def room(*notices: str, before: int = 5) -> Room:
    found = Room(("t", "r"), 0, RING, 10_000, Budget(1_000_000))
    found.anchor(0, found.generation)
    messages = [message(offset) for offset in range(1, before + 1)]
    messages += [message(before + 1 + n, {"redacts": text}) for n, text in enumerate(notices)]
    for one in messages:
        list(found.deliver([one]))
    return found


@pytest.mark.parametrize(
    ("notice", "kept"),
    [
        ("1", [2, 3, 4, 5, 6]),
        ("3", [4, 5, 6]),
        ("5", [6]),
        # What no redaction writes must not make a hole, nor remove the notice itself.
        ("6", [6]),
        ("99", [6]),
        ("0", [1, 2, 3, 4, 5, 6]),
        ("-1", [1, 2, 3, 4, 5, 6]),
        ("x", [1, 2, 3, 4, 5, 6]),
        ("9" * 30, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_ring_begins_behind_the_tombstone(notice: str, kept: list[int]) -> None:
    found = room(notice)
    assert [m.offset for m in found.memory.ring] == kept
    assert found.top == 6
    after = found.page(kept[0] - 1, 100, 10_000)
    assert after is not None
    assert [m.offset for m in after] == kept
    if kept[0] > 1:
        assert found.page(kept[0] - 2, 100, 10_000) is None


def test_in_one_delivery_with_what_it_speaks_of() -> None:
    found = Room(("t", "r"), 0, RING, 10_000, Budget(1_000_000))
    found.anchor(0, found.generation)
    list(found.deliver([message(1), message(2), message(3, {"redacts": "1"}), message(4)]))
    assert [m.offset for m in found.memory.ring] == [2, 3, 4]


def test_the_bytes_are_counted_on() -> None:
    found = Room(("t", "r"), 0, RING, 12, Budget(1_000_000))
    found.anchor(0, found.generation)
    for offset in range(1, 5):
        list(found.deliver([message(offset)]))
    list(found.deliver([message(5, {"redacts": "4"})]))
    for offset in range(6, 9):
        list(found.deliver([message(offset)]))
    assert [m.offset for m in found.memory.ring] == [5, 6, 7, 8]


def page(first: int, last: int) -> tuple[Message, ...]:
    return tuple(message(offset) for offset in range(first, last + 1))


def offsets(found: tuple[Message, ...] | None) -> list[int] | None:
    return None if found is None else [message.offset for message in found]


@pytest.mark.parametrize("delivered", ["new", "again"])
@pytest.mark.parametrize("first", [2, 5])
def test_what_was_read_before_a_notice_came_is_not_remembered_after_it(
    delivered: str, first: int
) -> None:
    """Neither in the ring nor as a page: what was read may be the content."""
    top = 9 if delivered == "new" else 10
    found = Room(("t", "r"), 0, RING, 10_000, Budget(1_000_000))
    found.anchor(top, found.generation)
    glance = found.glance()
    list(found.deliver([message(10, {"redacts": "3"})]))
    found.take(page(first, 9), glance)
    found.take(page(first, 8), glance)
    assert found.page(first - 1, 100, 10_000) is None
    # What is read from now on has the tombstone.
    found.take(page(2, 10), found.glance())
    assert offsets(found.page(1, 100, 10_000)) == list(range(2, 11))


def test_a_notice_that_a_store_told_of_first_drops_what_another_read_brought() -> None:
    """One read ended before the redaction and one after it; the room knows its head from the
    second, so that what the bus has up to there is nothing new."""
    found = Room(("t", "r"), 0, RING, 10_000, Budget(1_000_000))
    glance = found.glance()
    found.anchor(10, found.generation)
    found.take((message(10, {"redacts": "3"}),), glance)
    found.take(page(1, 9), glance)
    found.take(page(1, 2), glance)
    assert offsets(found.page(0, 100, 10_000)) == list(range(1, 11))
    list(found.deliver([*page(8, 9), message(10, {"redacts": "3"}), message(11)]))
    assert [m.offset for m in found.memory.ring] == list(range(4, 12))
    assert found.page(2, 100, 10_000) is None


def test_pages_go_with_any_redaction() -> None:
    found = Room(("t", "r"), 0, RING, 10_000, Budget(1_000_000))
    found.anchor(20, found.generation)
    found.take(page(1, 5), found.glance())
    assert offsets(found.page(0, 100, 10_000)) == [1, 2, 3, 4, 5]
    list(found.deliver([message(21, {"redacts": "3"})]))
    assert found.page(0, 100, 10_000) is None
