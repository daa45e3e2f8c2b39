"""A room forgets what a notice speaks of, and stays as dense as it was."""

import pytest

from gateway.room import Room
from outbox.message import Message

RING = 100


def message(offset: int, tags: dict[str, str] | None = None) -> Message:
    return Message(0, offset, "t", "r", offset, "b", "1", tags, b'"%d"' % offset, False, 0)


def room(*notices: str, before: int = 5) -> Room:
    found = Room(("t", "r"), 0, RING, 10_000)
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
    assert [m.offset for m in found.ring] == kept
    assert found.top == 6
    after = found.after(kept[0] - 1)
    assert after is not None
    assert [m.offset for m in after] == kept
    if kept[0] > 1:
        assert found.after(kept[0] - 2) is None


def test_in_one_delivery_with_what_it_speaks_of() -> None:
    found = Room(("t", "r"), 0, RING, 10_000)
    found.anchor(0, found.generation)
    list(found.deliver([message(1), message(2), message(3, {"redacts": "1"}), message(4)]))
    assert [m.offset for m in found.ring] == [2, 3, 4]


def test_the_bytes_are_counted_on() -> None:
    found = Room(("t", "r"), 0, RING, 12)
    found.anchor(0, found.generation)
    for offset in range(1, 5):
        list(found.deliver([message(offset)]))
    list(found.deliver([message(5, {"redacts": "4"})]))
    for offset in range(6, 9):
        list(found.deliver([message(offset)]))
    assert [m.offset for m in found.ring] == [5, 6, 7, 8]
