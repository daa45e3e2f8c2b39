"""The consumer: reads the buses of the shards in which this worker has subscribers.

One blocking connection reads all shards. Each *connection* has a consumer group of its own,
``<worker>:<n>``, created at the worker's position, which is always possible since entry ids are our
own seqs. So an old connection that hangs half-open can take nothing from its successor, and nothing
has to be acknowledged: sockets die with their worker, there is nobody to redeliver to.

A position is captured once and only advances. Entries at or below it are dropped, a hole is filled
from the log. The epoch is looked at with every read.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

import structlog
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

from gateway.hub import Hub
from outbox import keys
from outbox.entry import BATCH_FIELD, MESSAGE_FIELD, decode
from outbox.errors import OutboxError
from outbox.log import Log
from outbox.message import Message
from outbox.streams import Streams

READ_COUNT = 500
"""Entries per shard and read."""
BLOCK_S = 2.0
"""How long a read waits in Redis; also the longest time in which an epoch change goes unseen."""
ANSWER_S = 3.0
"""How much longer than BLOCK_S an answer may take before the link counts as dead."""
BACKOFF_S = (0.05, 1.0)
SPAN_LIMIT = 1_000
ASK_INTERVAL_S = 0.5
"""Postgres is asked for the epoch no more often, however many reads find it missing in Redis."""

log = structlog.get_logger(__name__)


class Consumer:
    """Feeds one hub. ``worker`` names this process among all; ``epoch_changed`` is called after
    the hub was emptied because of a new epoch."""

    def __init__(
        self,
        hub: Hub,
        streams: Streams,
        message_log: Log,
        worker: str,
        epoch_changed: Callable[[], None],
    ) -> None:
        self.epoch = ""
        self.connected = False
        """Whether the last exchange with Redis went well."""
        self._hub = hub
        self._streams = streams
        self._log = message_log
        self._worker = worker
        self._epoch_changed = epoch_changed
        self._connections = 0
        self._groups: dict[str, set[str]] = {}
        """Bus → groups of this worker that may be there."""
        self._wanted = asyncio.Event()
        self._suspected = False
        self._client_id = 0
        self._reading: frozenset[int] = frozenset()
        self._attaching: dict[int, asyncio.Task[None]] = {}
        self._interrupting: asyncio.Task[None] | None = None
        self._asked_at = -ASK_INTERVAL_S

    async def start(self) -> None:
        """Learn the epoch. Raises OutboxError if Postgres does not answer."""
        self.epoch, _ = await self._log.heads()

    def suspect(self) -> None:
        """Somebody saw a sign of another epoch: ask Postgres at the next opportunity."""
        self._suspected = True
        self._wanted.set()

    async def attach(self, shard: int) -> None:
        """Have the shard read; returns when its position is known.

        Raises:
            OutboxError, redis.RedisError, OSError: neither Redis nor Postgres could tell it.
        """
        if shard in self._hub.positions:
            return
        task = self._attaching.get(shard)
        if task is None:
            task = asyncio.ensure_future(self._attach(shard))
            self._attaching[shard] = task
            task.add_done_callback(lambda done: self._attached(shard, done))
        await asyncio.shield(task)

    def _attached(self, shard: int, task: "asyncio.Task[None]") -> None:
        del self._attaching[shard]
        if not task.cancelled():
            task.exception()  # those who wait have it, if they are still there

    async def _attach(self, shard: int) -> None:
        epoch = self.epoch
        position = 0
        try:
            async with asyncio.timeout(ANSWER_S):
                position = (await self._streams.last_ids(epoch, [shard]))[shard]
                if position and await self._streams.epoch() != epoch:
                    position = 0
        except (RedisError, OSError):
            pass
        if not position:
            current, heads = await self._log.heads()
            if current != epoch:
                self.suspect()
                raise OutboxError("the epoch has changed, try again")
            position = heads[shard]
        if epoch != self.epoch:
            raise OutboxError("the epoch has changed, try again")
        self._hub.positions.setdefault(shard, position)
        self._wanted.set()
        self._interrupting = asyncio.ensure_future(self._interrupt(shard))

    async def _interrupt(self, shard: int) -> None:
        """Have the blocked read return so that the next one includes the shard."""
        client = cast(Any, self._streams.client)
        attempts = 0
        while self._client_id and shard not in self._reading and attempts < 20:
            attempts += 1
            try:
                await client.execute_command("CLIENT", "UNBLOCK", self._client_id)
            except (RedisError, OSError):
                return
            # The read may not have reached Redis yet, then there was nothing to unblock.
            await asyncio.sleep(0.002 * attempts)

    async def run(self) -> None:
        """Read until cancelled; every failure is answered by a new connection."""
        failures = 0
        while True:
            try:
                await self._connection()
            except (RedisError, OSError, OutboxError, TimeoutError) as error:
                if self.connected or failures == 0:
                    log.warning("bus read failed", error=f"{type(error).__name__}: {error}")
                progressed, self.connected = self.connected, False
                failures = 1 if progressed else failures + 1
                low, high = BACKOFF_S
                await asyncio.sleep(random.uniform(0, min(high, low * 2**failures)))

    async def _connection(self) -> None:
        """One connection's life: groups of its own from the worker's positions."""
        self._connections += 1
        group = f"{self._worker}:{self._connections}"
        pool = cast(Any, self._streams.client.connection_pool)
        connection: AbstractConnection = pool.make_connection()
        try:
            async with asyncio.timeout(ANSWER_S):
                await cast(Any, connection).connect()
                self._client_id = int(await _call(connection, "CLIENT", "ID"))
            await self._read(connection, group)
        finally:
            self._client_id = 0
            self._reading = frozenset()
            await connection.disconnect(nowait=True)

    async def _read(self, connection: AbstractConnection, group: str) -> None:
        joined: set[int] = set()
        pending: dict[bytes, int] | None = None
        while True:
            if pending is None:
                await self._check_epoch(connection)
                await self._join(connection, group, joined)
                if not joined:
                    await self._idle()
                    continue
                pending = await self._ask(connection, group, joined)
            streams = pending
            async with asyncio.timeout(BLOCK_S + ANSWER_S):
                epoch = await connection.read_response()
                answer = await connection.read_response()
            self.connected = True
            settled = (
                not self._suspected
                and epoch == self.epoch.encode()
                and set(self._hub.positions) == joined
            )
            # The next read is under way while this one is delivered, unless something has to be
            # looked at first.
            pending = await self._ask(connection, group, joined) if settled else None
            for key, entries in answer or ():
                await self._deliver(streams[key], entries)

    async def _ask(
        self, connection: AbstractConnection, group: str, shards: set[int]
    ) -> dict[bytes, int]:
        names = {keys.bus(self.epoch, shard): shard for shard in sorted(shards)}
        read: tuple[Any, ...] = (
            *("XREADGROUP", "GROUP", group, "c", "COUNT", READ_COUNT),
            *("BLOCK", int(BLOCK_S * 1000), "NOACK", "STREAMS", *names, *[">"] * len(names)),
        )
        await connection.send_packed_command(connection.pack_commands([("GET", keys.EPOCH), read]))
        self._reading = frozenset(shards)
        return {name.encode(): shard for name, shard in names.items()}

    async def _join(self, connection: AbstractConnection, group: str, joined: set[int]) -> None:
        """Make this connection's group on every shard that is wanted; remove it from the others,
        and those of earlier connections from all."""
        joined.intersection_update(self._hub.positions)
        wanted = {keys.bus(self.epoch, shard) for shard in joined}
        for bus, groups in list(self._groups.items()):
            for name in groups - ({group} if bus in wanted else set()):
                await _call(connection, "XGROUP", "DESTROY", bus, name)
                groups.discard(name)
            if not groups:
                del self._groups[bus]
        for shard, position in list(self._hub.positions.items()):
            if shard not in joined:
                bus = keys.bus(self.epoch, shard)
                self._groups.setdefault(bus, set()).add(group)
                await _call(connection, "XGROUP", "CREATE", bus, group, f"{position}-0", "MKSTREAM")
                joined.add(shard)

    async def _idle(self) -> None:
        """No shard is wanted: wait until one is."""
        self.connected = True
        self._wanted.clear()
        if self._hub.positions:
            return
        try:
            async with asyncio.timeout(ASK_INTERVAL_S if self._suspected else BLOCK_S):
                await self._wanted.wait()
        except TimeoutError:
            return

    async def _check_epoch(self, connection: AbstractConnection) -> None:
        """Follow the epoch in Redis; where it is missing or suspect, the one in Postgres."""
        value = await _call(connection, "GET", keys.EPOCH)
        if value == self.epoch.encode() and not self._suspected:
            return
        now = asyncio.get_running_loop().time()
        if now - self._asked_at < ASK_INTERVAL_S:
            return
        self._asked_at = now
        try:
            current, _ = await self._log.heads()
        except OutboxError as error:
            # The buses' keys hold the epoch: reading on cannot mix two histories.
            log.warning("the epoch cannot be checked", error=str(error))
            return
        self._suspected = False
        if current != self.epoch:
            log.warning("the epoch changed: clients are told to subscribe again", epoch=current)
            self.epoch = current
            self._epoch_changed()

    async def _deliver(self, shard: int, entries: list[Any]) -> None:
        position = self._hub.positions.get(shard)
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

    async def leave(self) -> None:
        """Remove this worker's groups; called once at the end."""
        for bus, groups in self._groups.items():
            try:
                for group in groups:
                    await self._streams.client.xgroup_destroy(bus, group)
            except ResponseError:
                continue  # the bus is gone, and its groups with it
            except (RedisError, OSError) as error:
                log.info("group not removed, it will be reaped", error=type(error).__name__)
                return


async def _call(connection: AbstractConnection, *command: Any) -> Any:
    async with asyncio.timeout(ANSWER_S):
        await connection.send_command(*command)
        try:
            return await connection.read_response()
        except ResponseError as error:
            if "no such key" in str(error).lower() or "requires the key to exist" in str(error):
                return None
            raise


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
