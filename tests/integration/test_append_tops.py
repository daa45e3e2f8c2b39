"""A room's top: what it is worth where it and the room's stream do not agree."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from outbox import keys
from outbox.message import Message
from outbox.redis import connect as redis_connect
from outbox.streams import Appended, Status, StreamLimits, Streams
from tests.chaos.faults import shorten
from tests.integration.test_append import EPOCH, SHARD, Rooms, offsets

BUS = keys.bus(EPOCH, SHARD)
ROOM = keys.room(EPOCH, SHARD, "acme", "a")
TOP = keys.top(EPOCH, SHARD, "acme", "a")


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    client = redis_connect.connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def bus(client: Redis) -> Streams:
    return Streams(client)


async def top(client: Redis) -> str | None:
    value = cast(bytes | None, await client.get(TOP))
    return None if value is None else value.decode()


async def read(bus: Streams, after: int, limit: int = 100) -> list[int] | None:
    """Offsets of a page; None if only the log can answer."""
    replay = await bus.replay(EPOCH, SHARD, "acme", "a", after, limit)
    return None if replay is None else [message.offset for message in replay.messages]


async def put(bus: Streams, messages: list[Message], **options: Any) -> Appended:
    appended = await bus.append(EPOCH, SHARD, messages, **options)
    assert appended.status is Status.APPENDED
    return appended


async def older_relay_appends(bus: Streams, client: Redis, messages: list[Message]) -> None:
    """As relays did that knew nothing of tops."""
    before = await top(client)
    await put(bus, messages)
    await client.delete(TOP)
    if before is not None:
        await client.set(TOP, before, ex=600)


async def test_it_stands_where_the_stream_ends(bus: Streams, client: Redis) -> None:
    rooms = Rooms()
    await put(bus, rooms.make("a", "b", "a"), start=True)
    assert await top(client) == "2 1"
    await put(bus, rooms.make("b", "a"))
    assert await top(client) == "3 1"
    # They go together: one without the other is of no use.
    assert 0 < await client.pttl(TOP) <= 600_000
    assert await client.pexpiretime(TOP) == await client.pexpiretime(ROOM)


async def test_it_is_written_for_what_was_appended_before_a_refusal(
    bus: Streams, client: Redis
) -> None:
    rooms = Rooms()
    await put(bus, rooms.make("b"), start=True)
    first, _, third = rooms.make("a", "b", "a")
    assert await bus.append(EPOCH, SHARD, [first, third]) == Appended(Status.GAP, 2)
    assert await top(client) == "1 1"
    assert 0 < await client.ttl(ROOM) <= 600
    assert await read(bus, 0) == [1]


async def test_a_stream_that_lost_its_end_is_not_believed(bus: Streams, client: Redis) -> None:
    rooms = Rooms()
    await put(bus, rooms.make(*["a"] * 10), start=True)
    await shorten(client, ROOM, 7)
    for after in (-1, 0, 6, 7, 9, 10, 11):
        assert await read(bus, after) is None
        assert await read(bus, after, 0) is None
    # Going on, it has a hole inside. Pages end at it and say that there is more.
    await put(bus, rooms.make("a", "a"))
    assert await offsets(client, "a") == [1, 2, 3, 4, 5, 6, 7, 11, 12]
    before = await bus.replay(EPOCH, SHARD, "acme", "a", 2, 100)
    assert before is not None
    assert ([m.offset for m in before.messages], before.top) == ([3, 4, 5, 6, 7], 12)
    for after in (7, 8, 9):
        assert await read(bus, after) is None
    assert await read(bus, 10) == [11, 12]
    assert await read(bus, 12) == []
    assert await read(bus, 5, 1) == [6]
    assert await bus.latest(EPOCH, SHARD, "acme", "a", 5) is None
    newest = await bus.latest(EPOCH, SHARD, "acme", "a", 6)
    assert newest is not None
    assert ([m.offset for m in newest.messages], newest.top) == ([7], 12)


@pytest.mark.parametrize("kept", [0, 3])
async def test_bus_and_stream_each_lose_another_end(bus: Streams, client: Redis, kept: int) -> None:
    rooms = Rooms()
    messages = rooms.make(*["a", "b"] * 5)
    await put(bus, messages, start=True)
    await shorten(client, BUS, 7)
    await shorten(client, ROOM, kept)
    # The top is ahead of the bus: what comes again has its place.
    assert await read(bus, kept) is None
    assert await put(bus, messages) == Appended(Status.APPENDED, 10)
    assert await read(bus, kept) is None
    await put(bus, rooms.make("a"))
    assert await offsets(client, "a") == [*range(1, kept + 1), 6]
    assert await read(bus, kept) is None
    assert await read(bus, 5) == [6]


async def test_without_a_top_the_stream_begins_anew(bus: Streams, client: Redis) -> None:
    rooms = Rooms()
    await put(bus, rooms.make("a", "a"), start=True)
    await client.delete(TOP)
    assert await read(bus, 0) is None
    await put(bus, rooms.make("a"))
    assert await offsets(client, "a") == [3]
    assert await top(client) == "3 3"
    assert await read(bus, 2) == [3]


async def test_without_a_stream_it_begins_with_the_next(bus: Streams, client: Redis) -> None:
    rooms = Rooms()
    await put(bus, rooms.make("a", "a"), start=True)
    await client.delete(ROOM)
    assert await read(bus, 2) is None
    await put(bus, rooms.make("a"))
    assert await offsets(client, "a") == [3]
    assert await read(bus, 1) is None
    assert await read(bus, 2) == [3]


async def test_a_top_behind_its_stream_is_not_believed(bus: Streams, client: Redis) -> None:
    rooms = Rooms()
    await put(bus, rooms.make("a", "a"), start=True)
    await older_relay_appends(bus, client, rooms.make("a", "a"))
    assert await top(client) == "2 1"
    for after in (0, 2, 3, 4):
        assert await read(bus, after) is None
    await put(bus, rooms.make("a"))
    assert await offsets(client, "a") == [5]
    assert await read(bus, 4) == [5]


async def test_what_an_older_relay_appended_comes_again(bus: Streams, client: Redis) -> None:
    """The bus has lost it: the stream refuses its offset, and begins with it anew."""
    rooms = Rooms()
    await put(bus, rooms.make("a", "a"), start=True)
    more = rooms.make("a", "a", batch="b2")
    await older_relay_appends(bus, client, more)
    await shorten(client, BUS, 2)
    other = [message._replace(batch="other") for message in more]
    assert await bus.append(EPOCH, SHARD, other) == Appended(Status.FORK, 2)
    assert await offsets(client, "a") == [1, 2, 3, 4]
    await put(bus, more)
    assert await offsets(client, "a") == [3, 4]
    assert await top(client) == "4 3"
    assert await read(bus, 2) == [3, 4]


async def test_a_stream_of_an_older_relay_begins_anew(bus: Streams, client: Redis) -> None:
    rooms = Rooms()
    await put(bus, rooms.make("b"), start=True)
    await older_relay_appends(bus, client, rooms.make("a", "a"))
    assert await top(client) is None
    assert await read(bus, 0) is None
    await put(bus, rooms.make("a"))
    assert await offsets(client, "a") == [3]


@pytest.mark.parametrize("value", ["junk", "", "5", "5 x", "-5 1", "1 1 1"])
async def test_a_top_that_says_nothing(bus: Streams, client: Redis, value: str) -> None:
    rooms = Rooms()
    await put(bus, rooms.make("a", "a"), start=True)
    await client.set(TOP, value)
    assert await read(bus, 0) is None
    await put(bus, rooms.make("a"))
    assert await top(client) == "3 3"
    assert await read(bus, 2) == [3]


@pytest.mark.parametrize("key", [ROOM, TOP])
async def test_keys_of_another_type(bus: Streams, client: Redis, key: str) -> None:
    rooms = Rooms()
    messages = rooms.make("a", "a")
    await put(bus, messages, start=True)
    await client.delete(key)
    await client.hset(key, "x", "y")
    assert await read(bus, 0) is None
    assert await read(bus, 2, 0) is None
    # A repetition, of which the bus knows nothing any more.
    await client.delete(BUS)
    await put(bus, messages, start=True)
    await put(bus, rooms.make("a"))
    assert (await offsets(client, "a"))[-1] == 3
    assert await read(bus, 2) == [3]
    assert await client.type(TOP) == b"string"


async def test_a_room_without_a_stream_has_no_top(client: Redis) -> None:
    rooms = Rooms()
    await put(Streams(client), rooms.make("a", "a"), start=True)
    await put(Streams(client, StreamLimits(room_length=0)), rooms.make("a"))
    assert await client.exists(ROOM, TOP) == 0


async def test_a_redaction_begins_the_stream_anew(bus: Streams, client: Redis) -> None:
    rooms = Rooms()
    await put(bus, rooms.make(*["a"] * 5), start=True)
    content = await client.dump(ROOM)
    (notice,) = rooms.make("a")
    await put(bus, [notice], redacted={(SHARD, notice.seq): 4})
    assert await offsets(client, "a") == [6]
    assert await top(client) == "6 6"
    await put(bus, rooms.make("a"))
    assert await top(client) == "7 6"
    assert await read(bus, 5) == [6, 7]
    # Were it set back, it would not be believed, and what it held then never again.
    await client.restore(ROOM, 0, content, replace=True)
    assert await read(bus, 2) is None
    await put(bus, rooms.make("a"))
    assert await offsets(client, "a") == [1, 2, 3, 4, 5, 8]
    for after in range(7):
        assert await read(bus, after) is None
    assert await read(bus, 7) == [8]


async def test_a_notice_that_comes_again_leaves_the_newer(bus: Streams, client: Redis) -> None:
    """The room is ahead of its bus: all that is there came after the notice."""
    rooms = Rooms()
    before = rooms.make("a", "a")
    await put(bus, before, start=True)
    after = rooms.make("a", "a")
    await put(bus, after, redacted={(SHARD, 3): 1})
    await shorten(client, BUS, 1)
    await put(bus, [*before[1:], *after], redacted={(SHARD, 3): 1})
    assert await offsets(client, "a") == [3, 4]
    assert await read(bus, 2) == [3, 4]


async def test_what_is_erased_is_gone_with_its_top(bus: Streams, client: Redis) -> None:
    rooms = Rooms()
    await put(bus, rooms.make("a", "a"), start=True)
    await bus.erase(EPOCH, SHARD, "acme", "a", 1)
    assert await client.exists(ROOM, TOP) == 0
    await put(bus, rooms.make("a"))
    assert await offsets(client, "a") == [3]
