"""The worker: one gateway process' services, wired together here and nowhere else."""

import asyncio
import hmac
import os
import secrets
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import structlog
from redis.exceptions import RedisError

from gateway import codes
from gateway.connection import Connection, Services, Socket
from gateway.consumer import Consumer
from gateway.deadlines import Deadlines
from gateway.history import History, PageLimits
from gateway.hub import Hub
from gateway.namespaces import Identity, Namespaces
from gateway.protocols.centrifuge_json import CentrifugeJSON
from gateway.registry import Registry
from gateway.session import Limits
from gateway.settings import Settings
from gateway.tokens import verify
from gateway.waiting import Waiting
from gateway.writer import Writer
from outbox import tasks
from outbox.database import Pool, open_pool
from outbox.layout import Layout, layout
from outbox.log import Log
from outbox.names import DEFAULT_TENANT
from outbox.redis.connect import check, connect
from outbox.streams import Streams

REQUESTS_MAX = 32
SWEEP_S = 5.0
SWEEP_ROOMS = 1_000
"""Rooms that are looked at before the event loop gets its turn."""
DRAIN_TICK_S = 0.05
LEAVE_TIMEOUT_S = 2.0
PUBLISH_TIMEOUT_S = 5.0
POOL_CLOSE_TIMEOUT_S = 1.0

log = structlog.get_logger(__name__)


