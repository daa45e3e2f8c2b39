"""Which answers of a store count, case by case; in any order: ``test_hub_delivery.py``."""

import asyncio

import pytest

from gateway.history import History, Lost, Page, PageLimits
from gateway.hub import Hub
from gateway.room import Room
from gateway.unavailable import Unavailable
from tests.property.world import TENANT, Stores, Truth


class Gateway:
    """A hub at the head of a shard in which room ``a`` has ten messages."""

    def __init__(self) -> None:
        self.truth = Truth()
        for _ in range(10):
            self.truth.commit("a")
        self.truth.appended = 10
        self.stores = Stores(self.truth)
        self.hub = Hub(1, 1, 4, 10_000)
        self.hub.positions[0] = 10
        self.epoch = "e0"
        self.suspected = False
        self.asked = 0
        """Reads that ``answered`` has seen."""
        self.room: Room = self.hub.open((TENANT, "a"))
        self.room.anchor(10, self.room.generation)
        self.history = History(
            self.hub,
            self.stores,  # type: ignore[arg-type]
            self.stores,  # type: ignore[arg-type]
            PageLimits(5, 10_000, 60.0),
            lambda: self.epoch,
            self.suspect,
        )

    def suspect(self) -> None:
        self.suspected = True

    async def answer(self, how: str, lag: int = 0) -> None:
        """The one read that is under way, or about to be."""
        for _ in range(1_000):
            if self.stores.reads:
                break
            await asyncio.sleep(0)
        (read,) = self.stores.reads
        read.answer(how, lag)
        while read in self.stores.reads:
            await asyncio.sleep(0)


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


async def test_a_stream_that_stands_where_the_worker_stands_is_believed(gateway: Gateway) -> None:
    reading = asyncio.ensure_future(gateway.history.read(gateway.room, 8))
    await gateway.answer("late")
    found = await reading
    assert isinstance(found, Page)
    assert [m.offset for m in found.messages] == [9, 10]
    assert gateway.room.top == 10


@pytest.mark.parametrize("after", [10, 8])
async def test_who_returns_to_a_room_that_nobody_was_in_first_learns_where_it_stands(
    gateway: Gateway, after: int
) -> None:
    """That is asked for many rooms together, and most have missed nothing."""
    gateway.room.forget()
    reading = asyncio.ensure_future(gateway.history.read(gateway.room, after))
    await gateway.answer("late")
    if after < 10:
        await gateway.answer("late")
    found = await reading
    assert isinstance(found, Page)
    assert [m.offset for m in found.messages] == list(range(after + 1, 11))
    assert gateway.room.top == 10


async def test_a_stream_that_lags_behind_the_worker_cannot_say_that_nothing_is_missing(
    gateway: Gateway,
) -> None:
    reading = asyncio.ensure_future(gateway.history.read(gateway.room, 7))
    await gateway.answer("old", lag=3)
    await gateway.answer("late")  # the log's turn
    found = await reading
    assert isinstance(found, Page)
    assert [m.offset for m in found.messages] == [8, 9, 10]


async def test_a_log_that_lags_behind_the_worker_says_nothing_and_is_suspected(
    gateway: Gateway,
) -> None:
    gateway.hub.positions[0] = 11
    reading = asyncio.ensure_future(gateway.history.read(gateway.room, 9))
    await gateway.answer("none")
    await gateway.answer("late")
    with pytest.raises(Unavailable):
        await reading
    assert gateway.suspected
    assert gateway.room.top == 10


async def test_only_the_log_says_that_something_is_lost(gateway: Gateway) -> None:
    gateway.truth.dropped = 4
    reading = asyncio.ensure_future(gateway.history.read(gateway.room, 2))
    await gateway.answer("late")  # the stream has but the newest
    await gateway.answer("late")
    assert await reading == Lost(10)


async def test_an_answer_for_an_earlier_offset_is_not_taken_for_the_future(
    gateway: Gateway,
) -> None:
    """Who shares a read that began before its offset was reached is not told that it never was."""
    early = asyncio.ensure_future(gateway.history.read(gateway.room, 11))
    await gateway.answer("none")
    while not gateway.stores.reads:
        await asyncio.sleep(0)
    (old,) = gateway.stores.reads
    gateway.truth.commit("a")
    honest = asyncio.ensure_future(gateway.history.read(gateway.room, 11))
    while len(gateway.stores.reads) < 2:
        await asyncio.sleep(0)
    gateway.stores.reads[1].answer("none")
    for _ in range(5):
        await asyncio.sleep(0)
    old.answer("early")
    while not (early.done() and honest.done()):
        for read in list(gateway.stores.reads):
            read.answer("late")
        await asyncio.sleep(0)
    assert await honest == Page(())
    assert await early == Page(())


