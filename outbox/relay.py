"""The relay: sequences what was committed to the outbox and appends it to the streams.

Two loops share one standing. ``_work`` owns the connection to Postgres and runs the pump over it;
``_watch`` is the heartbeat in Redis: it renews the leases and looks, once a second, whether the
buses and the epoch are still what they were. Nothing that they decide is needed for correctness:
the locks in Postgres and the append script see to that, with any number of relays on one shard.
"""

import asyncio
import os
import random
import secrets
import socket
from collections.abc import Awaitable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TypeVar

import psycopg
import structlog
from redis.exceptions import RedisError

from outbox import database, retention, tasks
from outbox.admission import Admission, lasts
from outbox.backoff import Backoff
from outbox.errors import OutboxError, SchemaMismatch
from outbox.layout import layout
from outbox.lease import LEASE_TTL_S, RENEW_INTERVAL_S, Leases
from outbox.link import Watch, is_working
from outbox.log import Log
from outbox.mirror import Mirror
from outbox.neighbour import Neighbours, complaint
from outbox.pump import Pump
from outbox.redis.connect import check, connect
from outbox.standing import Pace, Standing
from outbox.streams import StreamLimits, Streams
from outbox.witness import delivered

STOP_PATIENCE_S = 10.0
"""How long a clean stop may take to finish the batch at hand; the log has what is cut off."""

SERVER_PATIENCE_MS = 10_000
POOL_SIZE = 2
POOL_TIMEOUT_S = 5.0
LOG_TIMEOUT_S = 5.0
MAINTENANCE_RETRY_S = 60.0
CAUSE_MAX_CHARS = 300

log = structlog.get_logger()

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """How a relay works."""

    postgres_dsn: str = field(repr=False)
    redis_url: str = field(repr=False)
    redis_url_also: str = field(default="", repr=False)
    """A second Redis that is kept the same while gateways move there; empty: none."""
    name: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    """What operators see; a random part is added."""
    streams: StreamLimits = field(default_factory=StreamLimits)
    batch_messages: int = 500
    """Per shard, in one sequencing transaction."""
    pace: Pace = field(default_factory=Pace)
    lease_ttl_s: float = LEASE_TTL_S
    heartbeat_s: float = RENEW_INTERVAL_S
    retry_min_s: float = 0.1
    retry_max_s: float = 1.0
    """How long to wait for the next attempt after an error."""
    redis_timeout_s: float = 5.0
    retention_days: int = 7
    partitions_ahead_days: int = 7
    maintenance_interval_s: float = 3_600.0


@dataclass(frozen=True, slots=True)
class RelayHealth:
    """How a relay stands."""

    relay: str
    postgres: str | None
    """What keeps it from Postgres, in one line; None if nothing does."""
    redis: str | None
    """What keeps it from Redis."""
    redis_also: str | None
    """What keeps it from the additional Redis."""
    doorbell: str | None
    """Why it polls instead of waiting for the bell."""
    epoch: str
    """Empty before it was first connected."""
    shards: tuple[int, ...]
    """The shards that it serves at this moment."""
    failing: dict[int, str]
    """Shard → why it cannot be sequenced, though others can."""
    sequenced: int
    """Messages since it was started."""
    refilled: int
    """Messages that it took from the log to refill a bus."""


