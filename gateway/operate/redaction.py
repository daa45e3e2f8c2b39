"""Redacting a message everywhere, and seeing that it is gone; for ``tidegate redact``."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from gateway.registry import read_workers
from outbox import database, redaction
from outbox.errors import OutboxError
from outbox.redis.client import Client
from outbox.redis.connect import connect
from outbox.streams import Streams

PATIENCE_S = 30.0
"""Twice as long as a worker that was killed counts as alive."""
POLL_S = 0.1
CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Order:
    """What to redact, and where."""

    postgres_dsn: str
    redis_url: str
    tenant: str
    room: str
    offset: int
    reason: str | None = None
    patience_s: float = PATIENCE_S


async def redact(order: Order, say: Callable[[str], None]) -> list[str]:
    """Redacts the message and follows the notice; gives what is outstanding, empty if nothing.

    Raises as ``outbox.redaction.redact``: then nothing was changed.
    """
    connection = await database.connect(order.postgres_dsn, application_name="tidegate-redact")
    client = connect(order.redis_url, timeout_s=CALL_TIMEOUT_S, max_connections=2)
    try:
        done = await _tombstone(connection, order)
        say(
            f"log: offset {order.offset} of {order.tenant} {order.room} "
            f"{'is' if done.first else 'was already'} a tombstone "
            f"(shard {done.shard}, seq {done.seq}); until `VACUUM {done.part}` its old text is in "
            "the table's files"
        )
        bus = Streams(client)

        async def erase() -> None:
            await bus.erase(done.epoch, done.shard, order.tenant, order.room, done.seq)

        try:
            # At once, and again when the notice is on the bus: a relay that has the content in its
            # hands appends it before the notice or never.
            await erase()
            head = await _appended(order.patience_s, connection, bus, done)
            if head is None:
                return [
                    "the notice is not on the bus: a relay must run; what gateways have in memory "
                    "stays there until it is"
                ]
            await erase()
            say("Redis: the content is gone")
            late = await _follow(order.patience_s, client, done, head)
        except (RedisError, OSError) as error:
            return [f"Redis cannot be asked ({type(error).__name__}): it may hold the content"]
        if late:
            return [f"gateways that have not read the notice yet: {', '.join(sorted(late))}"]
        say("gateways: the content is gone from their memory")
        return []
    finally:
        await client.aclose()
        await connection.close()


async def _tombstone(connection: database.Connection, order: Order) -> redaction.Redaction:
    room = f"room {order.room} of tenant {order.tenant}"
    try:
        return await redaction.redact(
            connection, order.tenant, order.room, order.offset, order.reason
        )
    except OutboxError as error:
        # What the schema says of a room that has no messages, neither in the log nor waiting.
        if str(error) == f"{room} stands at offset 0 and never had {order.offset}":
            raise OutboxError(f"{room} never had a message") from None
        raise


async def _appended(
    patience_s: float, connection: database.Connection, bus: Streams, done: redaction.Redaction
) -> int | None:
    """A seq that is not before that of the notice, once the bus has come as far; else None."""
    deadline = time.monotonic() + patience_s
    while True:
        head = await redaction.notice_head(connection, done)
        if head is not None:
            last = (await bus.last_ids(done.epoch, [done.shard]))[done.shard]
            if last >= head:
                return head
        if time.monotonic() > deadline:
            return None
        await asyncio.sleep(POLL_S)


async def _follow(
    patience_s: float, client: Client, done: redaction.Redaction, head: int
) -> list[str]:
    """Workers that have not read the shard up to ``head`` when the patience is over."""
    deadline = time.monotonic() + patience_s
    while True:
        late = [
            f"{worker.get('id')} ({worker.get('host')}:{worker.get('port')})"
            for worker in await read_workers(client, done.epoch)
            if _position(worker, done.shard, head) < head
        ]
        if not late or time.monotonic() > deadline:
            return late
        await asyncio.sleep(POLL_S)


def _position(worker: Mapping[str, Any], shard: int, unread: int) -> int:
    """Up to where a worker has read the shard; one that does not read it remembers nothing."""
    return int(worker.get("positions", {}).get(str(shard), unread))