class Worker:
    """Starts with ``start``, ends with ``drain`` and ``stop``."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.id = secrets.token_hex(8)
        self.started = False
        """Whether all that it needs was there."""
        self.waiting = Waiting()
        self.draining = False
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """Set when a background task has died: the process must end."""
        self.connections: set[Connection] = set()
        self.services: Services
        self.writer: Writer
        self.consumer: Consumer
        self._empty = asyncio.Event()
        self._protocol = CentrifugeJSON()
        self._tasks: list[asyncio.Task[Any]] = []
        self._pools: list[Pool] = []
        self._streams: Streams
        self._registry: Registry

    async def start(self) -> None:
        """Connect to the stores and begin to consume. Waits for as long as one is not there.

        Raises:
            outbox.errors.OutboxError: what no waiting mends; the text is for the operator.
        """
        settings = self.settings
        self._streams = Streams(connect(settings.redis_url.get_secret_value()))
        opening = asyncio.create_task(self.waiting.until("Postgres", self._open_pools))
        reaching = asyncio.create_task(self.waiting.until("Redis", self._reach_redis))
        self._tasks += (opening, reaching)
        # What no waiting mends is told at once, whatever else is missing.
        (log_pool, publish_pool, found), _ = await asyncio.gather(opening, reaching)

        hub = Hub(
            found.shards,
            found.spread,
            settings.room_ring_messages,
            settings.room_ring_bytes,
            settings.replay_memory_bytes,
        )
        message_log = Log(log_pool)
        self.consumer = Consumer(hub, self._streams, message_log, self.id, self._restart)
        await self.waiting.until("Postgres", self.consumer.start)
        history = History(
            hub,
            self._streams,
            message_log,
            PageLimits(
                settings.replay_page_messages,
                settings.replay_page_bytes,
                settings.log_timeout_s,
                # One is left for the heads of rooms, which are read for all who join at once.
                max(1, settings.log_pool_size - 1),
            ),
            lambda: self.consumer.epoch,
            self.consumer.suspect,
        )
        self.writer = Writer(publish_pool)
        self.services = Services(
            hub=hub,
            consumer=self.consumer,
            history=history,
            writer=self.writer,
            deadlines=Deadlines(time.monotonic),
            namespaces=Namespaces(settings.namespaces),
            limits=Limits(
                ping_interval_s=settings.ping_interval_s,
                pong_timeout_s=settings.pong_timeout_s,
                handshake_timeout_s=settings.handshake_timeout_s,
                subscriptions_max=settings.subscriptions_per_connection_max,
                requests_max=REQUESTS_MAX,
            ),
            stall_timeout_s=settings.client_stall_timeout_s,
            version=f"tidegate {version('tidegate')}",
            authenticate=self._authenticate,
            clock=time.monotonic,
            left=self._disconnect,
        )
        self._registry = Registry(
            self._streams,
            self.id,
            self.describe,
            lambda: self.consumer.epoch,
            lambda: list(hub.positions),
            self.consumer.holds,
        )
        with suppress(RedisError, OSError):
            # So that it is seen as soon as it is ready; its task goes on with it.
            await self._registry.renew()
        self._background(self.consumer.run(), "consumer")
        self._background(self.services.deadlines.run(), "deadlines")
        self._background(self._registry.run(), "registry")
        self._background(self._sweep(), "sweep")
        self.started = True
        log.info("gateway ready", worker=self.id, epoch=self.consumer.epoch, shards=found.shards)

    async def _open_pools(self) -> tuple[Pool, Pool, Layout]:
        """The pool for reading the log, the one for publishing, and what they lead to."""
        settings = self.settings
        dsn = settings.postgres_dsn.get_secret_value()
        async with AsyncExitStack() as opened:
            log_pool = await open_pool(
                dsn,
                1,
                settings.log_pool_size,
                settings.log_timeout_s,
                application_name="tidegate-log",
            )
            opened.push_async_callback(log_pool.close, POOL_CLOSE_TIMEOUT_S)
            async with log_pool.connection() as connection:
                found = await layout(connection)
            publish_pool = await open_pool(
                dsn,
                0,
                settings.publish_pool_size,
                PUBLISH_TIMEOUT_S,
                application_name="tidegate-publish",
            )
            opened.pop_all()
        self._pools += (log_pool, publish_pool)
        return log_pool, publish_pool, found

    async def _reach_redis(self) -> None:
        # An address may lead elsewhere by now.
        await self._streams.client.renew()
        warnings = await check(self._streams.client)
        # A server that loads its data tells about itself, and nothing else.
        await self._streams.epoch()
        for warning in warnings:
            log.warning(warning)

    def _background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        task.add_done_callback(self._died)

    def _died(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            return
        error = task.exception() or RuntimeError("ended without being told to")
        log.error("background task died", task=task.get_name(), exc_info=error)
        if not self.failed.done():
            self.failed.set_result(error)

    async def _sweep(self) -> None:
        hub = self.services.hub
        while True:
            await asyncio.sleep(SWEEP_S)
            rooms = list(hub.rooms.values())
            while rooms:
                portion, rooms = rooms[:SWEEP_ROOMS], rooms[SWEEP_ROOMS:]
                hub.sweep(time.monotonic(), self.settings.room_linger_s, portion)
                await asyncio.sleep(0)
            for shard in hub.sweep(time.monotonic(), self.settings.room_linger_s, ()):
                hub.positions.pop(shard, None)

    def _authenticate(self, token: str, now: float) -> Identity | None:
        """``now``, and the expiry in the answer, are of the clock of the deadlines."""
        if not token:
            if self.settings.allow_anonymous:
                return Identity(DEFAULT_TENANT, "", None, anonymous=True)
            return None
        today = time.time()
        identity = verify(token, self.settings.token_hmac_secret.get_secret_value(), today)
        if identity.expires_at is None:
            return identity
        return replace(identity, expires_at=now + identity.expires_at - today)

    def _restart(self) -> None:
        """A new epoch: every position is void, every client subscribes again."""
        for connection in list(self.connections):
            connection.evict_all()
        self.services.hub.restart()

    # Connections

    def connect(self, socket: Socket) -> Connection:
        """A connection over a socket whose handshake is complete."""
        connection = Connection(secrets.token_hex(12), socket, self._protocol, self.services)
        self.connections.add(connection)
        return connection

    def _disconnect(self, connection: Connection) -> None:
        """The socket of the connection is gone."""
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def api_key_matches(self, key: str) -> bool:
        """Compares in constant time; false if no key is configured."""
        expected = self.settings.api_key.get_secret_value()
        return bool(expected) and hmac.compare_digest(key.encode(), expected.encode())

    # Health

    @property
    def unready(self) -> str | None:
        """Why it is not ready, for everybody to see; None if it is."""
        if self.draining:
            return "draining"
        if not self.started:
            return self.waiting.reason or "starting"
        if self.failed.done():
            return "a background task has died"
        return None if self.consumer.connected else "no connection to Redis"

    @property
    def consuming(self) -> bool:
        """Whether the buses are read."""
        return self.started and self.consumer.connected

    def describe(self) -> dict[str, Any]:
        """What the registry says of this worker."""
        return {
            "host": self.settings.host,
            "port": self.settings.port,
            "pid": os.getpid(),
            "epoch": self.consumer.epoch,
            "connections": len(self.connections),
            "subscriptions": sum(len(c.session.rooms) for c in self.connections),
            "positions": {str(s): seq for s, seq in self.services.hub.positions.items()},
            "draining": self.draining,
        }

    # End

    async def drain(self) -> None:
        """Close all connections in paced batches, within the drain time-out."""
        self.draining = True
        deadline = time.monotonic() + self.settings.drain_timeout_s
        rate = max(
            self.settings.drain_connections_per_s,
            # Half of the time for closing, the rest for the peers to answer.
            len(self.connections) / (self.settings.drain_timeout_s / 2),
        )
        log.info("draining", connections=len(self.connections), per_second=round(rate))
        allowance = 0.0
        waiting = list(self.connections)
        while waiting and time.monotonic() < deadline:
            allowance += rate * DRAIN_TICK_S
            while waiting and allowance >= 1:
                allowance -= 1
                waiting.pop().close(codes.SHUTDOWN)
            await asyncio.sleep(DRAIN_TICK_S)
        await self._emptied(deadline - time.monotonic())
        if self.connections:
            log.warning("peers did not answer the close", connections=len(self.connections))

    async def _emptied(self, timeout_s: float) -> None:
        self._empty.clear()
        if self.connections and timeout_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._empty.wait()

    async def stop(self) -> None:
        """End the background tasks, leave Redis, close the pools."""
        await tasks.end(self._tasks)
        if hasattr(self, "_registry"):
            # Best effort: what is left in Redis expires or is reaped.
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    await self.consumer.leave()
                    await self._registry.leave()
        if hasattr(self, "_streams"):
            await self._streams.client.aclose()
        for pool in self._pools:
            await pool.close(POOL_CLOSE_TIMEOUT_S)
