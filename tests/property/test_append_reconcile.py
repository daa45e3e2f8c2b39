"""Append and reconcile on a real Redis, against a model of the log, under any order of events.

Two relays append batches late, twice, in parts and out of order; Redis loses everything, single
keys or its recent past; the log loses its beginning; messages are redacted while a relay that had
read them sleeps. After each event all that Redis says must be true: what it holds equals the log, a
replay never claims to be complete when it is not, and redacted content is gone for good once its
notice is on the bus.
"""

import asyncio
from typing import Any, cast

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from redis.asyncio import Redis

from outbox import keys, reconcile, streams
from outbox.entry import decode
from outbox.log import Log
from outbox.message import Message
from outbox.redis import connect as redis_connect
from outbox.streams import Status, StreamLimits, Streams
from outbox.tombstone import NOTICE_TAG, TOMBSTONE_TAGS, Redacted

EPOCH = "e"
SHARD = 0
ROOMS = ["a", "b", "c"]
LIMITS = StreamLimits(bus_length=12, room_length=6)
WINDOW = 5
PAGE = 3


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
        self.past: list[dict[bytes, bytes]] = []
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

    @rule(rooms=st.lists(st.sampled_from(ROOMS), min_size=1, max_size=6))
    def sequence(self, rooms: list[str]) -> None:
        """A relay commits a batch, and may never come to append it."""
        self.batches.append(self.log.sequence(rooms))

    @rule(rooms=st.lists(st.sampled_from(ROOMS), min_size=1, max_size=6))
    def sequence_and_append(self, rooms: list[str]) -> None:
        """The usual case."""
        self.batches.append(self.log.sequence(rooms))
        self.append(self.batches[-1])

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def append_any(self, data: st.DataObject) -> None:
        """Late, again, or before its turn; perhaps only a part of it."""
        batch = data.draw(st.sampled_from(self.batches))
        first = data.draw(st.integers(0, len(batch) - 1))
        last = data.draw(st.integers(first + 1, len(batch)))
        self.append(batch[first:last])

    def append(self, batch: list[Message]) -> None:
        before = self.last()
        answer = self.offer(batch)
        if before == 0:
            assert answer == streams.Appended(Status.EMPTY, 0)
        elif batch[0].seq > before + 1:
            assert answer == streams.Appended(Status.GAP, before)
        else:
            assert answer == streams.Appended(Status.APPENDED, max(before, batch[-1].seq))

    def offer(self, batch: list[Message], *, start: bool = False) -> streams.Appended:
        redacted = self.run(self.log.redacted(batch))
        appended = self.streams.append(EPOCH, SHARD, batch, start=start, redacted=redacted)
        return cast(streams.Appended, self.run(appended))

    @precondition(lambda self: len(self.log.messages) > self.log.dropped)
    @rule(data=st.data(), append=st.booleans())
    def redact(self, data: st.DataObject, append: bool) -> None:
        """Wherever the message is at this moment: only in a relay's memory, or also in Redis."""
        first = self.log.dropped + 1
        seq = data.draw(st.integers(first, len(self.log.messages)))
        if self.log.messages[seq - 1].tags is not None:
            return
        self.views.append(list(self.log.messages))
        self.batches.append(self.log.redact(seq))
        if append:
            self.append(self.batches[-1])

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

    @rule()
    def lose_everything(self) -> None:
        self.run(self.client.flushall())

    @rule()
    def lose_the_bus(self) -> None:
        self.run(self.client.delete(keys.bus(EPOCH, SHARD)))

    @rule(room=st.sampled_from(ROOMS))
    def lose_a_room(self, room: str) -> None:
        self.run(self.client.delete(keys.room(EPOCH, SHARD, "t", room)))

    @rule()
    def make_a_group(self) -> None:
        """A gateway does so on a bus that is missing, too."""
        self.run(self._make_group())

    async def _make_group(self) -> None:
        self.groups += 1
        await self.client.xgroup_create(
            keys.bus(EPOCH, SHARD), f"group-{self.groups}", id="0-0", mkstream=True
        )

    @rule()
    def replicate(self) -> None:
        """A replica, or a file on disk, has this moment."""
        self.past.append(self.run(self._dump()))

    async def _dump(self) -> dict[bytes, bytes]:
        return {key: await self.client.dump(key) for key in await self.client.keys("tg:*")}

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def fail_over(self, data: st.DataObject) -> None:
        """Redis is what it was at that moment: everything since is lost."""
        self.run(self._restore(data.draw(st.sampled_from(self.past))))

    async def _restore(self, moment: dict[bytes, bytes]) -> None:
        await self.client.flushall()
        for key, value in moment.items():
            await self.client.restore(key, 0, value)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        """Retention drops the beginning of the log."""
        dropped = data.draw(st.integers(self.log.dropped, len(self.log.messages)))
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
    def room_streams_are_a_stretch_of_their_room(self) -> None:
        for room in ROOMS:
            found = self.run(self._read(keys.room(EPOCH, SHARD, "t", room)))
            if found:
                first = found[0].offset
                expected = self.log.of_room(room)[first - 1 : first - 1 + len(found)]
                # A stream that its bus was begun anew behind is not served, whatever it holds.
                assert self.log.tells(found, expected, 0)

    @invariant()
    def replays_are_true(self) -> None:
        last = self.last()
        for room in ROOMS:
            messages = self.log.of_room(room)
            head = len(messages)
            for after in {0, max(head - LIMITS.room_length, 0), max(head - 1, 0), head, head + 1}:
                replay = self.run(self.streams.replay(EPOCH, SHARD, "t", room, after, 100))
                if replay is None:
                    continue
                assert replay.seq == last
                assert self.log.top(room, replay.seq) <= replay.top <= head
                expected = messages[after : max(replay.top, after)]
                assert self.log.tells(list(replay.messages), expected, last)

    async def _read(self, key: str) -> list[Message]:
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
