"""A world for the delivery tests: what was committed, stores that answer late, sockets that fill.

Nothing here is a server: it is the model that says what is true. A store's answer is true for the
seq that it carries and no more: it may be old, short, refused, or never come.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.codes import CloseCode
from gateway.commands import Since
from gateway.connection import Connection
from outbox.errors import PostgresUnavailable
from outbox.head import RoomHead
from outbox.log import LogPage
from outbox.message import Message
from outbox.streams import Replay
from outbox.tombstone import NOTICE_TAG, TOMBSTONE_TAGS, redacted_offset

TENANT = "default"
STREAM_LENGTH = 3


class Truth:
    """One shard's messages in each epoch."""

    def __init__(self) -> None:
        self.epoch = "e0"
        self.logs: dict[str, list[Message]] = {"e0": []}
        self.appended = 0
        """Seq up to which the relay has appended."""
        self.dropped = 0
        """Seq up to which retention has dropped."""
        self.redactions: dict[tuple[str, int], Redaction] = {}
        """By epoch and seq of the message that was redacted."""
        self._epochs = 0

    @property
    def log(self) -> list[Message]:
        return self.logs[self.epoch]

    @property
    def seq(self) -> int:
        return len(self.log)

    def commit(self, room: str) -> None:
        seq, offset = self.seq + 1, self.head(room) + 1
        payload = json.dumps({"is": f"{self.epoch}/{room}/{offset}"}).encode()
        self.log.append(Message(0, seq, TENANT, room, offset, "b", "7", None, payload, False, 0))

    def redact(self, room: str, offset: int) -> None:
        """A tombstone in the log, and a notice in its room."""
        index = next(i for i, m in enumerate(self.log) if (m.room, m.offset) == (room, offset))
        message = self.log[index]
        if (self.epoch, message.seq) in self.redactions or redacted_offset(message) is not None:
            return
        self.log[index] = message._replace(payload=b"null", tags=TOMBSTONE_TAGS)
        self.commit(room)
        notice = self.log[-1]
        self.log[-1] = notice._replace(payload=b"null", tags={NOTICE_TAG: str(offset)})
        self.redactions[self.epoch, message.seq] = Redaction(message, notice.seq)

    def as_of(self, message: Message, seq: int, epoch: str | None = None) -> Message:
        """The message in Redis while the bus stands at ``seq``: until the notice is there, the
        content is."""
        redaction = self.redactions.get((epoch or self.epoch, message.seq))
        return redaction.content if redaction is not None and seq < redaction.notice else message

    def bus(self, first: int, last: int, held: bool = False) -> list[Message]:
        """What a worker reads with seqs ``first`` + 1 … ``last``. ``held``: it has read what was
        there before any notice, and delivers it only now."""
        seq = 0 if held else self.appended
        return [self.as_of(message, seq) for message in self.log[first:last]]

    def head(self, room: str, seq: int | None = None, epoch: str | None = None) -> int:
        """The room's head as of a seq (None: now)."""
        log = self.logs[epoch or self.epoch]
        return sum(1 for m in log[: len(log) if seq is None else seq] if m.room == room)

    def first(self, room: str) -> int:
        """The lowest offset that the log still has; head + 1 if none."""
        return self.head(room, self.dropped) + 1

    def new_epoch(self, kept: int) -> None:
        """Postgres lost all commits after ``kept``."""
        self._epochs += 1
        old, before = self.log, self.epoch
        self.epoch = f"e{self._epochs}"
        self.logs[self.epoch] = [self.as_of(m, kept, before) for m in old[:kept]]
        for (epoch, seq), redaction in list(self.redactions.items()):
            if epoch == before and redaction.notice <= kept:
                self.redactions[self.epoch, seq] = redaction
        self.appended = kept
        self.dropped = min(self.dropped, kept)

    # Answers

    def log_page(self, room: str, after: int, limit: int) -> LogPage:
        first, head = self.first(room), self.head(room)
        found = [m for m in self.log[self.dropped :] if m.room == room and m.offset > after]
        if found and found[0].offset != after + 1:
            found = []
        return LogPage(self.epoch, self.seq, head, first, tuple(found[:limit]))

    def replay(self, epoch: str, room: str, after: int, limit: int, seq: int) -> Replay | None:
        """The room's stream as it stood when the bus was at ``seq``."""
        top = self.head(room, seq, epoch)
        found = [m for m in self.logs[epoch][:seq] if m.room == room]
        # A notice ends the stream before it.
        begun = max((m.offset for m in found if redacted_offset(m) is not None), default=1)
        found = [self.as_of(m, seq, epoch) for m in found if m.offset >= begun][-STREAM_LENGTH:]
        if not found:
            return None
        if limit == 0 or after >= top:
            return Replay(epoch, seq, top, ())
        if after + 1 < found[0].offset:
            return None
        return Replay(epoch, seq, top, tuple(m for m in found if m.offset > after)[:limit])


