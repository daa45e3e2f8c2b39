"""The doorbell: who rings when, and what ends the sleep."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import psycopg
import pytest

from outbox.database import DOORBELL_CHANNEL
from outbox.doorbell import RELEASE, Doorbell
from tests.probe import Probe

LONG_S = 60.0


@pytest.fixture
async def probe(migrated: str, redis_url: str) -> AsyncIterator[Probe]:
    async with Probe(migrated, redis_url) as probe:
        yield probe


@pytest.fixture
async def writer(migrated: str) -> AsyncIterator[psycopg.AsyncConnection]:
    async with await psycopg.AsyncConnection.connect(migrated) as connection:
        yield connection


@pytest.fixture
def wake() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def bell(probe: Probe, wake: asyncio.Event) -> Doorbell:
    bell = Doorbell(probe.connection, wake)
    assert await bell.listen() is None
    return bell


async def insert(writer: psycopg.AsyncConnection, room: str) -> None:
    await writer.execute("SELECT tidegate.publish('acme', %s, '{}')", (room,))


async def test_an_insert_while_it_sleeps_wakes_it(
    probe: Probe, bell: Doorbell, writer: psycopg.AsyncConnection
) -> None:
    assert await bell.lock({probe.shard("a")})
    sleep = asyncio.create_task(bell.wait(LONG_S))
    await insert(writer, "a")
    await writer.commit()
    assert await sleep


async def test_a_bell_before_the_wait_is_heard(
    probe: Probe, bell: Doorbell, writer: psycopg.AsyncConnection
) -> None:
    assert await bell.lock({probe.shard("a")})
    await insert(writer, "a")
    await writer.commit()
    assert await bell.wait(LONG_S)


async def test_a_bell_among_other_answers_is_heard(
    probe: Probe, bell: Doorbell, wake: asyncio.Event, writer: psycopg.AsyncConnection
) -> None:
    assert await bell.lock({probe.shard("a")})
    await insert(writer, "a")
    await writer.commit()
    await probe.connection.execute("SELECT 1")
    await probe.connection.execute("SELECT 1")
    assert wake.is_set()


async def test_a_roll_back_rings_nobody(
    probe: Probe, bell: Doorbell, writer: psycopg.AsyncConnection
) -> None:
    assert await bell.lock({probe.shard("a")})
    await insert(writer, "a")
    await writer.rollback()
    assert not await bell.wait(0.05)


async def test_others_bells_do_not_wake_it(
    probe: Probe, bell: Doorbell, writer: psycopg.AsyncConnection
) -> None:
    async with Probe(probe.dsn, "redis://127.0.0.1:1") as other:
        stranger = probe.stranger("a")
        assert await Doorbell(other.connection, asyncio.Event()).lock({probe.shard(stranger)})
        assert await bell.lock({probe.shard("a")})
        await insert(writer, stranger)
        await writer.commit()
        # The ring has arrived on this connection with the answer, and changes nothing.
        await probe.connection.execute("SELECT 1")
        assert not await bell.wait(0.05)


async def test_nobody_rings_while_it_is_awake(
    probe: Probe, bell: Doorbell, writer: psycopg.AsyncConnection
) -> None:
    heard: list[psycopg.Notify] = []
    async with await psycopg.AsyncConnection.connect(probe.dsn, autocommit=True) as listener:
        listener.add_notify_handler(heard.append)
        await listener.execute(f"LISTEN {DOORBELL_CHANNEL}")
        assert await bell.lock({probe.shard("a")})
        assert bell.prelude() == RELEASE
        await probe.connection.execute(RELEASE)
        assert bell.prelude() is None
        await insert(writer, "a")
        await writer.commit()
        await listener.execute("SELECT 1")
        assert heard == []
        assert await bell.lock({probe.shard("a")})
        await insert(writer, "a")
        await writer.commit()
        await listener.execute("SELECT 1")
        assert [notify.payload for notify in heard] == [str(probe.shard("a"))]


async def test_the_lock_is_refused_while_a_silent_writer_is_under_way(
    probe: Probe, bell: Doorbell, writer: psycopg.AsyncConnection
) -> None:
    shards = {probe.shard("a"), probe.shard(probe.stranger("a"))}
    await insert(writer, "a")
    assert not await bell.lock(shards)
    assert bell.locked == shards - {probe.shard("a")}
    assert not await bell.lock(shards)
    await writer.commit()
    assert await bell.lock(shards)


async def test_locks_of_shards_that_went_to_others_are_given_back(
    probe: Probe, bell: Doorbell
) -> None:
    assert await bell.lock({1, 2, 3})
    assert await bell.lock({2, 3})
    async with Probe(probe.dsn, "redis://127.0.0.1:1") as other:
        taker = Doorbell(other.connection, asyncio.Event())
        assert await taker.lock({1})
        assert not await taker.lock({1, 2})
    assert await bell.lock(set())
    assert bell.locked == frozenset()


async def test_anybody_may_end_the_sleep(probe: Probe, bell: Doorbell, wake: asyncio.Event) -> None:
    assert await bell.lock({1})
    sleep = asyncio.create_task(bell.wait(LONG_S))
    await asyncio.sleep(0)
    wake.set()
    assert await sleep
    assert (await (await probe.connection.execute("SELECT 7")).fetchone()) == (7,)


async def test_a_cancelled_sleep_leaves_the_connection_usable(
    probe: Probe, bell: Doorbell, writer: psycopg.AsyncConnection
) -> None:
    assert await bell.lock({probe.shard("a")})
    descriptors = len(os.listdir("/dev/fd"))
    sleep = asyncio.create_task(bell.wait(LONG_S))
    await asyncio.sleep(0.01)
    sleep.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleep
    assert len(os.listdir("/dev/fd")) == descriptors
    assert (await (await probe.connection.execute("SELECT 7")).fetchone()) == (7,)
    await insert(writer, "a")
    await writer.commit()
    assert await bell.wait(LONG_S)


async def test_a_broken_connection_ends_the_sleep(
    probe: Probe, bell: Doorbell, writer: psycopg.AsyncConnection
) -> None:
    assert await bell.lock({1})
    sleep = asyncio.create_task(bell.wait(LONG_S))
    await asyncio.sleep(0.01)
    await writer.execute("SELECT pg_terminate_backend(%s)", (probe.connection.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError):
        await sleep


async def test_a_broken_connection_is_not_mixed_up_with_the_next_socket(
    probe: Probe, bell: Doorbell, wake: asyncio.Event, writer: psycopg.AsyncConnection
) -> None:
    """libpq closes its descriptor at the error, and the next socket gets the same number."""
    loop = asyncio.get_running_loop()
    number = probe.connection.fileno()
    received = asyncio.Event()

    async def take_the_number() -> tuple[socket.socket, socket.socket]:
        await wake.wait()
        near, far = socket.socketpair()
        assert number in (near.fileno(), far.fileno())
        if near.fileno() != number:
            near, far = far, near
        loop.add_reader(near, received.set)
        return near, far

    assert await bell.lock({1})
    taker = asyncio.create_task(take_the_number())
    await asyncio.sleep(0)
    sleep = asyncio.create_task(bell.wait(LONG_S))
    await asyncio.sleep(0.01)
    await writer.execute("SELECT pg_terminate_backend(%s)", (probe.connection.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError):
        await sleep
    near, far = await taker
    far.send(b"x")
    async with asyncio.timeout(10):
        await received.wait()
    loop.remove_reader(near)
    near.close()
    far.close()


async def test_it_says_why_it_does_not_work(
    probe: Probe, bell: Doorbell, writer: psycopg.AsyncConnection
) -> None:
    await writer.execute("SELECT tidegate.set_doorbell(false)")
    await writer.commit()
    assert "set_doorbell" in str(await bell.listen())
    await writer.execute("SELECT tidegate.set_doorbell(true)")
    await writer.commit()
    assert await bell.listen() is None
    probe.connection.pooled = True
    assert "pooler" in str(await bell.listen())


async def test_a_bell_without_a_shard_asks_to_look_at_the_bell_itself(
    bell: Doorbell, writer: psycopg.AsyncConnection
) -> None:
    assert await bell.lock({1})
    await writer.execute("SELECT pg_notify(%s, 'switched')", (DOORBELL_CHANNEL,))
    await writer.commit()
    assert await bell.wait(LONG_S)
    assert bell.changed
    assert await bell.listen() is None
    assert not bell.changed
