"""The feed: from the entries of a bus, as they were read, to the hub, without a hole.

A position is captured once and only advances. Entries at or below it are dropped, a hole is filled
from the log. For one shard ``deliver`` must not run twice at the same time.
"""

import asyncio
from typing import Any

import structlog

from gateway.hub import Hub
from outbox.entry import BATCH_FIELD, MESSAGE_FIELD, decode
from outbox.log import Log
from outbox.message import Message

SPAN_LIMIT = 1_000
"""Messages that one read of the log brings."""

log = structlog.get_logger(__name__)


class Feed:
    """Feeds one hub; ``message_log`` has what a bus lacks."""

    def __init__(self, hub: Hub, message_log: Log) -> None:
        self.positions = hub.positions
        """Shard → seq up to which it was delivered; shards that are wanted."""
        self._hub = hub
        self._log = message_log

    async def deliver(self, shard: int, entries: list[Any]) -> None:
        """Delivers entries as Redis gives them: pairs of id and fields, in order.

        Raises:
            OutboxError: there was a hole and the log did not answer. What lies before it was
                delivered.
        """
        position = self.positions.get(shard)
        if position is None:
            return
        messages: list[Message] = []
        expected = position + 1
        for entry_id, fields in entries:
            seq = int(entry_id[:-2])  # ids are "<seq>-0"
            if seq < expected:
                continue
            if seq > expected:
                await self._emit(shard, messages)
                messages = []
                await self._fill(shard, expected - 1, seq - 1)
            expected = seq + 1
            message = _message(shard, fields)
            if message is None:
                await self._emit(shard, messages)
                messages = []
                await self._fill(shard, seq - 1, seq)
            else:
                messages.append(message)
        await self._emit(shard, messages)

    async def _emit(self, shard: int, messages: list[Message]) -> None:
        if messages:
            for _ in self._hub.deliver(shard, messages):
                await asyncio.sleep(0)

    async def _fill(self, shard: int, after: int, until: int) -> None:
        """Deliver from the log what the bus no longer has."""
        log.info("hole in a bus, filled from the log", shard=shard, after=after, until=until)
        while after < until:
            messages = await self._log.span(shard, after, until, SPAN_LIMIT)
            if not messages or messages[0].seq != after + 1:
                self._hub.lose(shard, until)
                return
            await self._emit(shard, messages)
            after = messages[-1].seq


def _message(shard: int, fields: list[bytes]) -> Message | None:
    """None if the entry is not one of ours: the log has the message."""
    batch, blob = b"", b""
    for name, value in zip(fields[::2], fields[1::2], strict=True):
        if name == MESSAGE_FIELD:
            blob = value
        elif name == BATCH_FIELD:
            batch = value
    try:
        return decode(shard, batch.decode(), blob)
    except (ValueError, TypeError):
        log.warning("an entry of a bus cannot be read", shard=shard)
        return None
