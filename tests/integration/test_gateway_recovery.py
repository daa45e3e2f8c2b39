"""Resuming: from each tier, over several pages, and honestly refused where messages are lost."""

import asyncio
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import psycopg
import pytest
from redis.asyncio import Redis

from outbox import keys
from outbox.names import namespace
from outbox.redis.connect import connect
from outbox.sharding import shard_of
from tests.chaos.faults import shorten
from tests.client import Client
from tests.integration.conftest import TENANT, Stack, token
from tests.processes import Process


@pytest.fixture
async def client(gateway: Process) -> AsyncIterator[Client]:
    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time()))
        yield client


@pytest.fixture
async def watcher(gateway: Process) -> AsyncIterator[Client]:
    """Another client, by which the test sees what the gateway has delivered."""
    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time()))
        yield client


@pytest.fixture
async def bare_redis(shared: Stack) -> AsyncIterator[Redis]:
    redis = connect(shared.redis.url)
    yield redis
    await redis.aclose()


async def epoch_of(redis: Redis) -> str:
    value = await redis.get(keys.EPOCH)
    assert isinstance(value, bytes)
    return value.decode()


async def committed(shared: Stack, redis: Redis, room: str, count: int) -> str:
    """Publishes and waits until the relay has appended, with no gateway looking; the epoch."""
    assert namespace(room)
    shared.publish(room, *range(1, count + 1))
    epoch = await epoch_of(redis)
    key = keys.room(epoch, shard_of(TENANT, room, 16, 4), TENANT, room)
    while (
        not await redis.exists(key)
        or (await redis.xinfo_stream(key))["last-generated-id"] != b"%d-0" % count
    ):
        await asyncio.sleep(0.01)
    return epoch


async def test_a_room_that_never_was_is_recovered_from_the_beginning(
    client: Client, room: str
) -> None:
    reply = await client.subscribe(room, (0, ""))
    assert (reply["recovered"], reply["was_recovering"], reply["offset"]) == (True, True, 0)
    assert "publications" not in reply


@pytest.mark.parametrize("tier", ["ring", "stream", "log"])
async def test_each_tier_gives_what_was_missed(
    client: Client, watcher: Client, shared: Stack, bare_redis: Redis, room: str, tier: str
) -> None:
    if tier == "ring":
        await watcher.subscribe(room)
    epoch = await committed(shared, bare_redis, room, 10)
    if tier == "ring":
        await watcher.until_offset(room, 10)
    if tier != "stream":
        await bare_redis.delete(keys.room(epoch, shard_of(TENANT, room, 16, 4), TENANT, room))
    reply = await client.subscribe(room, (4, epoch))
    assert reply["recovered"] is True
    assert reply["offset"] == 4
    await client.until_offset(room, 10)
    assert client.data(room) == [5, 6, 7, 8, 9, 10]
    shared.publish(room, 11)
    await client.until_offset(room, 11)


async def end_lost(redis: Redis, stream: str, top: str) -> None:
    await shorten(redis, stream, 7)


async def stream_gone(redis: Redis, stream: str, top: str) -> None:
    await redis.delete(stream)


async def stream_replaced(redis: Redis, stream: str, top: str) -> None:
    await redis.set(stream, "not a stream")


async def top_gone(redis: Redis, stream: str, top: str) -> None:
    await redis.delete(top)


async def top_behind(redis: Redis, stream: str, top: str) -> None:
    await redis.set(top, "7 1")


async def top_replaced(redis: Redis, stream: str, top: str) -> None:
    await redis.delete(top)
    await redis.hset(top, "not", "a top")  # type: ignore[misc]