class Relay:
    """One relay. ``run`` may be called once."""

    def __init__(self, options: RelayOptions) -> None:
        """Raises OutboxError if the Redis URL is malformed."""
        self.id = f"{'-'.join(options.name.split())}-{secrets.token_hex(3)}"
        self._options = options
        self._client = connect(options.redis_url, timeout_s=options.redis_timeout_s)
        self._streams = Streams(self._client, options.streams)
        self._standing = Standing()
        self._mirror: Mirror | None = None
        if options.redis_url_also:
            self._mirror = Mirror(
                options.postgres_dsn,
                options.redis_url_also,
                options.streams,
                options.redis_timeout_s,
                self._standing,
                log,
            )
        self._leases: Leases | None = None
        self._serving = asyncio.Event()
        """Set with a connection to Postgres: without one, others should have the leases."""
        self._beat = asyncio.Event()
        """Asks for a heartbeat at once."""
        self._stopping = asyncio.Event()
        self._admission = Admission()
        self._neighbours = Neighbours()
        self._troubles: dict[str, str] = {}
        self._node_away = False
        """Whether the last heartbeat found a node of a cluster out of reach."""

    def health(self) -> RelayHealth:
        """How it stands at this moment; no I/O."""
        standing = self._standing
        return RelayHealth(
            relay=self.id,
            postgres=self._troubles.get("postgres"),
            redis=self._troubles.get("redis"),
            redis_also=None if self._mirror is None else self._mirror.trouble,
            doorbell=standing.doorbell_off,
            epoch=standing.epoch,
            shards=tuple(sorted(standing.ready)),
            failing=dict(standing.failing),
            sequenced=standing.sequenced,
            refilled=standing.refilled,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Works until ``stop`` is set. Failures of Postgres and of Redis are waited out.

        Raises:
            UnsupportedServer, SchemaMismatch: what no waiting would mend. A schema that is missing
                or too old is waited for: a migration may be on its way.
            AccessRefused: the same, but only before it has worked for the first time.
        """
        log.info("relay started", relay=self.id)
        stopper = asyncio.create_task(stop.wait())
        work = asyncio.create_task(self._work())
        loops = [
            work,
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._maintain()),
        ]
        if self._mirror is not None:
            loops.append(asyncio.create_task(self._mirror.run()))
        try:
            ended, _ = await asyncio.wait((stopper, *loops), return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            self._standing.wake.set()
            if stopper in ended and self._serving.is_set():
                await asyncio.wait((work,), timeout=STOP_PATIENCE_S)
            failures = [loop.exception() for loop in loops if loop.done()]
            failure = next(filter(None, failures), None)
        finally:
            await tasks.end((stopper, *loops))
            await self._leave()
        if failure is not None:
            raise failure
        if not stop.is_set():
            raise RuntimeError("a loop of the relay ended by itself")
        log.info("relay stopped", relay=self.id, sequenced=self._standing.sequenced)

    async def _leave(self) -> None:
        # Leases that cannot be given back expire.
        with suppress(RedisError, OSError):
            async with asyncio.timeout(1):
                if self._leases is not None:
                    await self._leases.release()
        await self._client.aclose()
        if self._mirror is not None:
            await self._mirror.aclose()

    # Postgres

    async def _work(self) -> None:
        backoff = Backoff(self._options.retry_min_s, self._options.retry_max_s)
        while not self._stopping.is_set():
            try:
                await self._serve(backoff)
            except (psycopg.Error, OutboxError, OSError) as error:
                self._admission.check(error)
                if lasts(error):
                    raise
                self._trouble("postgres", error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(backoff.next_s()):
                        await self._stopping.wait()

    async def _serve(self, backoff: Backoff) -> None:
        """Pumps over one connection until it fails."""
        options = self._options
        async with AsyncExitStack() as stack:
            connection = await database.connect(
                options.postgres_dsn, application_name="tidegate-relay"
            )
            stack.push_async_callback(connection.close)
            found = await layout(connection)
            if not connection.pooled:
                # Should this process be stopped, the server must not go on waiting for it to read
                # an answer: the transaction would keep the locks of its shards.
                await connection.execute(f"SET tcp_user_timeout = {SERVER_PATIENCE_MS}")
            pool = await database.open_pool(
                options.postgres_dsn,
                0,
                POOL_SIZE,
                POOL_TIMEOUT_S,
                application_name="tidegate-relay-log",
            )
            stack.push_async_callback(pool.close, 1.0)
            if self._leases is None:
                self._leases = Leases(
                    self._client, self.id, found.shards, found.epoch, options.lease_ttl_s
                )
            elif self._leases.shards != found.shards:
                raise SchemaMismatch(
                    f"the database has {found.shards} shards, before it had {self._leases.shards}"
                )
            self._standing.adopt(found.epoch)
            # This server may be another one, or restored: nothing is taken for granted.
            self._standing.distrust()
            pump = Pump(
                connection,
                Log(pool, LOG_TIMEOUT_S),
                self._streams,
                self._standing,
                found.shards,
                options.batch_messages,
                options.pace,
                log,
                Watch(connection, partial(is_working, options.postgres_dsn)),
            )
            await pump.listen()
            self._over("postgres")
            self._admission.connected = True
            self._serving.set()
            stack.callback(self._serving.clear)
            self._beat.set()
            while not self._stopping.is_set():
                reconciled = self._standing.redis_up and bool(self._standing.ready)
                try:
                    await pump.step()
                except RedisError as error:
                    self._redis_failed(error)
                else:
                    backoff.reset()
                    self._admission.proven |= reconciled

    # Redis

    async def _watch(self) -> None:
        backoff = Backoff(self._options.retry_min_s, self._options.retry_max_s)
        while True:
            self._beat.clear()
            try:
                await self._heartbeat()
            except (RedisError, OSError) as error:
                self._redis_failed(error)
                delay_s = backoff.next_s()
            else:
                delay_s = self._options.heartbeat_s * random.uniform(0.9, 1.0)
                backoff.reset()
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._beat.wait()

    async def _heartbeat(self) -> None:
        standing = self._standing
        if not standing.redis_up:
            # An address may lead elsewhere by now, and an old link to a server that was demoted.
            await self._client.renew()
            for warning in await check(self._client):
                self._trouble("redis setting", warning)
        self._node_away = False
        await self._client.verify()
        if self._leases is not None and self._serving.is_set():
            await self._leases.move(standing.epoch)
            held = await self._unless_away(self._leases.renew(), standing.held)
            if held != standing.held:
                log.info("shards leased", shards=sorted(held), relays=self._leases.relays)
                standing.held = held
                standing.wake.set()
            await self._compare()
        elif self._leases is not None:
            standing.held = frozenset()
            await self._leases.release()
        if not self._node_away:
            self._over("redis node")
        if not standing.redis_up:
            standing.redis_up = True
            self._admission.redis_connected = True
            standing.wake.set()
            self._over("redis")

    async def _compare(self) -> None:
        """Compares what Redis has with what was put there: a quiet shard would not notice."""
        standing = self._standing
        epoch = standing.epoch
        known = {shard: standing.lasts[shard] for shard in standing.ready}
        found = await self._unless_away(self._streams.last_ids(epoch, sorted(known)), {})
        told = await self._unless_away(self._streams.epoch(), epoch)
        if told != standing.epoch:
            if told and not standing.publish_epoch and self._neighbours.found(told, monotonic()):
                log.error(complaint(told))
            standing.publish_epoch = True
            standing.wake.set()
        lost = frozenset(shard for shard, last in found.items() if last < known[shard])
        if lost and epoch == standing.epoch:
            log.warning("buses lost entries", shards=sorted(lost))
            standing.distrust(lost)
        seen = await self._unless_away(delivered(self._client, epoch), {})
        ahead = frozenset(shard for shard, last in known.items() if seen.get(shard, 0) > last)
        if ahead and epoch == standing.epoch:
            # Another relay was faster, or Postgres lost commits: reconcile finds out.
            standing.distrust(ahead)

    async def _unless_away(self, asked: Awaitable[T], otherwise: T) -> T:
        """An answer of Redis or, where one node of a cluster is away, what is known already.

        The shards of the other nodes need not wait for it, and leases are for efficiency only.
        """
        if self._client.spans_shards or not self._standing.redis_up:
            return await asked
        try:
            # Short enough for the next renewal of the leases to be in time.
            async with asyncio.timeout(self._options.lease_ttl_s / 6):
                return await asked
        except (RedisError, OSError) as error:
            self._node_away = True
            self._trouble("redis node", error)
            return otherwise

    def _redis_failed(self, error: Exception) -> None:
        self._admission.check(error)
        self._trouble("redis", error)
        self._standing.redis_up = False
        self._standing.distrust()

    # Postgres, now and then

    async def _maintain(self) -> None:
        options = self._options
        await self._serving.wait()
        while True:
            delay_s = options.maintenance_interval_s
            try:
                connection = await database.connect(
                    options.postgres_dsn, application_name="tidegate-relay-maintenance"
                )
                try:
                    done = await retention.maintain(
                        connection, options.retention_days, options.partitions_ahead_days
                    )
                finally:
                    await connection.close()
                if done.made or done.dropped:
                    log.info("partitions changed", made=done.made, dropped=done.dropped)
                self._over("maintenance")
            except (psycopg.Error, OSError) as error:
                self._trouble("maintenance", error)
                delay_s = min(delay_s, MAINTENANCE_RETRY_S)
            await asyncio.sleep(delay_s * random.uniform(0.9, 1.1))

    # What is said of errors

    def _trouble(self, what: str, cause: Exception | str) -> None:
        """Logs a cause when it is not the one that was logged last."""
        line = str(cause).partition("\n")[0][:CAUSE_MAX_CHARS] or type(cause).__name__
        if self._troubles.get(what) != line:
            self._troubles[what] = line
            log.warning(f"{what}: trouble", cause=line)

    def _over(self, what: str) -> None:
        if self._troubles.pop(what, None) is not None:
            log.info(f"{what}: well again")
