"""The mirror: keeps a second Redis as the first one is, out of the log.

It is there for the time in which gateways move from one Redis to another. It follows what the relay
sequences, some milliseconds behind, and nothing that happens to the second Redis reaches the first.
"""

import asyncio
from contextlib import suppress

import psycopg
from redis.exceptions import RedisError

from outbox import database
from outbox.backoff import Backoff
from outbox.errors import EpochChanged, Fork, OutboxError, PostgresUnavailable
from outbox.log import Log
from outbox.reconcile import reconcile
from outbox.redis.connect import check, connect
from outbox.standing import Journal, Standing
from outbox.streams import StreamLimits, Streams

LOOK_INTERVAL_S = 1.0
"""How often it looks whether the second Redis still is as it was left."""
LINGER_S = 0.01
"""Between two rounds: what is sequenced meanwhile goes in one."""
POOL_TIMEOUT_S = 5.0
CAUSE_MAX_CHARS = 300


class Mirror:
    """Mirrors the shards that the relay holds. ``run`` is called once."""

    def __init__(
        self,
        postgres_dsn: str,
        redis_url: str,
        limits: StreamLimits,
        timeout_s: float,
        standing: Standing,
        journal: Journal,
    ) -> None:
        """Raises OutboxError if the Redis URL is malformed."""
        self.trouble: str | None = None
        """What keeps it from its work, in one line."""
        self._postgres_dsn = postgres_dsn
        self._client = connect(redis_url, timeout_s=timeout_s)
        self._streams = Streams(self._client, limits)
        self._standing = standing
        self._journal = journal
        self._checked = False
        self._epoch = ""
        """The epoch that was written to the second Redis."""
        self._lasts: dict[int, int] = {}
        """Shard → seq up to which its bus there is known to reach."""
        self._next_look_at_s = 0.0
        self._complete = False

    async def run(self) -> None:
        """Works until cancelled. Failures are waited out."""
        backoff = Backoff(0.1, 2.0)
        pool = await self._open_pool(backoff)
        try:
            while True:
                delay_s = LINGER_S
                try:
                    await self._step(Log(pool))
                except EpochChanged:
                    delay_s = backoff.next_s()  # the relay is about to learn of it
                except (RedisError, psycopg.Error, OutboxError, OSError) as error:
                    self._failed(error)
                    delay_s = backoff.next_s()
                else:
                    backoff.reset()
                await asyncio.sleep(delay_s)
        finally:
            await pool.close(1.0)

    async def _open_pool(self, backoff: Backoff) -> database.Pool:
        while True:
            try:
                return await database.open_pool(
                    self._postgres_dsn,
                    0,
                    1,
                    POOL_TIMEOUT_S,
                    application_name="tidegate-relay-mirror",
                )
            except (PostgresUnavailable, OSError):
                await asyncio.sleep(backoff.next_s())  # the relay says so

    async def aclose(self) -> None:
        """Closes the connections to the second Redis."""
        await self._client.aclose()

    async def _step(self, log: Log) -> None:
        """Does what is due, or waits until something may be."""
        standing = self._standing
        standing.appended.clear()
        if not self._checked:
            await self._client.renew()
            for warning in await check(self._client):
                self._journal.warning("additional redis: setting", cause=warning)
            self._checked = True
        await self._look(log)
        lasts = self._lasts
        behind = frozenset(
            shard
            for shard in standing.held
            if shard not in lasts or lasts[shard] < standing.lasts.get(shard, 0)
        )
        if behind and self._epoch:
            done = await reconcile(self._streams, log, self._epoch, behind, log.heads)
            lasts |= {s: last for s, last in done.lasts.items() if s not in done.unfinished}
            if done.unreached:
                raise OutboxError(f"shards {sorted(done.unreached)} are out of reach")
        # While messages flow there is always one on its way: each shard has to have been complete
        # once, no more.
        if self._epoch and standing.held and standing.held <= lasts.keys() and not self._complete:
            self._complete = True
            self.trouble = None
            self._journal.info("additional redis: complete", shards=len(standing.held))
        if behind:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_INTERVAL_S):
                await standing.appended.wait()

    async def _look(self, log: Log) -> None:
        """Whether the second Redis has what was put there, and the epoch of the present."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_look_at_s and self._epoch == self._standing.epoch:
            return
        self._next_look_at_s = now_s + LOOK_INTERVAL_S
        await self._client.verify()
        if self._epoch != self._standing.epoch or await self._streams.epoch() != self._epoch:
            # As Postgres has it now: what the relay remembers may be out of date.
            epoch, _ = await log.heads()
            if epoch != self._epoch:
                self._lasts.clear()
            await self._streams.set_epoch(epoch)
            self._epoch = epoch
        for shard in self._lasts.keys() - self._standing.held:
            del self._lasts[shard]
        found = await self._streams.last_ids(self._epoch, sorted(self._lasts))
        for shard, last in found.items():
            if last < self._lasts[shard]:
                del self._lasts[shard]

    def _failed(self, error: Exception) -> None:
        cause = str(error).partition("\n")[0][:CAUSE_MAX_CHARS] or type(error).__name__
        if isinstance(error, Fork):
            # No proof of a loss, as it would be on the first: nobody was served from here yet.
            cause = f"it holds other messages of this epoch, empty it (FLUSHALL): {cause}"
        if cause != self.trouble:
            self._journal.warning("additional redis: trouble", cause=cause)
        self.trouble = cause
        self._checked = self._complete = False
        self._lasts.clear()
