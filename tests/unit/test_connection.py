"""A connection over a socket that only the test empties: what waits for a client stays bounded."""

import asyncio
from collections.abc import Iterator

import pytest

from gateway import codes
from gateway.commands import Since
from tests.property.test_hub_delivery import CEILING_BYTES, Delivery


@pytest.fixture
def state() -> Iterator[Delivery]:
    state = Delivery()
    yield state
    state.teardown()


def commit(state: Delivery, count: int) -> None:
    state.commit(["a"] * count)
    state.append(count)


def answer_all(state: Delivery) -> None:
    for _ in range(20):
        for read in list(state.stores.reads):
            state.async_do(lambda read=read: read.answer("late"))
        state.turn()


def deliver_all(state: Delivery) -> None:
    while state.hub.positions[0] < state.truth.appended or state.delivery is not None:
        if state.delivery is None:
            state.deliver(8, 0)
        else:
            state.go_on()


@pytest.mark.parametrize("count", range(6, 22))
def test_nothing_goes_live_on_a_full_buffer(state: Delivery, count: int) -> None:
    """For some count the page that brings it to the head is the one that fills the buffer."""
    state.begin(joined=True)
    socket = state.sockets[0]
    commit(state, count)
    deliver_all(state)
    while socket.full:
        state.read(0, 50)
    answer_all(state)
    for _ in range(20):
        commit(state, 5)
        deliver_all(state)
        answer_all(state)
    assert socket.full
    assert socket.most_bytes < CEILING_BYTES + 1_000


def test_replies_with_pages_are_held_back_from_a_full_buffer(state: Delivery) -> None:
    commit(state, 30)
    state.consumer.lag = 0
    socket = state.sockets[0]
    for room in ("a", "b"):
        state.on_loop(0, state.clients[0].subscribe(room, Since()))
    socket.write(b"\x81\x7e\x02\x59" + b"\n" * 601)
    assert socket.full
    answer_all(state)
    assert len(socket.buffer) < 601 + 800
    assert b'"publications"' not in socket.buffer
    state.come_back(0)


def test_a_client_that_makes_no_progress_is_closed(state: Delivery) -> None:
    state.begin(joined=True)
    commit(state, 30)
    deliver_all(state)
    connection, socket = state.connections[0], state.sockets[0]
    assert socket.full

    async def wait(now: float) -> None:
        connection.on_deadline(now)

    state.loop.run_until_complete(wait(30.0))
    assert socket.closed == codes.SLOW.code
    assert connection.deadline is None
    state.come_back(0)


def test_a_client_that_reads_slowly_stays_and_is_not_asked_for_pongs(state: Delivery) -> None:
    state.begin(joined=True)
    commit(state, 30)
    deliver_all(state)
    connection, socket = state.connections[0], state.sockets[0]

    async def wait(now: float) -> None:
        connection.on_deadline(now)

    for turn in range(1, 4):
        state.read(0, 10)
        state.loop.run_until_complete(wait(30.0 * turn))
        assert socket.closed is None
        assert connection.deadline is not None
        assert connection.deadline > 30.0 * turn


def test_one_task_of_a_client_ends_with_it(state: Delivery) -> None:
    state.subscribe(0, "a", "start", turn=True)
    assert state.stores.reads
    connection = state.connections[0]

    async def gone() -> None:
        connection.closed()
        for _ in range(5):
            await asyncio.sleep(0)

    state.loop.run_until_complete(gone())
    assert not connection._tasks
    assert not state.hub.rooms["default", "a"].occupied
    state.come_back(0)
