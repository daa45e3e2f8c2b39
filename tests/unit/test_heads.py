"""Where rooms stand: which answers of a store count, and who waits for whom."""

import asyncio

import pytest

from gateway.heads import LOG_READS, ROOMS_AT_ONCE, Heads
from gateway.hub import Hub
from gateway.room import Room
from gateway.unavailable import Unavailable
from tests.property.world import TENANT, Pending, Stores, Truth


class Gateway:
    """A hub at the head of a shard in which room ``a`` has ten messages, others none."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.truth = Truth()
        for _ in range(10):
            self.truth.commit("a")
        self.truth.appended = 10
        self.stores = Stores(self.truth)
        self.hub = Hub(1, 1, 4, 10_000)
        self.hub.positions[0] = 10
        self.epoch = "e0"
        self.suspected = False
        self.heads = Heads(
            self.hub,
            self.stores,  # type: ignore[arg-type]
            self.stores,  # type: ignore[arg-type]
            timeout_s,
            lambda: self.epoch,
            self.suspect,
        )
        self.room = self.open("a")

    def open(self, name: str) -> Room:
        return self.hub.open((TENANT, name))

    def suspect(self) -> None:
        self.suspected = True

    def ask(self, *rooms: Room) -> "list[asyncio.Future[int]]":
        return [asyncio.ensure_future(self.heads.of(room)) for room in rooms]

    async def read(self) -> Pending:
        """The one read that is under way, or about to be."""
        for _ in range(1_000):
            if self.stores.reads:
                break
            await asyncio.sleep(0)
        (read,) = self.stores.reads
        return read

    async def answer(self, how: str, lag: int = 0) -> None:
        read = await self.read()
        read.answer(how, lag)
        while read in self.stores.reads:
            await asyncio.sleep(0)


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


async def test_many_rooms_are_one_read_of_redis_and_one_of_the_log(gateway: Gateway) -> None:
    asked = gateway.ask(*(gateway.open(name) for name in ["a", "a", "b", "c", "d"] * 10))
    await gateway.answer("late")  # the streams of idle rooms are not there
    await gateway.answer("late")
    assert await asyncio.gather(*asked) == [10, 10, 0, 0, 0] * 10
    assert [gateway.open(name).top for name in "abcd"] == [10, 0, 0, 0]
    assert gateway.stores.reads == []


async def test_those_whom_redis_answers_do_not_wait_for_the_log(gateway: Gateway) -> None:
    known, idle = gateway.ask(gateway.room, gateway.open("b"))
    await gateway.answer("late")
    assert await known == 10
    log = await gateway.read()
    gateway.truth.commit("c")
    gateway.truth.appended = 11
    (later,) = gateway.ask(gateway.open("c"))
    while len(gateway.stores.reads) < 2:
        await asyncio.sleep(0)
    gateway.stores.reads[1].answer("late")
    assert await later == 1
    log.answer("late")
    assert await idle == 0


async def test_those_who_come_during_a_read_are_in_the_next(gateway: Gateway) -> None:
    (first,) = gateway.ask(gateway.room)
    early = await gateway.read()
    names = [f"room:{number}" for number in range(ROOMS_AT_ONCE + 10)]
    others = gateway.ask(*map(gateway.open, names))
    for _ in range(5):
        await asyncio.sleep(0)
    assert gateway.stores.reads == [early]
    early.answer("late")
    assert await first == 10
    # No read asks for more than so many rooms, and of the log a limited number is under way.
    most = 0
    while not all(asking.done() for asking in others):
        most = max(most, len(gateway.stores.reads))
        for read in gateway.stores.reads:
            assert len(read.nothing or read.early[1]) <= ROOMS_AT_ONCE
            read.answer("late")
        await asyncio.sleep(0)
    assert most <= 1 + LOG_READS
    assert set(await asyncio.gather(*others)) == {0}


async def test_a_stream_that_lags_behind_the_worker_cannot_say_where_the_head_is(
    gateway: Gateway,
) -> None:
    (asking,) = gateway.ask(gateway.room)
    await gateway.answer("old", lag=3)
    await gateway.answer("late")  # the log's turn
    assert await asking == 10


@pytest.mark.parametrize("trouble", ["fail", "none"])
async def test_without_redis_the_log_tells(gateway: Gateway, trouble: str) -> None:
    (asking,) = gateway.ask(gateway.room)
    await gateway.answer(trouble)
    await gateway.answer("late")
    assert await asking == 10


async def test_a_log_that_lags_behind_the_worker_says_nothing_and_is_suspected(
    gateway: Gateway,
) -> None:
    gateway.hub.positions[0] = 11
    (asking,) = gateway.ask(gateway.room)
    await gateway.answer("none")
    await gateway.answer("late")
    with pytest.raises(Unavailable, match="another history"):
        await asking
    assert gateway.suspected
    assert gateway.room.top is None


async def test_a_log_of_another_epoch_says_nothing_and_is_suspected(gateway: Gateway) -> None:
    (asking,) = gateway.ask(gateway.room)
    await gateway.answer("none")
    gateway.truth.new_epoch(9)
    for _ in range(5):
        gateway.truth.commit("a")
    await gateway.answer("late")
    with pytest.raises(Unavailable, match="another history"):
        await asking
    assert gateway.suspected
    assert gateway.room.top is None


@pytest.mark.parametrize("store", ["streams", "log"])
async def test_an_epoch_that_changes_during_a_read_voids_its_answer(
    gateway: Gateway, store: str
) -> None:
    (asking,) = gateway.ask(gateway.room)
    if store == "log":
        await gateway.answer("none")
    read = await gateway.read()
    gateway.epoch = "e1"
    read.answer("early")
    with pytest.raises(Unavailable, match="changed"):
        await asking
    assert gateway.room.top is None


async def test_a_head_that_was_read_before_the_room_was_forgotten_is_void(
    gateway: Gateway,
) -> None:
    (asking,) = gateway.ask(gateway.room)
    await gateway.read()
    gateway.truth.commit("a")
    gateway.truth.appended = gateway.hub.positions[0] = 11
    gateway.room.forget()
    await gateway.answer("early")
    assert not asking.done()
    await gateway.answer("late")
    assert await asking == 11


async def test_a_delivery_tells_the_head_whatever_becomes_of_the_read(gateway: Gateway) -> None:
    (asking,) = gateway.ask(gateway.room)
    await gateway.answer("none")
    await gateway.read()
    gateway.truth.commit("a")
    for _ in gateway.hub.deliver(0, [gateway.truth.log[-1]]):
        pass
    await gateway.answer("fail")
    assert await asking == 11


async def test_a_shard_that_is_not_read_has_no_heads(gateway: Gateway) -> None:
    gateway.hub.positions.clear()
    (asking,) = gateway.ask(gateway.room)
    with pytest.raises(Unavailable, match="not being read"):
        await asking


async def test_a_log_that_fails_fails_those_who_were_in_the_read(gateway: Gateway) -> None:
    asked = gateway.ask(gateway.room, gateway.room, gateway.open("b"))
    await gateway.answer("none")
    await gateway.answer("fail")
    for asking in asked:
        with pytest.raises(Unavailable, match="away"):
            await asking
    (again,) = gateway.ask(gateway.room)
    await gateway.answer("late")
    assert await again == 10


async def test_who_leaves_takes_nobody_along(gateway: Gateway) -> None:
    leaving, staying = gateway.ask(gateway.room, gateway.room)
    await gateway.read()
    leaving.cancel()
    await gateway.answer("late")
    assert await staying == 10
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_nobody_is_asked_for_those_who_have_left(gateway: Gateway) -> None:
    first, *others = gateway.ask(gateway.room, *(gateway.open(name) for name in "bcd"))
    await gateway.read()
    waiting = gateway.ask(*(gateway.open(name) for name in "efg"))
    await asyncio.sleep(0)
    for asking in (*others, *waiting):
        asking.cancel()
    await gateway.answer("late")
    assert await first == 10
    for _ in range(10):
        await asyncio.sleep(0)
        assert gateway.stores.reads == []


async def test_a_silent_redis_leaves_time_for_the_log_also_for_those_who_came_later() -> None:
    gateway = Gateway(timeout_s=0.6)
    began_s = asyncio.get_running_loop().time()
    (first,) = gateway.ask(gateway.room)
    silent = await gateway.read()
    (later,) = gateway.ask(gateway.open("b"))
    while silent in gateway.stores.reads:
        await asyncio.sleep(0.001)
    while not (first.done() and later.done()):
        for read in gateway.stores.reads:
            read.answer("late")
        await asyncio.sleep(0)
    assert (await first, await later) == (10, 0)
    assert asyncio.get_running_loop().time() - began_s >= 0.2


async def test_silent_stores_are_waited_for_only_so_long() -> None:
    gateway = Gateway(timeout_s=0.05)
    asked = gateway.ask(gateway.room, gateway.open("b"))
    for asking in asked:
        with pytest.raises(Unavailable, match="in time"):
            await asking
    while gateway.stores.reads:
        await asyncio.sleep(0.001)
