"""Rooms and the hub, case by case; any order of them: ``tests/property/test_hub_delivery.py``."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

import gateway.room
from gateway.hub import Hub
from gateway.memory import Budget
from gateway.protocols.centrifuge_json import CentrifugeJSON
from gateway.room import FRAME_MAX_BYTES, PORTION_BYTES, Room, Subscription, encode
from outbox.message import Message
from tests.property.world import texts

ONE, OTHER = CentrifugeJSON(), CentrifugeJSON()
KEY = ("acme", "a")


def message(offset: int, seq: int = 0, room: str = "a", size: int = 1) -> Message:
    payload = b'"' + b"x" * size + b'"'
    return Message(0, seq or offset, "acme", room, offset, "b", "9", None, payload, False, 0)


@dataclass
class Peer:
    """A subscriber that remembers what it was written."""

    room: Room
    protocol: CentrifugeJSON = ONE
    on_write: Callable[["Peer"], None] | None = None
    offsets: list[int] = field(default_factory=list)
    writes: int = 0
    woken: int = 0

    def __post_init__(self) -> None:
        self.subscription = Subscription(self.room, self.protocol, self, self)
        self.room.join(self.subscription)

    def send(self, frames: bytes) -> int:
        self.writes += 1
        for text in texts(bytearray(frames)):
            self.offsets += [json.loads(s)["push"]["pub"]["offset"] for s in text.split("\n")]
        if self.on_write is not None:
            self.on_write(self)
        return len(frames)

    def spill(self, frame: bytes, sent: int) -> None:
        raise AssertionError("all was sent")

    def wake(self, subscription: Subscription) -> None:
        self.woken += 1

    def at(self, offset: int) -> "Peer":
        self.subscription.offset = offset
        assert self.room.go_live(self.subscription)
        return self


@pytest.fixture
def room() -> Room:
    room = Room(KEY, 0, 4, 1_000, Budget(1_000_000))
    room.anchor(10, room.generation)
    return room


def deliver(room: Room, *offsets: int) -> None:
    for _ in room.deliver([message(offset) for offset in offsets]):
        pass


def after(room: Room, offset: int) -> list[int] | None:
    """Offsets that the room has in memory."""
    found = room.page(offset, 100, 100_000)
    return None if found is None else [message.offset for message in found]


def test_the_live_are_given_what_follows_and_nothing_twice(room: Room) -> None:
    peer = Peer(room).at(10)
    deliver(room, 11, 12)
    deliver(room, 11, 12)
    deliver(room, 12, 13)
    assert peer.offsets == [11, 12, 13]
    assert room.top == 13


def test_only_who_has_all_there_is_goes_live(room: Room) -> None:
    peer = Peer(room)
    for offset in (0, 9, 11):
        peer.subscription.offset = offset
        assert not room.go_live(peer.subscription)
    deliver(room, 11)
    assert room.go_live(peer.subscription)
    assert peer.offsets == []


def test_a_hole_makes_everyone_replay(room: Room) -> None:
    peer, other = Peer(room).at(10), Peer(room)
    deliver(room, 12)
    assert peer.offsets == []
    assert (peer.subscription.offset, peer.woken, other.woken) == (10, 1, 1)
    assert after(room, 11) == [12]
    assert after(room, 10) is None


def test_the_head_of_a_reading_that_began_before_the_room_was_forgotten_is_void(
    room: Room,
) -> None:
    generation = room.generation
    room.forget()
    room.anchor(10, generation)
    assert room.top is None
    room.anchor(12, room.generation)
    assert room.top == 12


def test_who_stands_ahead_is_woken_when_the_room_has_come_as_far(room: Room) -> None:
    peer = Peer(room)
    peer.subscription.offset = 12
    room.await_offset(peer.subscription)
    deliver(room, 11)
    assert peer.woken == 0
    deliver(room, 12, 13)
    assert peer.woken == 1


@pytest.mark.parametrize(("messages", "size"), [(0, 1_000), (2, 1_000), (100, 5), (100, 0)])
def test_the_ring_holds_what_it_may_and_no_more(messages: int, size: int) -> None:
    room = Room(KEY, 0, messages, size, Budget(1_000_000))
    room.anchor(0, 0)
    for offset in range(1, 8):
        deliver(room, offset)
    held = min(messages, size // len(message(1).payload))
    assert len(room.memory.ring) == min(held, 7)
    assert after(room, 7) == []
    assert after(room, 8) is None
    if held < 7:
        assert after(room, 6 - held) is None


def test_who_falls_behind_in_a_write_has_been_given_it(room: Room) -> None:
    peer = Peer(room, on_write=lambda peer: room.fall_behind(peer.subscription)).at(10)
    deliver(room, 11, 12)
    assert (peer.offsets, peer.subscription.offset) == ([11, 12], 12)
    deliver(room, 13)
    assert peer.offsets == [11, 12]


def test_a_full_buffer_is_noticed_within_a_batch(room: Room) -> None:
    peer = Peer(room, on_write=lambda peer: room.fall_behind(peer.subscription)).at(10)
    big = [message(offset, size=PORTION_BYTES // 2) for offset in range(11, 20)]
    for _ in room.deliver(big):
        pass
    assert (peer.offsets, peer.subscription.offset) == ([11], 11)
    assert room.top == 19


def test_between_slices_others_come_and_go(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.room, "SLICE", 2)
    peers = [Peer(room, ONE if n % 2 else OTHER).at(10) for n in range(6)]
    delivery = room.deliver([message(11), message(12)])
    next(delivery)
    waiting = [peer for peer in peers if not peer.offsets]
    assert len(waiting) == 4
    slow, leaving = waiting[0], waiting[1]
    room.fall_behind(slow.subscription)
    assert slow.subscription.offset == 10
    room.leave(leaving.subscription)
    late = [Peer(room, protocol).at(12) for protocol in (ONE, OTHER)]
    room.fall_behind(late[0].subscription)
    assert late[0].subscription.offset == 12
    for _ in delivery:
        pass
    assert [peer.offsets for peer in late] == [[], []]
    assert (slow.offsets, leaving.offsets) == ([], [])
    assert all(p.offsets == [11, 12] for p in peers if p not in (slow, leaving))


def test_who_was_left_over_when_the_driver_gave_up_gets_it_by_replay(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.room, "SLICE", 2)
    hub = Hub(1, 1, 4, 1_000)
    hub.positions[0] = 10
    large, small = hub.open(KEY), hub.open(("acme", "b"))
    for each in (large, small):
        each.anchor(10, 0)
    peers = [Peer(large).at(10) for _ in range(5)]
    last = Peer(small).at(10)
    delivery = hub.deliver(0, [message(11, 11), message(11, 12, "b")])
    next(delivery)
    assert hub.positions[0] == 12
    delivery.close()  # type: ignore[attr-defined]
    left = [peer for peer in peers if not peer.offsets]
    assert len(left) == 3
    assert all((p.woken, p.subscription.offset) == (1, 10) for p in left)
    assert (last.woken, last.subscription.offset, small.top) == (1, 10, None)


def test_a_lost_stretch_makes_the_rooms_of_its_shard_ask_the_log() -> None:
    hub = Hub(2, 2, 4, 1_000)
    names = iter(f"r{n}" for n in range(100))
    rooms = {hub.shard(("acme", name)): hub.open(("acme", name)) for name in names}
    hub.positions |= {0: 5, 1: 5}
    for each in rooms.values():
        each.anchor(10, 0)
    hub.lose(0, 9)
    assert (rooms[0].top, rooms[1].top) == (None, 10)
    assert hub.positions == {0: 9, 1: 5}
    del hub.positions[1]
    hub.lose(1, 9)
    assert hub.positions == {0: 9}


def test_an_empty_room_lingers_and_then_its_shard_is_let_go() -> None:
    hub = Hub(1, 1, 4, 1_000)
    hub.positions[0] = 0
    peer = Peer(hub.open(KEY))
    assert hub.sweep(0, 30) == set()
    hub.rooms[KEY].leave(peer.subscription)
    assert hub.sweep(1, 30) == set()
    assert hub.sweep(30, 30) == set()
    back = Peer(hub.open(KEY))
    assert hub.sweep(40, 30) == set()
    hub.rooms[KEY].leave(back.subscription)
    assert hub.sweep(50, 30) == set()
    assert hub.sweep(80, 30) == {0}
    assert not hub.rooms


def test_rooms_are_swept_in_portions_while_others_come_and_go() -> None:
    hub = Hub(1, 1, 4, 1_000)
    hub.positions[0] = 0
    gone, renewed, new = ("a", "1"), ("a", "2"), ("a", "3")
    rooms = [hub.open(gone), hub.open(renewed)]
    assert hub.sweep(0, 30, rooms) == set()
    hub.restart()
    hub.positions[0] = 0
    again = hub.open(renewed)
    assert hub.sweep(30, 30, rooms) == set()
    assert hub.rooms == {renewed: again}
    hub.open(new)
    assert hub.sweep(30, 30, ()) == set()
    assert hub.sweep(30, 30, [again]) == set()
    assert hub.sweep(60, 30, [again]) == set()
    assert hub.rooms.keys() == {new}
    hub.sweep(60, 0)
    assert hub.sweep(60, 0) == {0}


def test_frames_are_joined_up_to_their_limit() -> None:
    small = encode(ONE, "a", [message(n) for n in range(1, 50)])
    assert len(texts(bytearray(small))) == 1
    large = [message(n, size=FRAME_MAX_BYTES // 3) for n in range(1, 8)]
    frames = texts(bytearray(encode(ONE, "a", [*large, message(8, size=FRAME_MAX_BYTES * 2)])))
    assert [len(text.split("\n")) for text in frames] == [2, 2, 2, 1, 1]


def test_a_room_that_was_forgotten_remembers_no_message(room: Room) -> None:
    """What came after them may have been missed, so they are no longer the newest."""
    deliver(room, 11, 12, 13)
    assert after(room, 10) == [11, 12, 13]
    room.forget()
    assert after(room, 10) is None
    room.anchor(15, room.generation)
    assert after(room, 12) is None
    deliver(room, 16)
    assert after(room, 12) is None
    assert after(room, 15) == [16]


# What a read of a store brought


def page(first: int, last: int) -> tuple[Message, ...]:
    return tuple(message(offset) for offset in range(first, last + 1))


def test_a_room_remembers_what_was_read(room: Room) -> None:
    room.take(page(7, 10), room.glance())
    assert after(room, 6) == [7, 8, 9, 10]
    deliver(room, 11)
    assert after(room, 7) == [8, 9, 10, 11]


def test_a_room_that_was_forgotten_during_a_read_does_not_take_it(room: Room) -> None:
    """A notice of a redaction may be among what was missed."""
    glance = room.glance()
    room.forget()
    room.take(page(7, 10), glance)
    room.anchor(10, room.generation)
    room.take(page(7, 10), glance)
    assert after(room, 6) is None
    room.take(page(7, 10), room.glance())
    assert after(room, 6) == [7, 8, 9, 10]


def test_a_room_whose_head_is_not_known_takes_nothing() -> None:
    room = Room(KEY, 0, 4, 1_000, Budget(1_000_000))
    room.take(page(7, 10), room.glance())
    room.anchor(10, room.generation)
    assert after(room, 6) is None


def test_what_was_kept_for_those_who_return_goes_with_the_last_of_them() -> None:
    hub = Hub(1, 1, 4, 1_000)
    hub.positions[0] = 10
    room = hub.open(KEY)
    room.anchor(10, 0)
    peer = Peer(room)
    room.take(page(1, 4), room.glance())
    room.take(page(8, 10), room.glance())
    hub.sweep(0, 30)
    assert after(room, 0) == [1, 2, 3, 4]
    hub.sweep(5, 30)
    assert after(room, 0) == [1, 2, 3, 4]
    for now in (10, 15):
        hub.sweep(now, 30)
    assert after(room, 0) is None
    assert after(room, 7) == [8, 9, 10]
    room.leave(peer.subscription)
    for now in (25, 55):
        hub.sweep(now, 30)
    # A read that someone who has left had begun.
    room.take(page(1, 10), room.glance())
    assert hub.budget.used_bytes == 0


def test_a_new_epoch_leaves_nothing_behind() -> None:
    hub = Hub(1, 1, 4, 1_000)
    hub.positions[0] = 10
    room = hub.open(KEY)
    room.anchor(10, 0)
    room.take(page(8, 10), room.glance())
    assert hub.budget.used_bytes
    assert hub.restart() == [room]
    room.take(page(1, 10), room.glance())
    assert hub.budget.used_bytes == 0