@pytest.mark.parametrize("since", [None, 0, 7])
@pytest.mark.parametrize("went_on", [False, True])
@pytest.mark.parametrize(
    "damage", [end_lost, stream_gone, stream_replaced, top_gone, top_behind, top_replaced]
)
async def test_a_room_that_the_gateway_does_not_know_and_redis_lost_in_part(
    client: Client,
    shared: Stack,
    bare_redis: Redis,
    room: str,
    damage: Callable[[Redis, str, str], Awaitable[None]],
    went_on: bool,
    since: int | None,
) -> None:
    """The bus is whole, so that no relay notices anything."""
    head = 10
    epoch = await committed(shared, bare_redis, room, head)
    names = epoch, shard_of(TENANT, room, 16, 4), TENANT, room
    await damage(bare_redis, keys.room(*names), keys.top(*names))
    if went_on:
        head += 1
        shared.publish(room, head)
        while not await is_at(bare_redis, keys.top(*names), head):
            await asyncio.sleep(0.01)
    reply = await client.subscribe(room, None if since is None else (since, epoch))
    if since is None:
        assert reply["offset"] == head
    else:
        assert reply["recovered"] is True
        await client.until_offset(room, head)
    shared.publish(room, head + 1)
    await client.until_offset(room, head + 1)
    assert client.data(room) == list(range(1 + (head if since is None else since), head + 2))


async def is_at(redis: Redis, top: str, offset: int) -> bool:
    (value,) = await redis.mget(top)
    return value is not None and value.startswith(b"%d " % offset)


async def test_many_pages_and_then_live_while_publishing_goes_on(
    client: Client, shared: Stack, room: str
) -> None:
    """More than a ring, a replay stream and two pages of the log hold."""
    for part in range(3):
        shared.publish(room, *range(part * 400, part * 400 + 400))
    publishing = asyncio.gather(
        *(asyncio.to_thread(shared.publish, room, *range(50)) for _ in range(10))
    )
    reply = await client.subscribe(room, (0, ""))
    assert reply["recovered"] is True
    await publishing
    await client.until_offset(room, 1_700)
    assert client.data(room)[:1_200] == list(range(1_200))


@pytest.mark.parametrize("case", ["another epoch", "no epoch", "the future"])
async def test_a_position_that_never_was_is_not_recovered(
    client: Client, shared: Stack, bare_redis: Redis, room: str, case: str
) -> None:
    epoch = await committed(shared, bare_redis, room, 5)
    since = {"another epoch": (5, "another"), "no epoch": (5, ""), "the future": (6, epoch)}[case]
    reply = await client.subscribe(room, since)
    assert (reply["was_recovering"], reply.get("recovered", False)) == (True, False)
    assert (reply["offset"], reply["epoch"]) == (5, epoch)
    assert "publications" not in reply
    shared.publish(room, 6)
    await client.until_offset(room, 6)


async def test_what_retention_has_dropped_is_not_recovered(
    client: Client, shared: Stack, bare_redis: Redis, room: str
) -> None:
    epoch = await committed(shared, bare_redis, room, 6)
    with psycopg.connect(shared.dsn) as connection:
        connection.execute(
            'DELETE FROM tidegate.message WHERE room = %s AND "offset" <= 3', (room,)
        )
    await bare_redis.delete(keys.room(epoch, shard_of(TENANT, room, 16, 4), TENANT, room))
    reply = await client.subscribe(room, (2, epoch))
    assert (reply.get("recovered", False), reply["offset"]) == (False, 6)
    await client.call("unsubscribe", channel=room)
    reply = await client.subscribe(room, (3, epoch))
    assert reply["recovered"] is True
    await client.until_offset(room, 6)


async def test_a_client_that_is_ahead_of_its_gateway_waits_for_it(
    shared: Stack, client: Client, room: str
) -> None:
    """The other gateway is stopped while the room moves on, so it comes back behind."""
    name = f"late-{secrets.token_hex(3)}"
    late = shared.gateway(name)
    try:
        async with Client(late.websocket_url) as there, Client(late.websocket_url) as comes:
            for each in (there, comes):
                await each.greet(token(now=time.time()))
            await there.subscribe(room)
            await client.subscribe(room)
            late.signal(signal.SIGSTOP)
            shared.publish(room, *range(5))
            await client.until_offset(room, 5)
            joining = asyncio.ensure_future(comes.subscribe(room, client.positions[room]))
            await asyncio.sleep(0)
            late.signal(signal.SIGCONT)
            reply = await joining
            assert reply["recovered"] is True
            assert reply["offset"] == 5
            shared.publish(room, 5)
            await comes.until_offset(room, 6)
            await there.until_offset(room, 6)
    finally:
        late.stop()
