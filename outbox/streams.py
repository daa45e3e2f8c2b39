"""The streams in Redis: append for the relay, replay for the gateways.

Redis holds nothing that cannot be made again from the log. Two scripts carry the argument:
``append.lua`` accepts a message only if its seq is exactly the next one, so it may be called twice,
late, or by two relays at once; ``replay.lua`` gives a page of a room together with the seq for
which it is true, in one atomic answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha1
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from redis.exceptions import NoScriptError, RedisError

from outbox import keys
from outbox.entry import decode, encode
from outbox.head import RoomHead
from outbox.message import Message
from outbox.names import namespace
from outbox.redis.client import Client
from outbox.tombstone import Redacted

CALL_MAX_BYTES = 4_194_304
"""Blobs in one call of the append script: Redis serves nobody else meanwhile."""
CALL_MAX_MESSAGES = 1_000
REPLAY_MAX_BYTES = 1_048_576
CALL_MAX_ROOMS = 200
"""Rooms in one call of the script that tells where they stand."""


class Status(IntEnum):
    """What the append script answers."""

    APPENDED = 0
    """All messages are on the bus, by this call or an earlier one."""
    EMPTY = 1
    """The bus is missing or was never started: only reconcile may start it."""
    GAP = 2
    """The first new seq is not the one after the last: what is between must come first."""
    FORK = 3
    """A position holds another message than Postgres has there: Postgres lost commits."""


@dataclass(frozen=True, slots=True)
class Appended:
    """The answer to an append: ``last`` is the bus' last seq afterwards, 0 if there is none."""

    status: Status
    last: int