@dataclass(frozen=True)
class Redaction:
    """What a message was, and the seq of the notice that it is no more."""

    content: Message
    notice: int


@dataclass
class Pending:
    """A read that waits for its answer. The answers are true, each for its own seq."""

    future: "asyncio.Future[Any]"
    early: Any
    """As it was when the question came."""
    late: Callable[[], Any]
    failure: Exception
    old: Callable[[int], Any] | None = None
    """From a store that lags behind by some seqs."""
    nothing: Any = None
    """Of a store that cannot tell."""

    def answer(self, how: str, lag: int = 0) -> None:
        if self.future.done():
            return
        match how:
            case "early":
                self.future.set_result(self.early)
            case "fail":
                self.future.set_exception(self.failure)
            case "old" if self.old is not None:
                self.future.set_result(self.old(lag))
            case "none" if self.old is not None:
                self.future.set_result(self.nothing)
            case _:
                self.future.set_result(self.late())


class Stores:
    """Stands for ``Streams`` and ``Log``: each read waits until the test answers it."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.reads: list[Pending] = []

    async def page(
        self, tenant: str, room: str, shard: int, after: int, limit: int, limit_bytes: int
    ) -> LogPage:
        def late() -> LogPage:
            return self.truth.log_page(room, after, limit)

        failure = PostgresUnavailable("away")
        page: LogPage = await self._ask(Pending(_future(), late(), late, failure))
        return page

    async def replay(
        self,
        epoch: str,
        shard: int,
        tenant: str,
        room: str,
        after: int,
        limit: int,
        limit_bytes: int,
    ) -> Replay | None:
        def late(lag: int = 0) -> Replay | None:
            return self.truth.replay(epoch, room, after, limit, self._bus(epoch, lag))

        failure = RedisConnectionError("away")
        found: Replay | None = await self._ask(Pending(_future(), late(), late, failure, late))
        return found

    async def heads(
        self, epoch: str, rooms: Sequence[tuple[int, str, str]]
    ) -> list[RoomHead | None]:
        def late(lag: int = 0) -> list[RoomHead | None]:
            seq = self._bus(epoch, lag)
            found = [self.truth.replay(epoch, room, 0, 0, seq) for _, _, room in rooms]
            return [None if replay is None else RoomHead(replay.top, seq) for replay in found]

        failure = RedisConnectionError("away")
        nothing = [None] * len(rooms)
        found: list[RoomHead | None] = await self._ask(
            Pending(_future(), late(), late, failure, late, nothing)
        )
        return found

    async def room_heads(
        self, rooms: Sequence[tuple[int, str, str]]
    ) -> tuple[str, tuple[RoomHead, ...]]:
        def late() -> tuple[str, tuple[RoomHead, ...]]:
            truth = self.truth
            return truth.epoch, tuple(RoomHead(truth.head(room), truth.seq) for _, _, room in rooms)

        failure = PostgresUnavailable("away")
        found: tuple[str, tuple[RoomHead, ...]] = await self._ask(
            Pending(_future(), late(), late, failure)
        )
        return found

    def _bus(self, epoch: str, lag: int) -> int:
        """Where a bus stands that lags behind by some seqs."""
        current = epoch == self.truth.epoch
        last = self.truth.appended if current else len(self.truth.logs[epoch])
        return max(0, last - lag)

    async def _ask(self, pending: Pending) -> Any:
        self.reads.append(pending)
        try:
            return await pending.future
        finally:
            self.reads.remove(pending)


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


class Socket:
    """A socket with a buffer that only the test empties."""

    def __init__(self, ceiling_bytes: int) -> None:
        self.full = False
        self.listener: Connection | None = None
        self.closed: int | None = None
        self.buffer = bytearray()
        self.ceiling_bytes = ceiling_bytes
        self.most_bytes = 0

    def merge(self, merging: bool) -> None:
        """What is sent is in one piece anyway."""

    def hold(self) -> None:
        """The test hands over what it wants to."""

    def release(self) -> None:
        """See ``hold``."""

    def send(self, frame: bytes) -> int:
        """Takes a part, all or nothing at once, as a kernel does."""
        if self.closed is not None:
            return len(frame)
        match len(self.buffer) % 3:
            case 0 if not self.full:
                self.write(frame)
                return len(frame)
            case 1 if not self.full:
                self.write(frame[:1])
                return 1
        raise BlockingIOError

    def spill(self, frame: bytes, sent: int) -> None:
        self.write(frame[sent:])

    def write(self, frame: bytes) -> None:
        if self.closed is not None:
            return
        self.buffer += frame
        self.most_bytes = max(self.most_bytes, len(self.buffer))
        if len(self.buffer) > self.ceiling_bytes and not self.full:
            self.full = True
            if self.listener is not None:
                self.listener.filled()

    def close(self, code: int, reason: str) -> None:
        self.closed = code

    def buffered_bytes(self) -> int:
        return len(self.buffer)

    async def room_to_write(self) -> None:
        return

    def read(self, size: int) -> bytes:
        """The peer reads up to ``size`` bytes."""
        taken = bytes(self.buffer[:size])
        del self.buffer[:size]
        if self.full and len(self.buffer) <= self.ceiling_bytes // 4:
            self.full = False
            if self.listener is not None and self.closed is None:
                self.listener.drained()
        return taken


@dataclass
class Place:
    """A client in one room: what it holds, and what it was told."""

    room: str
    subscribed: bool = False
    wanted: bool = False
    epoch: str = ""
    offset: int = 0


@dataclass
class Asked:
    """A subscribe command under way."""

    room: str
    since: Since | None
    epoch: str
    """The epoch at the time of asking."""
    head: int


class Broken(AssertionError):
    """A promise is broken."""


@dataclass
class Client:
    """Checks each frame that reaches it against the truth."""

    truth: Truth
    places: dict[str, Place] = field(default_factory=dict)
    asked: dict[int, Asked] = field(default_factory=dict)
    leaving: dict[int, str] = field(default_factory=dict)
    """Unsubscribe commands under way: until the answer, messages may come."""
    received: bytearray = field(default_factory=bytearray)
    ids: int = 1
    closed: CloseCode | None = None

    def place(self, room: str) -> Place:
        return self.places.setdefault(room, Place(room))

    def connect(self) -> str:
        self.received.clear()
        self.asked.clear()
        self.leaving.clear()
        for place in self.places.values():
            place.subscribed = place.wanted = False
        self.ids += 1
        return json.dumps({"id": self.ids, "connect": {}})

    def subscribe(self, room: str, since: Since | None) -> str:
        self.ids += 1
        self.asked[self.ids] = Asked(room, since, self.truth.epoch, self.truth.head(room))
        self.place(room).wanted = True
        fields: dict[str, Any] = {"channel": room}
        if since is not None:
            fields |= {"recover": True, "offset": since.offset, "epoch": since.epoch}
        return json.dumps({"id": self.ids, "subscribe": fields})

    def unsubscribe(self, room: str) -> str:
        self.ids += 1
        self.leaving[self.ids] = room
        return json.dumps({"id": self.ids, "unsubscribe": {"channel": room}})

    def take(self, data: bytes) -> None:
        self.received += data
        for text in texts(self.received):
            for line in text.split("\n"):
                self._told(json.loads(line))

    def _told(self, said: dict[str, Any]) -> None:
        if push := said.get("push"):
            place = self.place(push["channel"])
            if not place.subscribed:
                raise Broken(f"a push to a room that the client is not in: {push}")
            if "pub" in push:
                self._message(place, push["pub"])
            else:
                self._evicted(place, push["unsubscribe"])
        elif said.get("id") in self.asked:
            asked = self.asked.pop(said["id"])
            if "error" in said:
                assert said["error"]["code"] in (100, 108), said
            else:
                self._subscribed(asked, said["subscribe"])
        elif said.get("id") in self.leaving:
            place = self.place(self.leaving.pop(said["id"]))
            place.subscribed = place.wanted = False

    def _message(self, place: Place, pub: dict[str, Any]) -> None:
        if pub["offset"] != place.offset + 1:
            raise Broken(f"{place} was given offset {pub['offset']}")
        place.offset += 1
        if pub["data"] not in self._contents(place):
            raise Broken(f"{place} was given {pub['data']}")

    def _contents(self, place: Place) -> list[Any]:
        """What the message may be; of a redacted one, what it was and what it is."""
        log = self.truth.logs[place.epoch]
        message = [m for m in log if m.room == place.room][place.offset - 1]
        redaction = self.truth.redactions.get((place.epoch, message.seq))
        before = () if redaction is None else (redaction.content,)
        return [json.loads(m.payload) for m in (message, *before)]

    def _subscribed(self, asked: Asked, reply: dict[str, Any]) -> None:
        place = self.place(asked.room)
        place.subscribed = True
        place.epoch, place.offset = reply["epoch"], reply["offset"]
        since = asked.since
        if reply.get("was_recovering", False) != (since is not None):
            raise Broken(f"{asked} was answered by {reply}")
        if since is not None and reply["recovered"]:
            if since.offset != reply["offset"] or since.epoch not in (reply["epoch"], ""):
                raise Broken(f"falsely recovered: {asked}, {reply}")
        else:
            if reply["offset"] > self.truth.head(asked.room, epoch=reply["epoch"]):
                raise Broken(f"{asked} was put beyond the room's head: {reply}")
            if since is not None and not self._may_be_lost(asked, since):
                raise Broken(f"{asked} was not recovered without need: {reply}")
        for pub in reply.get("publications", ()):
            self._message(place, pub)

    def _may_be_lost(self, asked: Asked, since: Since) -> bool:
        return (
            asked.epoch != self.truth.epoch
            or since.epoch not in (asked.epoch, "")
            or (since.epoch == "" and since.offset > 0)
            or since.offset > asked.head
            or since.offset + 1 < self.truth.first(asked.room)
        )

    def _evicted(self, place: Place, told: dict[str, Any]) -> None:
        assert told["code"] == 2500
        place.subscribed = False
        if place.epoch == self.truth.epoch and place.offset + 1 >= self.truth.first(place.room):
            raise Broken(f"{place} was evicted without need")


def texts(received: bytearray) -> list[str]:
    """Takes the finished text frames from the front (RFC 6455, section 5.2)."""
    found = []
    while len(received) >= 2:
        assert received[0] == 0x81, "an unfragmented text frame"
        size, start = received[1], 2
        if size >= 126:
            start = 4 if size == 126 else 10
            size = int.from_bytes(received[2:start], "big")
        if len(received) < start + size:
            break
        found.append(received[start : start + size].decode())
        del received[: start + size]
    return found
