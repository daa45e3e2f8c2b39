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
    redis_url_also: str = ""
    """The second Redis, while gateways move to it: some of them read there."""


async def redact(order: Order, say: Callable[[str], None]) -> list[str]:
    """Redacts the message and follows the notice; gives what is outstanding, empty if nothing.

    Raises as ``outbox.redaction.redact``: then nothing was changed.
    """
    connection = await database.connect(order.postgres_dsn, application_name="tidegate-redact")
    # Both at the same time, and none waits for the other: one may be away, or behind.
    sides = [_Side(order, connection, "Redis", order.redis_url, say)]
    if order.redis_url_also:
        sides.append(_Side(order, connection, "additional Redis", order.redis_url_also, say))
    try:
        done = await _tombstone(connection, order)
        say(
            f"log: offset {order.offset} of {order.tenant} {order.room} "
            f"{'is' if done.first else 'was already'} a tombstone "
            f"(shard {done.shard}, seq {done.seq}); until `VACUUM {done.part}` its old text is in "
            "the table's files"
        )
        async with asyncio.TaskGroup() as group:
            clearing = [group.create_task(side.clear(done)) for side in sides]
        return [line for task in clearing for line in task.result()]
    finally:
        for side in sides:
            await side.aclose()
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


class _Side:
    """One Redis with the gateways that read there. ``name`` is how it is spoken of."""

    def __init__(
        self,
        order: Order,
        connection: database.Connection,
        name: str,
        url: str,
        say: Callable[[str], None],
    ) -> None:
        self._order = order
        self._connection = connection
        self._name = name
        self._readers = "gateways" if name == "Redis" else f"gateways of the {name}"
        self._say = say
        self._client = connect(url, timeout_s=CALL_TIMEOUT_S, max_connections=2)
        self._bus = Streams(self._client)

    async def clear(self, done: redaction.Redaction) -> list[str]:
        """Removes the content and waits until nobody has it; gives what is outstanding."""
        try:
            # At once, and again when the notice is on the bus: a relay that has the content in its
            # hands appends it before the notice or never.
            await self._erase(done)
            head = await self._appended(done)
            if head is None:
                relay = "a relay"
                if self._name != "Redis":
                    relay += " with TIDEGATE_REDIS_URL_ALSO"
                return [
                    f"{self._name}: the notice is not on the bus: {relay} must run; what gateways "
                    "have in memory stays there until it is"
                ]
            await self._erase(done)
            self._say(f"{self._name}: the content is gone")
            late = await self._follow(done, head)
        except (RedisError, OSError) as error:
            return [
                f"{self._name} cannot be asked ({type(error).__name__}): it may hold the content"
            ]
        if late:
            return [f"{self._readers} that have not read the notice yet: {', '.join(sorted(late))}"]
        self._say(f"{self._readers}: the content is gone from their memory")
        return []

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _erase(self, done: redaction.Redaction) -> None:
        await self._bus.erase(
            done.epoch, done.shard, self._order.tenant, self._order.room, done.seq
        )

    async def _appended(self, done: redaction.Redaction) -> int | None:
        """A seq not before that of the notice, once the bus has come as far; else None."""
        deadline = time.monotonic() + self._order.patience_s
        while True:
            head = await redaction.notice_head(self._connection, done)
            if head is not None:
                last = (await self._bus.last_ids(done.epoch, [done.shard]))[done.shard]
                if last >= head:
                    return head
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(POLL_S)

    async def _follow(self, done: redaction.Redaction, head: int) -> list[str]:
        """Workers that have not read the shard up to ``head`` when the patience is over."""
        deadline = time.monotonic() + self._order.patience_s
        before = {worker.get("id"): worker for worker in await self._workers(done)}
        while True:
            late = [
                f"{worker.get('id')} ({worker.get('host')}:{worker.get('port')})"
                for worker in await self._workers(done)
                if not _has_read(worker, before.get(worker.get("id")), done.shard, head)
            ]
            if not late or time.monotonic() > deadline:
                return late
            await asyncio.sleep(POLL_S)

    async def _workers(self, done: redaction.Redaction) -> tuple[dict[str, Any], ...]:
        return await read_workers(self._client, done.epoch)


def _has_read(
    worker: Mapping[str, Any], before: Mapping[str, Any] | None, shard: int, head: int
) -> bool:
    """Whether a worker, by what it reported now and before, has read the shard up to ``head``.

    One that does not read the shard remembers nothing of it. But a report is some seconds old: only
    one that came since tells this.
    """
    position = worker.get("positions", {}).get(str(shard))
    if position is None:
        return worker != before
    return int(position) >= head
