"""Append and reconcile on a real Redis, against a model of the log, under any order of events.

Two relays append batches late, twice, in parts and out of order; Redis loses everything, single
keys, its recent past, or the end of any stream on its own; the log loses its beginning; messages
are redacted while a relay that had read them sleeps. After each event all that Redis says must be
true: what it holds equals the log, a replay never claims to be complete when it is not, and
redacted content is gone for good once its notice is on the bus.
"""

import asyncio
from typing import Any, cast

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from redis.asyncio import Redis

from outbox import keys, reconcile, streams
from outbox.entry import decode
from outbox.log import Log
from outbox.message import Message
from outbox.redis import connect as redis_connect
from outbox.streams import Replay, Status, StreamLimits, Streams
from outbox.tombstone import NOTICE_TAG, TOMBSTONE_TAGS, Redacted
from tests.chaos import faults

EPOCH = "e"
SHARD = 0
ROOMS = ["a", "b", "c"]
STREAMS = [keys.bus(EPOCH, SHARD), *(keys.room(EPOCH, SHARD, "t", room) for room in ROOMS)]
KEYS = [*STREAMS, *(keys.top(EPOCH, SHARD, "t", room) for room in ROOMS)]
LIMITS = StreamLimits(bus_length=12, room_length=6)
WINDOW = 5
PAGE = 3
KEPT = 6
"""Of how many moments a loss may leave one."""
Moment = dict[bytes, bytes]
"""All keys with what DUMP said of them."""
SOME_ROOMS = st.lists(st.sampled_from(ROOMS), min_size=1, max_size=6)