@dataclass(frozen=True, slots=True)
class Replay:
    """A page of a room's replay stream.

    It is true for ``seq``: ``top`` is the room's last offset as of that seq, and ``messages`` are
    dense from the offset asked for. The page ends where a limit or ``top`` was reached, or where
    Redis lost something: only one that reaches ``top`` is all there is.
    """

    epoch: str
    seq: int
    top: int
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How much the streams keep. Redis trims in blocks, so a stream may be somewhat longer."""

    bus_length: int = 10_000
    """Entries that the bus of a shard keeps for its readers."""
    room_length: int = 300
    room_idle_s: int = 600
    namespace_lengths: Mapping[str, int] = field(default_factory=dict)
    """Room length by namespace, where it is another one; 0: no replay stream, the log serves."""

    def room_length_of(self, room: str) -> int:
        """Messages that the replay stream of ``room`` keeps."""
        return self.namespace_lengths.get(namespace(room) or "", self.room_length)


class Script:
    """A Lua script that is sent by its hash and, where Redis does not know it, in full.

    Redis forgets scripts at a restart, at SCRIPT FLUSH and on a promoted replica.
    """

    def __init__(self, name: str) -> None:
        self.text = Path(__file__).with_name(name).read_bytes()
        self.sha = sha1(self.text, usedforsecurity=False).hexdigest()

    async def __call__(
        self, client: Client, script_keys: Sequence[str], arguments: Sequence[bytes | str | int]
    ) -> Any:
        """Runs the script once; its answer with strings as bytes."""
        run = cast(Any, client)
        try:
            return await run.evalsha(self.sha, len(script_keys), *script_keys, *arguments)
        except NoScriptError:
            return await run.eval(self.text, len(script_keys), *script_keys, *arguments)


class Streams:
    """The streams of one Redis. Errors of Redis come through as ``redis.RedisError``."""

    def __init__(self, client: Client, limits: StreamLimits | None = None) -> None:
        self.client = client
        self.limits = limits or StreamLimits()
        self._append = Script("append.lua")
        self._replay = Script("replay.lua")
        self._last = Script("last.lua")
        self._heads = Script("heads.lua")

    async def append(
        self,
        epoch: str,
        shard: int,
        messages: Sequence[Message],
        *,
        start: bool = False,
        redacted: Redacted = MappingProxyType({}),
    ) -> Appended:
        """Appends messages of one shard, in seq order, to its bus and to their rooms' streams.

        Messages that are there already are skipped. ``start`` lets the first message begin an empty
        bus, or begin one anew that ends before it: only reconcile may ask for this, with messages
        read from the log. Large batches go in several calls; an error may leave the first of them
        done, and repeating the whole batch is then right. ``redacted`` names, for notices of
        redactions among them, the entries that go from the streams with them.
        """
        appended = Appended(Status.APPENDED, 0)
        for call in _calls(messages):
            appended = await self._append_call(epoch, shard, call, start, redacted)
            if appended.status is not Status.APPENDED:
                break
            start = False
        return appended

    async def _append_call(
        self,
        epoch: str,
        shard: int,
        call: Sequence[tuple[Message, bytes]],
        start: bool,
        redacted: Redacted,
    ) -> Appended:
        rooms: dict[tuple[str, str], int] = {}
        entries: list[bytes | str | int] = []
        for message, blob in call:
            room = rooms.setdefault((message.tenant, message.room), len(rooms) + 1)
            entries += (message.seq, message.offset, room, message.batch, blob)
            entries.append(redacted.get((shard, message.seq), 0))
        status, last = await self._append(
            self.client,
            [
                keys.bus(epoch, shard),
                *(keys.room(epoch, shard, tenant, room) for tenant, room in rooms),
                *(keys.top(epoch, shard, tenant, room) for tenant, room in rooms),
            ],
            [
                self.limits.bus_length,
                self.limits.room_idle_s,
                int(start),
                *(self.limits.room_length_of(room) for _, room in rooms),
                *entries,
            ],
        )
        return Appended(Status(status), last)

    async def replay(
        self,
        epoch: str,
        shard: int,
        tenant: str,
        room: str,
        after: int,
        limit: int,
        limit_bytes: int = REPLAY_MAX_BYTES,
    ) -> Replay | None:
        """The messages of a room after an offset, at most ``limit`` and about ``limit_bytes``.

        A ``limit`` of 0 asks for the position only; an ``after`` at or above ``top`` gives no
        messages. None: the streams cannot tell, the log must be asked.
        """
        return await self._replay_call(epoch, shard, tenant, room, after, limit, limit_bytes)

    async def latest(
        self,
        epoch: str,
        shard: int,
        tenant: str,
        room: str,
        limit: int,
        limit_bytes: int = REPLAY_MAX_BYTES,
    ) -> Replay | None:
        """The newest ``limit`` messages of a room, ascending; None as for ``replay``.

        Where ``limit_bytes`` ends the page early, its last offset is below ``top``: go on with
        ``replay``.
        """
        return await self._replay_call(epoch, shard, tenant, room, -1, limit, limit_bytes)

    async def _replay_call(
        self, epoch: str, shard: int, tenant: str, room: str, after: int, limit: int, max_bytes: int
    ) -> Replay | None:
        answer = await self._replay(
            self.client,
            [
                keys.bus(epoch, shard),
                keys.room(epoch, shard, tenant, room),
                keys.top(epoch, shard, tenant, room),
            ],
            [after, limit, max_bytes],
        )
        if answer is None:
            return None
        seq, top, *entries = answer
        return Replay(
            epoch,
            int(seq),
            int(top),
            tuple(
                decode(shard, batch.decode(), blob)
                for batch, blob in zip(entries[::2], entries[1::2], strict=True)
            ),
        )

    async def last_ids(self, epoch: str, shards: Sequence[int]) -> dict[int, int]:
        """The last seq that each shard's bus ever had; 0 if it is missing. One round trip.

        In a cluster, shards whose node cannot be reached are left out, unless that is all of them.
        """
        answers = await self._piped(
            self._last, [([keys.bus(epoch, shard)], [shard]) for shard in shards]
        )
        return {shard: int(answer) for (shard,), answer in answers}

    async def heads(
        self, epoch: str, rooms: Sequence[tuple[int, str, str]]
    ) -> list[RoomHead | None]:
        """Where each of the rooms stands, given as shard, tenant and name. One round trip.

        None: the streams cannot tell, the log must be asked. So it is, in a cluster, for all rooms
        whose node cannot be reached, unless that is all of them.
        """
        heads: list[RoomHead | None] = [None] * len(rooms)
        for indexes, (seq, *offsets) in await self._piped(self._heads, _head_calls(epoch, rooms)):
            for index, offset in zip(indexes, offsets, strict=True):
                if offset is not None:
                    heads[index] = RoomHead(int(offset), int(seq))
        return heads

    async def _piped(
        self, script: Script, calls: Sequence[tuple[list[str], list[int]]]
    ) -> list[tuple[list[int], Any]]:
        """Runs a script that only reads once for each list of keys: what belongs to it, and the
        answer. In a cluster, calls to nodes that cannot be reached are left out, unless that is
        all of them."""
        answers = await self.client.pipelined(
            [("EVALSHA", script.sha, len(names), *names) for names, _ in calls]
        )
        for index, answer in enumerate(answers):
            if isinstance(answer, NoScriptError):
                try:
                    answers[index] = await script(self.client, calls[index][0], [])
                except (RedisError, OSError) as error:
                    answers[index] = error
        failures = [answer for answer in answers if isinstance(answer, Exception)]
        if failures and (self.client.spans_shards or len(failures) == len(answers)):
            raise failures[0]
        return [
            (subject, answer)
            for (_, subject), answer in zip(calls, answers, strict=True)
            if not isinstance(answer, Exception)
        ]

    async def erase(self, epoch: str, shard: int, tenant: str, room: str, seq: int) -> None:
        """Removes one entry from the bus, and the room's replay stream.

        Readers get the entry from the log. It can be added again only to a bus that is begun anew,
        and that from the log, too.
        """
        answers = await self.client.pipelined(
            [
                ("XDEL", keys.bus(epoch, shard), f"{seq}-0"),
                (
                    "DEL",
                    keys.room(epoch, shard, tenant, room),
                    keys.top(epoch, shard, tenant, room),
                ),
            ]
        )
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer

    async def epoch(self) -> str | None:
        """The epoch that relays wrote; None if it is missing."""
        value = cast(bytes | None, await self.client.get(keys.EPOCH))
        return None if value is None else value.decode()

    async def set_epoch(self, epoch: str) -> None:
        """Tells gateways the epoch, which the caller has just read from Postgres."""
        await self.client.set(keys.EPOCH, epoch)

    async def expire(self, epoch: str, shards: Sequence[int], after_s: int) -> None:
        """Lets the buses of a lost history go; its room streams expire by themselves."""
        answers = await self.client.pipelined(
            [("EXPIRE", keys.bus(epoch, shard), after_s) for shard in shards]
        )
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer


def _calls(messages: Sequence[Message]) -> list[list[tuple[Message, bytes]]]:
    """Messages with their blobs, in portions of bounded size."""
    calls: list[list[tuple[Message, bytes]]] = []
    left_bytes = 0
    for message in messages:
        blob = encode(message)
        left_bytes -= len(blob)
        if left_bytes < 0 or len(calls[-1]) >= CALL_MAX_MESSAGES:
            calls.append([])
            left_bytes = CALL_MAX_BYTES - len(blob)
        calls[-1].append((message, blob))
    return calls


def _head_calls(
    epoch: str, rooms: Sequence[tuple[int, str, str]]
) -> list[tuple[list[str], list[int]]]:
    """Keys for the script, and the indexes of the rooms: those of a shard together."""
    by_shard: dict[int, list[int]] = {}
    for index, (shard, _, _) in enumerate(rooms):
        by_shard.setdefault(shard, []).append(index)
    calls: list[tuple[list[str], list[int]]] = []
    for shard, indexes in by_shard.items():
        for first in range(0, len(indexes), CALL_MAX_ROOMS):
            portion = indexes[first : first + CALL_MAX_ROOMS]
            names = [rooms[index][1:] for index in portion]
            calls.append(
                (
                    [
                        keys.bus(epoch, shard),
                        *(keys.room(epoch, shard, *name) for name in names),
                        *(keys.top(epoch, shard, *name) for name in names),
                    ],
                    portion,
                )
            )
    return calls