async def test_equal_reads_are_shared_and_a_cancelled_reader_takes_nobody_along(
    gateway: Gateway,
) -> None:
    readers = [asyncio.ensure_future(gateway.history.read(gateway.room, 7)) for _ in range(1_000)]
    await asyncio.sleep(0)
    readers[0].cancel()
    await gateway.answer("late")
    found = await asyncio.gather(*readers, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(isinstance(page, Page) and len(page.messages) == 3 for page in found[1:])


async def test_those_who_came_too_late_for_a_read_share_the_next(gateway: Gateway) -> None:
    first = asyncio.ensure_future(gateway.history.read(gateway.room, 8))
    while not gateway.stores.reads:
        await asyncio.sleep(0)
    gateway.truth.commit("a")
    gateway.truth.appended = gateway.hub.positions[0] = 11
    late = [asyncio.ensure_future(gateway.history.read(gateway.room, 8)) for _ in range(100)]
    await asyncio.sleep(0)
    await gateway.answer("early")
    await gateway.answer("late")
    pages = await asyncio.gather(first, *late)
    assert all(isinstance(page, Page) for page in pages)
    assert [m.offset for m in pages[1].messages] == [9, 10, 11]  # type: ignore[union-attr]
    assert gateway.stores.reads == []


async def test_those_who_came_too_late_for_a_read_of_the_log_share_the_next(
    gateway: Gateway,
) -> None:
    """What they share is too old for them. That is no sign of another history."""
    early = asyncio.ensure_future(gateway.history.read(gateway.room, 8))
    await gateway.answer("none")
    while not gateway.stores.reads:
        await asyncio.sleep(0)
    (old,) = gateway.stores.reads
    gateway.truth.commit("a")
    gateway.truth.appended = gateway.hub.positions[0] = 11
    late = [asyncio.ensure_future(gateway.history.read(gateway.room, 8)) for _ in range(100)]
    while len(gateway.stores.reads) < 2:
        await asyncio.sleep(0)
    stream = gateway.stores.reads[1]
    stream.answer("none")
    while stream in gateway.stores.reads:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)  # they join those who wait for the log
    assert gateway.stores.reads == [old]
    old.answer("early")
    while old in gateway.stores.reads:
        await asyncio.sleep(0)
    await gateway.answer("late")
    pages = await asyncio.gather(early, *late)
    assert all(isinstance(page, Page) for page in pages)
    assert [m.offset for m in pages[1].messages] == [9, 10, 11]  # type: ignore[union-attr]
    assert not gateway.suspected


async def test_an_epoch_that_changes_during_a_read_voids_its_answer(gateway: Gateway) -> None:
    reading = asyncio.ensure_future(gateway.history.read(gateway.room, 8))
    while not gateway.stores.reads:
        await asyncio.sleep(0)
    gateway.epoch = "e1"
    await gateway.answer("early")
    with pytest.raises(Unavailable):
        await reading


async def test_an_epoch_that_changes_while_the_log_is_read_voids_its_answer(
    gateway: Gateway,
) -> None:
    reading = asyncio.ensure_future(gateway.history.read(gateway.room, 8))
    await gateway.answer("none")
    while not gateway.stores.reads:
        await asyncio.sleep(0)
    gateway.epoch = "e1"
    await gateway.answer("early")
    with pytest.raises(Unavailable, match="changed"):
        await reading
    assert gateway.room.top == 10


async def test_a_log_of_another_epoch_says_nothing_and_is_suspected(gateway: Gateway) -> None:
    """Postgres has begun a new history, which is longer already; the worker does not know yet."""
    reading = asyncio.ensure_future(gateway.history.read(gateway.room, 8))
    await gateway.answer("none")
    gateway.truth.new_epoch(9)
    for _ in range(5):
        gateway.truth.commit("a")
    await gateway.answer("late")
    with pytest.raises(Unavailable, match="another history"):
        await reading
    assert gateway.suspected
    assert gateway.room.top == 10