class ModelLog:
    """What Postgres holds of one shard."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.dropped = 0
        """Messages that retention took from the beginning."""
        self.contents: dict[int, tuple[Message, int]] = {}
        """Seq of each tombstone → what it was, and the seq of its notice."""

    def redact(self, seq: int) -> list[Message]:
        """Leaves a tombstone; the batch of its notice."""
        content = self.messages[seq - 1]
        self.messages[seq - 1] = content._replace(payload=b"null", tags=TOMBSTONE_TAGS)
        notice = self.sequence([content.room])[0]._replace(
            payload=b"null", tags={NOTICE_TAG: str(content.offset)}
        )
        self.messages[-1] = notice
        self.contents[seq] = content, notice.seq
        return [notice]

    async def redacted(self, notices: list[Message]) -> Redacted:
        return {
            (SHARD, notice.seq): seq
            for notice in notices
            for seq, (_, at) in self.contents.items()
            if at == notice.seq and seq > self.dropped
        }

    def tells(self, found: list[Message], expected: list[Message], last: int) -> bool:
        """Whether what was found on streams that end at ``last`` is what it should be."""
        return len(found) == len(expected) and all(
            one == other or self._may_be(one, last)
            for one, other in zip(found, expected, strict=True)
        )

    def _may_be(self, message: Message, last: int) -> bool:
        content, notice = self.contents.get(message.seq, (None, 0))
        return message == content and last < notice

    def sequence(self, rooms: list[str]) -> list[Message]:
        batch = f"batch-{len(self.messages)}"
        made = []
        for room in rooms:
            offset = 1 + sum(message.room == room for message in self.messages)
            seq = len(self.messages) + 1
            made.append(
                Message(SHARD, seq, "t", room, offset, batch, "1", None, b"%d" % seq, False, 0)
            )
            self.messages.append(made[-1])
        return made

    def top(self, room: str, seq: int) -> int:
        """Where a room stood at a seq."""
        return sum(message.room == room for message in self.messages[:seq])

    def of_room(self, room: str) -> list[Message]:
        return [message for message in self.messages if message.room == room]

    async def span(self, shard: int, after: int, until: int, limit: int) -> list[Message]:
        return self.messages[max(after, self.dropped) : until][:limit]

    async def heads(self) -> tuple[str, dict[int, int]]:
        return EPOCH, {SHARD: len(self.messages)}


class Appending(RuleBasedStateMachine):
    """The events."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.log = ModelLog()
        self.batches: list[list[Message]] = []
        self.views: list[list[Message]] = []
        """What relays had read of the log before a redaction."""
        self.past: list[tuple[Moment, ...]] = []
        """What replicas have: each a moment, and before it those that it has come through."""
        self.lived: tuple[Moment, ...] = ()
        """The moments that Redis as it is now has come through."""
        self.stale: set[tuple[str, bytes]] = set()
        """Rooms with tops that were not raised when their streams went on."""
        self.groups = 0
        self.client: Redis = self.run(self._connect(url))
        self.streams = Streams(self.client, LIMITS)

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    async def _connect(self, url: str) -> Redis:
        client = redis_connect.connect(url)
        await client.flushall()
        return client

    def teardown(self) -> None:
        self.run(self.client.aclose())
        self.runner.close()

    @rule(rooms=SOME_ROOMS)
    def sequence(self, rooms: list[str]) -> None:
        """A relay commits a batch, and may never come to append it."""
        self.batches.append(self.log.sequence(rooms))

    @initialize(rooms=SOME_ROOMS, batches=st.integers(0, 5))
    def begin(self, rooms: list[str], batches: int) -> None:
        self.go_on(rooms, batches)

    @rule(rooms=SOME_ROOMS, batches=st.integers(1, 3))
    def go_on(self, rooms: list[str], batches: int) -> None:
        """The usual case: a relay appends what it sequenced, and reconciles if it is refused."""
        for _ in range(batches):
            self.replicate()
            self.batches.append(self.log.sequence(rooms))
            if self.append(self.batches[-1]).status is Status.APPENDED:
                self.what_is_new_is_served(set(rooms))
            else:
                self.reconcile()

    def what_is_new_is_served(self, rooms: set[str]) -> None:
        """No loss of the past is in the way."""
        for room in rooms:
            messages = self.log.of_room(room)
            after = len(messages) - 1
            replay = self.run(self.streams.replay(EPOCH, SHARD, "t", room, after, 100))
            assert replay is not None
            assert list(replay.messages) == messages[-1:]

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def append_any(self, data: st.DataObject) -> None:
        """Late, again, or before its turn; perhaps only a part of it."""
        batch = data.draw(st.sampled_from(self.batches))
        first = data.draw(st.integers(0, len(batch) - 1))
        last = data.draw(st.integers(first + 1, len(batch)))
        self.append(batch[first:last])

    def append(self, batch: list[Message]) -> streams.Appended:
        before = self.last()
        answer = self.offer(batch)
        if before == 0:
            assert answer == streams.Appended(Status.EMPTY, 0)
        elif batch[0].seq > before + 1:
            assert answer == streams.Appended(Status.GAP, before)
        else:
            assert answer == streams.Appended(Status.APPENDED, max(before, batch[-1].seq))
        return answer

    def offer(self, batch: list[Message], *, start: bool = False) -> streams.Appended:
        redacted = self.run(self.log.redacted(batch))
        appended = self.streams.append(EPOCH, SHARD, batch, start=start, redacted=redacted)
        return cast(streams.Appended, self.run(appended))

    @precondition(lambda self: len(self.log.messages) > self.log.dropped)
    @rule(data=st.data(), append=st.booleans(), back=st.booleans())
    def redact(self, data: st.DataObject, append: bool, back: bool) -> None:
        """Wherever the message is at this moment: only in a relay's memory, or also in Redis.

        ``back``: the room's stream alone is soon what it was before, and goes on.
        """
        first = self.log.dropped + 1
        seq = data.draw(st.integers(first, len(self.log.messages)))
        if self.log.messages[seq - 1].tags is not None:
            return
        self.replicate()
        self.views.append(list(self.log.messages))
        self.batches.append(self.log.redact(seq))
        if append:
            self.append(self.batches[-1])
        room = self.log.messages[seq - 1].room
        key = keys.room(EPOCH, SHARD, "t", room)
        if back and self.may_lose(key):
            self.run(self._restore(self.lived[-1], key))
            self.go_on([room], 1)

    @rule()
    def reconcile(self) -> None:
        head = len(self.log.messages)
        before = self.last()
        done = self.run(
            reconcile.reconcile(self.streams, cast(Log, self.log), EPOCH, [SHARD], self.log.heads)
        )
        nothing_left = self.log.dropped == head and before < head
        assert done.lasts[SHARD] == self.last() == (before if nothing_left else head)

    @precondition(lambda self: self.log.messages)
    @rule(data=st.data())
    def start_with_an_old_view(self, data: st.DataObject) -> None:
        """A relay paused in the middle of a refill goes on with what it had read."""
        view = data.draw(st.sampled_from([*self.views, self.log.messages]))
        after = data.draw(st.integers(min(self.log.dropped, len(view)), len(view)))
        page = view[after : after + PAGE]
        if page:
            answer = self.offer(page, start=True)
            assert answer.status is Status.APPENDED

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """Mostly of one key alone: all others are as they were, and perhaps go on from there."""
        lose = data.draw(st.sampled_from(self.losses))
        lose(self, data)
        if data.draw(st.booleans()):
            self.go_on(data.draw(SOME_ROOMS), 1)

    @rule(data=st.data(), back=st.booleans())
    def lose_of_a_stream(self, data: st.DataObject, back: bool) -> None:
        if back:
            self.set_a_stream_back(data)
        else:
            self.lose_an_end(data)
        self.go_on(data.draw(SOME_ROOMS), 1)

    def lose_an_end(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(STREAMS))
        count = self.run(self._length(key))
        if count and self.may_lose(key):
            self.run(faults.shorten(self.client, key, data.draw(st.integers(0, count - 1))))

    def set_a_stream_back(self, data: st.DataObject) -> None:
        """It is what it was at some moment, perhaps before it was begun anew."""
        key = data.draw(st.sampled_from(STREAMS))
        if not self.lived or not self.may_lose(key):
            return
        before, now = self.last(), self.run(self._dump())
        self.run(self._restore(data.draw(st.sampled_from(self.lived[-KEPT:])), key))
        if self.last() > before:
            # No loss: a bus that had been begun anew further back would be ahead of the rooms.
            self.run(self._restore(now, key))

    def set_a_top_back(self, data: st.DataObject) -> None:
        """A relay that knows nothing of tops has appended the messages above it."""
        room = data.draw(st.sampled_from(ROOMS))
        key = keys.top(EPOCH, SHARD, "t", room)
        replay = self.run(self.streams.replay(EPOCH, SHARD, "t", room, 0, 0))
        if replay is None or replay.top < 2:
            return
        begun = int(self.run(self.client.get(key)).split()[1])
        top = data.draw(st.integers(1, replay.top - 1))
        value = b"%d %d" % (top, min(begun, top))
        self.stale.add((room, value))
        self.run(self.client.set(key, value))

    def lose_a_key(self, data: st.DataObject) -> None:
        self.run(self.client.delete(data.draw(st.sampled_from(KEYS))))

    def find_something_else(self, data: st.DataObject) -> None:
        """Somebody else uses our names."""
        key = data.draw(st.sampled_from(KEYS))
        self.run(self.client.delete(key))
        if data.draw(st.booleans()):
            self.run(self.client.set(key, data.draw(st.sampled_from(["junk", "", "1", "-1 1"]))))
        else:
            self.run(self.client.hset(key, "a", "b"))

    def lose_everything(self, data: st.DataObject) -> None:
        self.run(self.client.flushall())

    losses = (
        lose_an_end,
        set_a_stream_back,
        set_a_top_back,
        lose_a_key,
        find_something_else,
        lose_everything,
    )

    def may_lose(self, key: str) -> bool:
        """Not where a top, too, is out of date: with two losses the two may agree."""
        room = key.rpartition(":")[2]
        return (room, self.run(self._value(keys.top(EPOCH, SHARD, "t", room)))) not in self.stale

    async def _value(self, key: str) -> bytes | None:
        return cast(list[bytes | None], await self.client.mget(key))[0]

    async def _length(self, key: str) -> int:
        return await self.client.xlen(key) if await self.client.type(key) == b"stream" else 0

    @rule()
    def make_a_group(self) -> None:
        """A gateway does so on a bus that is missing, too."""
        self.run(self._make_group())

    async def _make_group(self) -> None:
        self.groups += 1
        if await self.client.type(keys.bus(EPOCH, SHARD)) not in (b"stream", b"none"):
            return
        await self.client.xgroup_create(
            keys.bus(EPOCH, SHARD), f"group-{self.groups}", id="0-0", mkstream=True
        )

    @rule()
    def replicate(self) -> None:
        """A replica, or a file on disk, has this moment."""
        self.lived = (*self.lived, self.run(self._dump()))
        self.past.append(self.lived)

    async def _dump(self) -> Moment:
        return {key: await self.client.dump(key) for key in await self.client.keys("tg:*")}

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def fail_over(self, data: st.DataObject) -> None:
        """Redis is what it was at that moment: everything since is lost."""
        self.lived = data.draw(st.sampled_from(self.past[-KEPT:]))
        self.run(self._restore(self.lived[-1]))

    async def _restore(self, moment: Moment, only: str = "*") -> None:
        for key in await self.client.keys(only):
            await self.client.delete(key)
        for key, value in moment.items():
            if only in ("*", key.decode()):
                await self.client.restore(key, 0, value)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        """Retention drops the beginning of the log."""
        left = len(self.log.messages) - self.log.dropped
        dropped = self.log.dropped + data.draw(st.integers(0, min(left, 2 * WINDOW)))
        # No Redis is as far behind as retention: what a notice speaks of stays as long as it.
        for seq, (_, notice) in self.log.contents.items():
            if seq <= dropped < notice:
                return
        self.log.dropped = dropped

    def last(self) -> int:
        return cast(int, self.run(self.streams.last_ids(EPOCH, [SHARD]))[SHARD])

    @invariant()
    def the_bus_equals_the_log(self) -> None:
        last = self.last()
        assert last <= len(self.log.messages)
        found = self.run(self._read(keys.bus(EPOCH, SHARD)))
        if not found:
            assert last == 0 or last in self.log.contents
            return
        assert self.log.tells(found, [self.log.messages[m.seq - 1] for m in found], last)
        holes = set(range(found[0].seq, last + 1)) - {message.seq for message in found}
        assert holes <= set(self.log.contents)

    @invariant()
    def room_streams_hold_messages_of_their_room(self) -> None:
        for room in ROOMS:
            found = self.run(self._read(keys.room(EPOCH, SHARD, "t", room)))
            expected = [self.log.of_room(room)[message.offset - 1] for message in found]
            # What is not served may be older than a redaction.
            assert self.log.tells(found, expected, 0)

    @invariant()
    def replays_are_true(self) -> None:
        last = self.last()
        for room in ROOMS:
            for after, limit, replay in self.run(self._replays(room)):
                if replay is not None:
                    self.is_true(replay, room, after, limit, last)

    async def _replays(self, room: str) -> list[tuple[int, int, Replay | None]]:
        """Everything that a stream may begin, end or break off with."""
        head = len(self.log.of_room(room))
        asked = [
            (after, limit)
            for after in range(max(head - 2 * LIMITS.room_length, 0), head + 2)
            for limit in (100, after % 3)
        ]
        found = [
            (after, limit, await self.streams.replay(EPOCH, SHARD, "t", room, after, limit))
            for after, limit in asked
        ]
        latest = await self.streams.latest(EPOCH, SHARD, "t", room, 3)
        return [*found, (max(latest.top - 3, 0) if latest else 0, 3, latest)]

    def is_true(self, replay: Replay, room: str, after: int, limit: int, last: int) -> None:
        messages = self.log.of_room(room)
        assert replay.seq == last
        assert self.log.top(room, replay.seq) <= replay.top <= len(messages)
        # A page may end early, at a hole, but never be empty where there is something: a caller
        # that is not at the top asks for the next.
        assert replay.messages or limit == 0 or after >= replay.top
        assert len(replay.messages) <= limit
        expected = messages[after : after + len(replay.messages)]
        assert self.log.tells(list(replay.messages), expected, last)

    async def _read(self, key: str) -> list[Message]:
        if await self.client.type(key) != b"stream":
            return []
        entries = cast(Any, await self.client.xrange(key))
        return [decode(SHARD, fields[b"b"].decode(), fields[b"m"]) for _, fields in entries]


def test_whatever_happens_redis_tells_the_truth(redis_url: str, monkeypatch: Any) -> None:
    # Small numbers bring trimming, paging and the window into every run.
    monkeypatch.setattr(reconcile, "REFILL_WINDOW", WINDOW)
    monkeypatch.setattr(reconcile, "PAGE_MESSAGES", PAGE)

    async def small_blocks() -> None:
        client = redis_connect.connect(redis_url)
        await client.config_set("stream-node-max-entries", "2")
        await client.aclose()

    asyncio.run(small_blocks())
    run_machine(
        lambda: Appending(redis_url),
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
