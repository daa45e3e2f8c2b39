"""A room's replay stream: pages that are true for a stated seq, or no answer at all."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from outbox import keys
from outbox.head import RoomHead
from outbox.message import Message
from outbox.redis import connect as redis_connect
from outbox.streams import Replay, StreamLimits, Streams

EPOCH = "e1"
SHARD = 0


def message(seq: int, room: str, offset: int, payload: bytes = b"{}") -> Message:
    return Message(SHARD, seq, "acme", room, offset, "b1", "7", None, payload, True, 1)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    client = redis_connect.connect(redis_url)
    yield client
    await client.aclose()
    await client.connection_pool.disconnect()


@pytest.fixture
def bus(client: Redis) -> Streams:
    return Streams(client)


async def read(
    bus: Streams, after: int, limit: int = 100, limit_bytes: int = 10**6
) -> Replay | None:
    return await bus.replay(EPOCH, SHARD, "acme", "a", after, limit, limit_bytes)


def offsets(replay: Replay | None) -> list[int]:
    assert replay is not None
    return [message.offset for message in replay.messages]


async def fill(bus: Streams, count: int, payload: bytes = b"{}") -> list[Message]:
    """Messages of room a on the even seqs, of room b on the odd ones."""
    messages = [
        message(seq, "b" if seq % 2 else "a", (seq + 1) // 2, payload)
        for seq in range(1, 2 * count + 1)
    ]
    await bus.append(EPOCH, SHARD, messages, start=True)
    return [message for message in messages if message.room == "a"]


async def test_a_page_carries_its_messages_and_its_seq(bus: Streams) -> None:
    sent = await fill(bus, 100, payload=b"\x00\xff\r\n")
    replay = await read(bus, 20, 70)
    assert replay == Replay(EPOCH, 200, 100, tuple(sent[20:90]))
    assert offsets(await read(bus, 90, 70)) == list(range(91, 101))


async def test_the_position_alone(bus: Streams) -> None:
    await fill(bus, 10)
    assert await read(bus, 0, 0) == Replay(EPOCH, 20, 10, ())
    assert await read(bus, 10) == Replay(EPOCH, 20, 10, ())
    assert await read(bus, 11) == Replay(EPOCH, 20, 10, ())


async def test_a_page_is_bounded_in_bytes_but_never_empty(bus: Streams) -> None:
    await fill(bus, 10, payload=bytes(1000))
    assert offsets(await read(bus, 0, 10, limit_bytes=3500)) == [1, 2, 3]
    assert offsets(await read(bus, 3, 10, limit_bytes=1)) == [4]


async def test_the_newest(bus: Streams) -> None:
    await fill(bus, 10)
    assert offsets(await bus.latest(EPOCH, SHARD, "acme", "a", 3)) == [8, 9, 10]
    assert offsets(await bus.latest(EPOCH, SHARD, "acme", "a", 99)) == list(range(1, 11))


async def test_what_the_stream_no_longer_holds_is_for_the_log(client: Redis) -> None:
    bus = Streams(client, StreamLimits(room_length=100))
    await fill(bus, 1000)
    assert await read(bus, 0) is None
    assert await bus.latest(EPOCH, SHARD, "acme", "a", 500) is None
    assert offsets(await read(bus, 950)) == list(range(951, 1001))


async def test_nothing_is_known_without_bus_or_stream(bus: Streams, client: Redis) -> None:
    assert await read(bus, 0) is None
    await fill(bus, 3)
    assert await bus.replay(EPOCH, SHARD, "acme", "c", 0, 10) is None
    assert await bus.replay("e2", SHARD, "acme", "a", 0, 10) is None
    await client.delete(keys.bus(EPOCH, SHARD))
    assert await read(bus, 0) is None
    await client.xgroup_create(keys.bus(EPOCH, SHARD), "w:1", id="0-0", mkstream=True)
    assert await read(bus, 0) is None


async def test_a_stream_older_than_the_bus_is_not_believed(bus: Streams, client: Redis) -> None:
    await fill(bus, 3)
    await client.delete(keys.bus(EPOCH, SHARD))
    # Seq 7 was a's offset 4: the new bus never carried it, and the stream of a lacks it.
    await bus.append(EPOCH, SHARD, [message(8, "b", 4)], start=True)
    assert await read(bus, 3) is None
    assert await read(bus, 0) is None


async def test_a_stream_that_outlived_its_bus_is_believed_after_the_refill(
    bus: Streams, client: Redis
) -> None:
    await fill(bus, 3)
    await client.delete(keys.bus(EPOCH, SHARD))
    refill = [message(5, "b", 3), message(6, "a", 3)]
    await bus.append(EPOCH, SHARD, refill, start=True)
    assert offsets(await read(bus, 0)) == [1, 2, 3]


async def test_a_bus_that_was_trimmed_keeps_its_start(client: Redis) -> None:
    bus = Streams(client, StreamLimits(bus_length=1))
    await bus.append(EPOCH, SHARD, [message(1, "a", 1)], start=True)
    quiet = [message(seq, "b", seq - 1) for seq in range(2, 500)]
    await bus.append(EPOCH, SHARD, quiet)
    await client.xtrim(keys.bus(EPOCH, SHARD), maxlen=0, approximate=False)
    assert offsets(await read(bus, 0)) == [1]


async def test_deleted_entries_end_a_page(bus: Streams, client: Redis) -> None:
    await fill(bus, 10)
    key = keys.room(EPOCH, SHARD, "acme", "a")
    await client.xdel(key, "4-0")
    assert offsets(await read(bus, 0)) == [1, 2, 3]
    assert await read(bus, 3) is None
    assert offsets(await read(bus, 4)) == [5, 6, 7, 8, 9, 10]
    await client.xdel(key, "10-0")
    assert await read(bus, 4) is None


async def heads(bus: Streams, *rooms: str) -> list[RoomHead | None]:
    return await bus.heads(EPOCH, [(SHARD, "acme", room) for room in rooms])


async def test_where_many_rooms_stand_is_one_round_trip(bus: Streams, client: Redis) -> None:
    await fill(bus, 100)
    other = Message(3, 1, "acme", "c", 1, "b1", "7", None, b"{}", True, 1)
    await bus.append(EPOCH, 3, [other], start=True)
    asked = [(SHARD, "acme", f"idle:{number}") for number in range(500)]
    asked[7] = (SHARD, "acme", "a")
    asked[450] = (SHARD, "acme", "b")
    asked += [(3, "acme", "c"), (5, "acme", "d")]
    found = await bus.heads(EPOCH, asked)
    assert found[7] == found[450] == RoomHead(100, 200)
    assert found[500] == RoomHead(1, 1)
    assert [head for head in found if head is not None] == [found[7], found[450], found[500]]
    before = (await client.info("commandstats"))["cmdstat_eval"]["calls"]
    assert await bus.heads(EPOCH, asked) == found
    # By now the server knows the script: one call for up to 200 rooms of a shard.
    assert (await client.info("commandstats"))["cmdstat_eval"]["calls"] == before
    assert await bus.heads(EPOCH, []) == []


async def test_a_head_is_as_true_as_a_page(bus: Streams, client: Redis) -> None:
    """Whatever a stream loses: where it cannot give a page, it does not tell the head either."""
    await fill(bus, 10)
    stream, top = (name(EPOCH, SHARD, "acme", "a") for name in (keys.room, keys.top))
    damages = [
        ("XDEL", stream, "10-0"),
        ("DEL", stream),
        ("SET", stream, "no stream"),
        ("DEL", top),
        ("SET", top, "9 1"),
        ("SET", top, "nonsense"),
        ("SET", keys.bus(EPOCH, SHARD), "no stream"),
        ("DEL", keys.bus(EPOCH, SHARD)),
        # The bus was begun anew after the room's newest message.
        ("XSETID", keys.bus(EPOCH, SHARD), "40-0", "ENTRIESADDED", "20"),
    ]
    dumps = {key: await client.dump(key) for key in (stream, top, keys.bus(EPOCH, SHARD))}
    for damage in damages:
        assert await heads(bus, "a", "b") == [RoomHead(10, 20)] * 2
        await client.execute_command(*damage)
        assert await read(bus, 0, 0) is None
        assert (await heads(bus, "a", "b"))[0] is None, damage
        for key, dump in dumps.items():
            await client.restore(key, 0, dump, replace=True)


async def test_heads_of_rooms_with_large_messages_are_told_for_some(bus: Streams) -> None:
    """Redis serves nobody else meanwhile: the log tells the others."""
    payload = b'"' + b"x" * 1_000_000 + b'"'
    for seq in range(1, 11):
        await bus.append(EPOCH, SHARD, [message(seq, f"large:{seq}", 1, payload)], start=seq == 1)
    found = await heads(bus, *(f"large:{number}" for number in range(1, 11)))
    assert found == [RoomHead(1, 10)] * 5 + [None] * 5
