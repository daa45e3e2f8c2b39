"""A message that Redis refuses, whatever the reason, while it serves everything else.

The bus of a shard is dense, that is how readers know that they miss nothing. So what follows such a
message in its shard waits, in whatever room, and the other shards go on. What is right is to find
out which message it is: an operator can let Redis take it, or redact it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from outbox import keys
from outbox.log import Log
from outbox.reconcile import refill_start
from outbox.redis.client import Client
from outbox.streams import Status, Streams

PAGE_MESSAGES = 500
TELL_TIMEOUT_S = 0.25
TOLD_S = 20
"""How long a note for operators stays; a relay renews it with each attempt."""

OF_SERVERS = (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisTimeoutError,
    TryAgainError,
)
"""Errors that say nothing about a message."""


def may_be(error: BaseException) -> bool:
    """Whether an error of an append may be due to a message. One that is sees its connection
    closed, often without a word."""
    return isinstance(error, RedisError) and not isinstance(error, OF_SERVERS)


async def answers(streams: Streams, epoch: str, shards: Sequence[int]) -> dict[int, int]:
    """The last seqs of the buses. Raises redis.RedisError if Redis does not answer this either.

    After some refusals Redis closes the connection, and the pool does not know it.
    """
    await streams.client.renew()
    return await streams.last_ids(epoch, shards)


@dataclass(frozen=True, slots=True)
class Refused:
    """A message that Redis refuses. As a string: what an operator must know, in one line."""

    seq: int
    tenant: str
    room: str
    offset: int
    size_bytes: int
    reason: str

    def __str__(self) -> str:
        return (
            f"Redis refuses offset {self.offset} of room {self.room} of tenant {self.tenant} "
            f"({self.size_bytes} bytes: {self.reason}); what follows in this shard waits: raise "
            "the limit of Redis, for a large message proto-max-bulk-len, or "
            f"`tidegate redact {self.tenant} {self.room} {self.offset}`"
        )


async def refused(streams: Streams, log: Log, epoch: str, shard: int) -> Refused | None:
    """Appends what the shard's bus lacks message by message, up to one that Redis refuses.

    None if there was none. Raises redis.RedisError if
    Redis does not answer otherwise either, or has trouble of its own, and OutboxError as ``Log``.
    """
    log_epoch, heads = await log.heads()
    if log_epoch != epoch:
        return None
    last = (await answers(streams, epoch, [shard]))[shard]
    head = heads[shard]
    after = refill_start(last, head, streams.limits.bus_length)
    for message in await log.span(shard, after, head, PAGE_MESSAGES):
        start = message.seq != last + 1 or last == 0
        redacted = await log.redacted([message])
        try:
            appended = await streams.append(epoch, shard, [message], start=start, redacted=redacted)
        except RedisError as error:
            if not may_be(error):
                raise
            await answers(streams, epoch, [shard])
            return Refused(
                message.seq,
                message.tenant,
                message.room,
                message.offset,
                len(message.payload),
                _line(error),
            )
        if appended.status is not Status.APPENDED:
            return None
        last = appended.last
    return None


async def tell(
    client: Client, epoch: str, failing: Mapping[int, str], over: int | None = None
) -> None:
    """Notes for operators why shards stand still, and that one goes on. May fail: no more."""
    key = keys.failing(epoch)
    commands: list[Any] = [("HSET", key, shard, cause) for shard, cause in failing.items()]
    if over is not None:
        commands.append(("HDEL", key, over))
    with suppress(RedisError, OSError):
        async with asyncio.timeout(TELL_TIMEOUT_S):
            await client.pipelined([*commands, ("EXPIRE", key, TOLD_S)])


async def read_told(client: Client, epoch: str) -> dict[int, str]:
    """Shard → why it stands still, as relays noted it last."""
    found = cast(dict[bytes, bytes], await cast(Any, client).hgetall(keys.failing(epoch)))
    return {int(shard): cause.decode() for shard, cause in found.items()}


def _line(error: Exception) -> str:
    return (str(error).partition("\n")[0] or type(error).__name__).rstrip(".")