async def test_silent_stores_are_waited_for_only_so_long(gateway: Gateway) -> None:
    gateway.history._limits = PageLimits(5, 10_000, 0.05)
    with pytest.raises(Unavailable, match="in time"):
        await gateway.history.read(gateway.room, 8)
    await asyncio.sleep(0)
    assert gateway.stores.reads == []  # what nobody waits for ends


async def answered(gateway: Gateway, reading: "asyncio.Future[Page | Lost]") -> Page | Lost:
    """Answers truly whatever is asked, until the read has its page."""
    while not reading.done():
        for read in list(gateway.stores.reads):
            gateway.asked += 1
            read.answer("late")
        await asyncio.sleep(0)
    return await reading


async def returned(gateway: Gateway, after: int) -> list[int]:
    """Offsets that someone gets who was at ``after``."""
    found: list[int] = []
    while not found or found[-1] != gateway.truth.head("a"):
        reading = asyncio.ensure_future(
            gateway.history.read(gateway.room, found[-1] if found else after)
        )
        page = await answered(gateway, reading)
        assert isinstance(page, Page)
        found += [message.offset for message in page.messages]
    return found


@pytest.mark.parametrize(
    ("after", "reads"),
    [
        (8, 1),  # in the stream, as in the ring
        (6, 2),  # the stream does not have it, so the log is asked
        (5, 2),  # more than the ring may hold
        (0, 4),  # two pages
    ],
)
async def test_who_returns_one_after_the_other_makes_one_read(
    gateway: Gateway, after: int, reads: int
) -> None:
    for _ in range(100):
        assert await returned(gateway, after) == list(range(after + 1, 11))
    assert gateway.asked == reads


async def test_who_returns_while_the_room_is_written_to_makes_no_read_of_his_own(
    gateway: Gateway,
) -> None:
    """All together read each page once, in the stream in vain and in the log."""
    for _ in range(100):
        head = gateway.truth.head("a")
        assert await returned(gateway, 5) == list(range(6, head + 1))
        gateway.truth.commit("a")
        gateway.truth.appended += 1
        for _ in gateway.hub.deliver(0, gateway.truth.bus(head, head + 1)):
            pass
        gateway.hub.sweep(0, 30)
    assert gateway.asked <= 2 * 100 / 5


@pytest.mark.parametrize("store", ["stream", "log"])
async def test_what_was_read_before_a_redaction_is_not_served_after_it(
    gateway: Gateway, store: str
) -> None:
    reading = asyncio.ensure_future(gateway.history.read(gateway.room, 7))
    if store == "log":
        await gateway.answer("none")
    while not gateway.stores.reads:
        await asyncio.sleep(0)
    gateway.room.anchor(10, 0)
    gateway.truth.redact("a", 9)
    gateway.truth.appended = 11
    for _ in gateway.hub.deliver(0, gateway.truth.bus(10, 11)):
        pass
    await gateway.answer("early")
    found = await reading
    assert isinstance(found, Page)
    assert b"null" not in [message.payload for message in found.messages]
    again = await answered(gateway, asyncio.ensure_future(gateway.history.read(gateway.room, 7)))
    assert isinstance(again, Page)
    assert [m.payload == b"null" for m in again.messages] == [False, True, False, True]


async def test_a_read_that_another_history_answered_is_not_remembered(gateway: Gateway) -> None:
    reading = asyncio.ensure_future(gateway.history.read(gateway.room, 7))
    while not gateway.stores.reads:
        await asyncio.sleep(0)
    gateway.epoch = "e1"
    await gateway.answer("early")
    with pytest.raises(Unavailable):
        await reading
    gateway.room.anchor(10, 0)
    assert gateway.room.page(7, 100, 10_000) is None


async def test_a_store_that_lags_behind_a_redaction_brings_nothing_to_remember(
    gateway: Gateway,
) -> None:
    gateway.room.anchor(10, 0)
    gateway.truth.redact("a", 9)
    gateway.truth.appended = 11
    for _ in gateway.hub.deliver(0, gateway.truth.bus(10, 11)):
        pass
    reading = asyncio.ensure_future(gateway.history.read(gateway.room, 7))
    await gateway.answer("old", lag=1)
    assert isinstance(await answered(gateway, reading), Page)
    remembered = gateway.room.page(7, 100, 10_000)
    assert remembered is not None
    assert [m.payload == b"null" for m in remembered] == [False, True, False, True]
