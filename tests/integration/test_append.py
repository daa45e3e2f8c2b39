"""Compare-and-append: what a bus and its room streams accept, skip and refuse."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError

from outbox import keys
from outbox.errors import OutboxError
from outbox.message import Message
from outbox.redis import connect as redis_connect
from outbox.streams import Appended, Status, StreamLimits, Streams

EPOCH = "e1"
SHARD = 3


@dataclass
class Rooms:
    """Makes messages with dense positions, as sequencing does."""

    seq: int = 0

    def __post_init__(self) -> None:
        self.offsets: dict[str, int] = {}

    def make(self, *rooms: str, batch: str = "b1", payload: bytes = b"{}") -> list[Message]:
        made = []
        for room in rooms:
            self.seq += 1
            self.offsets[room] = self.offsets.get(room, 0) + 1
            made.append(
                Message(
                    SHARD,
                    self.seq,
                    "acme",
                    room,
                    self.offsets[room],
                    batch,
                    "77",
                    {"kind": "x"},
                    payload,
                    False,
                    1_700_000_000_000_000,
                )
            )
        return made


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    client = redis_connect.connect(redis_url)
    yield client
    await client.aclose()
    await client.connection_pool.disconnect()


@pytest.fixture
def bus(client: Redis) -> Streams:
    return Streams(client)


async def seqs(client: Redis) -> list[int]:
    entries = await client.xrange(keys.bus(EPOCH, SHARD))
    return [int(entry_id.split(b"-")[0]) for entry_id, _ in entries]


async def offsets(client: Redis, room: str) -> list[int]:
    entries = await client.xrange(keys.room(EPOCH, SHARD, "acme", room))
    return [int(entry_id.split(b"-")[0]) for entry_id, _ in entries]


async def test_only_a_start_begins_an_empty_bus(bus: Streams, client: Redis) -> None:
    messages = Rooms().make("a", "b", "a")
    assert await bus.append(EPOCH, SHARD, messages) == Appended(Status.EMPTY, 0)
    assert await seqs(client) == []
    assert await bus.append(EPOCH, SHARD, messages, start=True) == Appended(Status.APPENDED, 3)
    assert await seqs(client) == [1, 2, 3]
    assert await offsets(client, "a") == [1, 2]
    assert await offsets(client, "b") == [1]


async def test_a_group_made_on_a_missing_bus_leaves_it_empty(bus: Streams, client: Redis) -> None:
    await client.xgroup_create(keys.bus(EPOCH, SHARD), "w:1", id="0-0", mkstream=True)
    messages = Rooms(seq=40).make("a")
    assert (await bus.append(EPOCH, SHARD, messages)).status is Status.EMPTY
    assert (await bus.append(EPOCH, SHARD, messages, start=True)).last == 41
    assert len(await client.xinfo_groups(keys.bus(EPOCH, SHARD))) == 1


async def test_a_repetition_changes_nothing(bus: Streams, client: Redis) -> None:
    messages = Rooms().make("a", "b", "a")
    await bus.append(EPOCH, SHARD, messages, start=True)
    for start in (False, True):
        again = await bus.append(EPOCH, SHARD, messages, start=start)
        assert again == Appended(Status.APPENDED, 3)
    assert await seqs(client) == [1, 2, 3]
    assert await offsets(client, "a") == [1, 2]


async def test_a_partial_repetition_appends_the_rest(bus: Streams, client: Redis) -> None:
    messages = Rooms().make("a", "b", "a", "b", "a")
    await bus.append(EPOCH, SHARD, messages[:3], start=True)
    assert await bus.append(EPOCH, SHARD, messages) == Appended(Status.APPENDED, 5)
    assert await seqs(client) == [1, 2, 3, 4, 5]
    assert await offsets(client, "a") == [1, 2, 3]
    assert await offsets(client, "b") == [1, 2]


async def test_a_hole_is_refused(bus: Streams, client: Redis) -> None:
    messages = Rooms().make("a", "a", "a")
    await bus.append(EPOCH, SHARD, messages[:1], start=True)
    assert await bus.append(EPOCH, SHARD, messages[2:]) == Appended(Status.GAP, 1)
    assert await bus.append(EPOCH, SHARD, [messages[1], messages[1]]) == Appended(
        Status.APPENDED, 2
    )
    assert await seqs(client) == [1, 2]


async def test_a_start_beyond_a_gap_begins_anew(bus: Streams, client: Redis) -> None:
    rooms = Rooms()
    await bus.append(EPOCH, SHARD, rooms.make("a", "b"), start=True)
    rooms.make("a", "b")
    assert (await bus.append(EPOCH, SHARD, rooms.make("a"), start=True)).last == 5
    assert await seqs(client) == [5]
    assert await offsets(client, "a") == [3]
    # The stream of b still ends at offset 1 though b stands at 2: it must not answer.
    assert await offsets(client, "b") == [1]
    assert await bus.replay(EPOCH, SHARD, "acme", "b", 1, 10) is None
    replay = await bus.replay(EPOCH, SHARD, "acme", "a", 2, 10)
    assert replay is not None
    assert (replay.seq, replay.top, [m.offset for m in replay.messages]) == (5, 3, [3])


async def test_a_fork_is_told_and_nothing_is_written(bus: Streams, client: Redis) -> None:
    rooms = Rooms()
    await bus.append(EPOCH, SHARD, rooms.make("a", "a"), start=True)
    other = Rooms(seq=1).make("c", "c", batch="b2")
    assert await bus.append(EPOCH, SHARD, other) == Appended(Status.FORK, 2)
    assert await seqs(client) == [1, 2]
    assert await offsets(client, "c") == []


async def test_a_fork_shows_in_a_room_when_the_bus_is_gone(bus: Streams, client: Redis) -> None:
    await bus.append(EPOCH, SHARD, Rooms().make("a", "a"), start=True)
    await client.delete(keys.bus(EPOCH, SHARD))
    other = Rooms().make("a", batch="b2")
    assert (await bus.append(EPOCH, SHARD, other, start=True)).status is Status.FORK


async def test_trimmed_and_deleted_entries_do_not_move_the_end(bus: Streams, client: Redis) -> None:
    rooms = Rooms()
    first = rooms.make("a", "a", "a")
    await bus.append(EPOCH, SHARD, first, start=True)
    await client.xdel(keys.bus(EPOCH, SHARD), "3-0")
    await client.xtrim(keys.bus(EPOCH, SHARD), maxlen=0, approximate=False)
    assert await bus.append(EPOCH, SHARD, first) == Appended(Status.APPENDED, 3)
    assert await bus.append(EPOCH, SHARD, rooms.make("a")) == Appended(Status.APPENDED, 4)
    assert await seqs(client) == [4]
    assert await bus.last_ids(EPOCH, [SHARD, 4]) == {SHARD: 4, 4: 0}


async def test_a_late_repetition_cannot_revive_a_rooms_past(bus: Streams, client: Redis) -> None:
    rooms = Rooms()
    old = rooms.make("a", "a")
    await bus.append(EPOCH, SHARD, old, start=True)
    await bus.append(EPOCH, SHARD, rooms.make("a", "a", batch="b2"))
    await client.delete(keys.room(EPOCH, SHARD, "acme", "a"))
    await bus.append(EPOCH, SHARD, old)
    assert await offsets(client, "a") == []
    await bus.append(EPOCH, SHARD, rooms.make("a", batch="b3"))
    assert await offsets(client, "a") == [5]


async def test_streams_are_bounded_and_rooms_expire(client: Redis) -> None:
    bus = Streams(client, StreamLimits(200, 100, 60, {"brief": 0}))
    rooms = Rooms()
    await bus.append(EPOCH, SHARD, rooms.make("a", "brief:x"), start=True)
    for _ in range(20):
        await bus.append(EPOCH, SHARD, rooms.make(*["a"] * 50, "brief:x"))
    assert 200 <= await client.xlen(keys.bus(EPOCH, SHARD)) <= 300
    assert 100 <= await client.xlen(keys.room(EPOCH, SHARD, "acme", "a")) <= 200
    assert 0 < await client.ttl(keys.room(EPOCH, SHARD, "acme", "a")) <= 60
    assert await client.ttl(keys.bus(EPOCH, SHARD)) == -1
    assert await offsets(client, "brief:x") == []


async def test_large_batches_go_in_portions(bus: Streams, client: Redis) -> None:
    rooms = Rooms()
    binary = bytes(range(256)) * 4096
    messages = rooms.make(*["a"] * 9, payload=binary) + rooms.make(*["b"] * 2500)
    assert (await bus.append(EPOCH, SHARD, messages, start=True)).last == 2509
    assert await seqs(client) == list(range(1, 2510))
    replay = await bus.replay(EPOCH, SHARD, "acme", "a", 0, 9, limit_bytes=3_000_000)
    assert replay is not None
    assert replay.messages == tuple(messages[:2])


async def test_a_forgotten_script_is_sent_again(bus: Streams, client: Redis) -> None:
    rooms = Rooms()
    await bus.append(EPOCH, SHARD, rooms.make("a"), start=True)
    await client.script_flush()
    assert await bus.last_ids(EPOCH, [SHARD]) == {SHARD: 1}
    assert (await bus.append(EPOCH, SHARD, rooms.make("a"))).last == 2


async def test_positions_beyond_32_bits_are_exact(bus: Streams, client: Redis) -> None:
    rooms = Rooms(seq=2**53 - 10)
    rooms.offsets["a"] = 2**52
    assert (await bus.append(EPOCH, SHARD, rooms.make("a", "a"), start=True)).last == 2**53 - 8
    replay = await bus.replay(EPOCH, SHARD, "acme", "a", 2**52, 10)
    assert replay is not None
    assert (replay.seq, replay.top) == (2**53 - 8, 2**52 + 2)
    assert [message.offset for message in replay.messages] == [2**52 + 1, 2**52 + 2]


async def test_a_full_redis_refuses_the_whole_call(bus: Streams, client: Redis) -> None:
    rooms = Rooms()
    await bus.append(EPOCH, SHARD, rooms.make("a"), start=True)
    more = rooms.make("a", "a")
    await client.config_set("maxmemory", "1")
    try:
        with pytest.raises(OutOfMemoryError):
            await bus.append(EPOCH, SHARD, more)
        replay = await bus.replay(EPOCH, SHARD, "acme", "a", 0, 10)
    finally:
        await client.config_set("maxmemory", "0")
    assert replay is not None
    assert replay.top == 1
    assert await seqs(client) == [1]
    assert (await bus.append(EPOCH, SHARD, more)).last == 3


async def test_the_epoch_is_kept(bus: Streams) -> None:
    assert await bus.epoch() is None
    await bus.set_epoch(EPOCH)
    assert await bus.epoch() == EPOCH


async def test_check_warns_of_eviction(client: Redis) -> None:
    assert await redis_connect.check(client) == ()
    await client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        (warning,) = await redis_connect.check(client)
    finally:
        await client.config_set("maxmemory-policy", "noeviction")
    assert "allkeys-lru" in warning


@pytest.mark.parametrize("url", ["http://localhost", "redis://localhost:port", "localhost:6379"])
def test_a_malformed_url_is_told(url: str) -> None:
    with pytest.raises(OutboxError, match="Redis URL"):
        redis_connect.connect(url)


def test_an_unknown_option_of_the_url_is_told() -> None:
    with pytest.raises(OutboxError, match="speed"):
        redis_connect.connect("redis://localhost?db=1&speed=high")


def test_no_part_of_a_password_is_told() -> None:
    with pytest.raises(OutboxError) as caught:
        redis_connect.connect("redis://:hunter/two@localhost:6379")
    assert "hunter" not in str(caught.value)
    assert "two" not in str(caught.value)


async def test_nothing_is_sent_twice(
    redis_url: str, unused_tcp_port_factory: Callable[[], int]
) -> None:
    client = redis_connect.connect(f"redis://127.0.0.1:{unused_tcp_port_factory()}")
    connection = client.connection_pool.make_connection()
    assert connection.retry.get_retries() == 0
    assert not connection.retry_on_timeout
    with pytest.raises(RedisConnectionError):
        await client.ping()
    await client.aclose()


async def test_a_key_of_another_type_is_not_in_the_way(bus: Streams, client: Redis) -> None:
    await client.set(keys.bus(EPOCH, SHARD), "junk")
    await client.set(keys.room(EPOCH, SHARD, "acme", "a"), "junk")
    rooms = Rooms()
    assert await bus.last_ids(EPOCH, [SHARD]) == {SHARD: 0}
    assert await bus.replay(EPOCH, SHARD, "acme", "a", 0, 10) is None
    messages = rooms.make("a")
    assert (await bus.append(EPOCH, SHARD, messages)).status is Status.EMPTY
    assert (await bus.append(EPOCH, SHARD, messages, start=True)).last == 1
    assert await offsets(client, "a") == [1]
