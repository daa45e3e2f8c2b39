"""The pump: from the outbox to the streams over one connection to Postgres, step by step.

A step does the one thing that is due: tell Redis the epoch, bring the buses of shards that are new
to it up to their heads, or sequence a batch and append it. When there is nothing to do it sleeps on
the doorbell. The relay repeats steps, and makes a new pump after an error of Postgres.
"""

import asyncio
from collections.abc import Collection, Mapping
from itertools import groupby
from time import monotonic
from typing import LiteralString

from psycopg import errors
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from outbox import away, link, refusal
from outbox.away import Away
from outbox.backoff import Backoff
from outbox.database import Connection
from outbox.doorbell import Doorbell
from outbox.errors import EpochChanged, Fork
from outbox.layout import layout
from outbox.link import Unwatched, Watch
from outbox.log import Log
from outbox.message import Message
from outbox.reconcile import reconcile
from outbox.sequence import Batch, Sequencer
from outbox.standing import Journal, Pace, Standing
from outbox.streams import Status, Streams

OLD_EPOCH_KEPT_S = 3_600
"""How long the buses of a replaced history stay, for gateways that are still reading them."""

REDIS_DOWN_POLL_S = 1.0
FAILING_RETRY_S = 5.0
"""When a shard that cannot be sequenced, while others can, is tried again."""

APPEND_PATIENCE_S = 0.25
"""How long other shards wait for the slowest node of a cluster. It may take longer by itself."""

SHARD_ERRORS = (errors.DataError, errors.IntegrityError, errors.LockNotAvailable)
"""What one shard's rows, positions or locks can cause, and what need not stop the others."""


class Pump:
    """Steps over one connection. All errors but those of a lost history come through."""

    def __init__(
        self,
        connection: Connection,
        log: Log,
        streams: Streams,
        standing: Standing,
        shards: int,
        batch_messages: int,
        pace: Pace,
        journal: Journal,
        watch: Watch | None = None,
    ) -> None:
        """``shards`` says how many there are, ``batch_messages`` how many to sequence per shard in
        one transaction. ``log`` reads the same database.
        """
        self._connection = connection
        self._log = log
        self._streams = streams
        self._standing = standing
        self._shards = range(shards)
        self._batch_messages = batch_messages
        self._pace = pace
        self._journal = journal
        self._watch = watch or Unwatched()
        self._sequencer = Sequencer(connection, watch=self._watch)
        self._bell = Doorbell(connection, standing.wake)
        self._woken = False
        """Whether the next look is to let writers go on without ringing."""
        self._busy_at_s = monotonic()
        """When it last had something to do."""
        self._retry_at_s = 0.0
        """When the failing shards are due again."""
        self._away = Away(streams, standing, journal)
        self._refused: dict[int, int] = {}
        """Those of the failing shards of which Redis refuses a message, and its seq."""
        self._polls = Backoff(pace.poll_min_s, pace.poll_max_s)
        self._lock_polls = Backoff(pace.lock_poll_min_s, pace.lock_poll_max_s)

    async def listen(self) -> None:
        """Has the doorbell heard, or tells why not. To be called before the first step."""
        with self._watch:
            reason = await self._bell.listen()
        if reason is not None and reason != self._standing.doorbell_off:
            self._journal.warning("doorbell is off: polling", cause=reason)
        self._standing.doorbell_off = reason

    async def step(self) -> None:
        """Does what is due, or sleeps."""
        standing = self._standing
        standing.wake.clear()
        if not standing.redis_up:
            # Nothing is sequenced that cannot be appended: rows wait in the outbox, in silence.
            await self._release()
            await self._bell.wait(REDIS_DOWN_POLL_S)
            return
        if self._bell.changed:
            await self.listen()
        if standing.publish_epoch:
            await self._publish_epoch()
        standing.ready &= standing.held
        served = self._served(standing.held)
        missing = served - standing.ready
        if missing:
            await self._reconcile(missing)
        elif served:
            await self._sequence(served)
        else:
            await self._release()
            await self._bell.wait(away.RETRY_S if standing.away else self._pace.bell_poll_s)

    async def _sequence(self, served: frozenset[int]) -> None:
        standing = self._standing
        prelude = self._bell.prelude() if self._woken else None
        self._woken = False
        last_look = self._bell.locked == served
        batch = await self._batch(sorted(served), prelude)
        if batch.epoch != standing.epoch:
            # Another relay replaced it. The messages stand in the log: reconcile brings them.
            self._adopt(batch.epoch)
        elif batch.messages:
            standing.sequenced += len(batch.messages)
            self._busy_at_s = monotonic()
            self._polls.reset()
            self._lock_polls.reset()
            self._woken = True
            await self._append(batch.messages)
        elif not batch.more:
            await self._sleep(served, last_look)

    def _served(self, shards: frozenset[int]) -> frozenset[int]:
        """The shards without those that fail and are not due."""
        failing = self._standing.failing
        self._away.look()
        shards -= self._standing.away
        if failing and monotonic() >= self._retry_at_s:
            self._retry_at_s = monotonic() + FAILING_RETRY_S
            return shards
        return (shards - failing.keys()) or shards

    def _set_aside(self, shards: Collection[int], error: BaseException | None) -> None:
        """Leaves shards alone whose node of a cluster is out of reach.

        Raises the error if no shard would be left: then it is not about some shards.
        """
        standing = self._standing
        self._away.leave(shards, error)
        if error is not None and standing.held <= standing.away:
            standing.away.clear()
            raise error

    async def _batch(self, shards: list[int], prelude: LiteralString | None) -> Batch:
        """One batch of all shards or, where that fails, of each shard that does not fail alone.

        Those that have failed before are tried alone and without patience: others wait meanwhile.
        """
        alone = [shard for shard in shards if shard in self._standing.failing]
        together = [shard for shard in shards if shard not in alone]
        failure: Exception | None = None
        batches: list[Batch] = []
        if together:
            try:
                batches.append(await self._sequencer.batch(together, self._batch_messages, prelude))
            except SHARD_ERRORS as error:
                if len(shards) == 1:
                    raise
                failure, alone = error, shards
            prelude = None
        for shard in alone:
            try:
                batches.append(
                    await self._sequencer.batch(
                        [shard], self._batch_messages, prelude, patient=False
                    )
                )
            except SHARD_ERRORS as error:
                failure = error
                await self._failed(shard, str(error).partition("\n")[0])
            else:
                await self._works(shard)
            prelude = None
        if not batches or len({batch.epoch for batch in batches}) > 1:
            raise failure or EpochChanged("the epoch changed from one batch to the next")
        if len(batches) == 1:
            return batches[0]
        return Batch(
            batches[0].epoch,
            [message for batch in batches for message in batch.messages],
            any(batch.more for batch in batches),
        )

    async def _failed(self, shard: int, cause: str) -> None:
        failing = self._standing.failing
        if failing.get(shard) != cause:
            what = "appended" if shard in self._refused else "sequenced"
            self._journal.warning(f"shard cannot be {what}", shard=shard, cause=cause)
        failing[shard] = cause
        self._retry_at_s = monotonic() + FAILING_RETRY_S
        await refusal.tell(self._streams.client, self._standing.epoch, failing)

    async def _works(self, shard: int) -> None:
        failing = self._standing.failing
        if failing.pop(shard, None) is not None:
            self._refused.pop(shard, None)
            self._journal.info("shard goes on again", shard=shard)
            await refusal.tell(self._streams.client, self._standing.epoch, failing, shard)

    async def _sleep(self, shards: frozenset[int], last_look: bool) -> None:
        if self._standing.doorbell_off is not None:
            await self._bell.wait(self._polls.next_s())
        elif self._standing.away:
            self._woken = await self._bell.wait(away.RETRY_S)
        elif last_look:
            failing = bool(self._standing.failing)
            self._woken = await self._doze(FAILING_RETRY_S if failing else self._pace.bell_poll_s)
            if not self._woken and not failing:
                await self.listen()
        elif not await self._lock(shards):
            self._woken = await self._bell.wait(self._lock_polls.next_s())

    async def _lock(self, shards: frozenset[int]) -> bool:
        with self._watch:
            return await self._bell.lock(shards)

    async def _release(self) -> None:
        with self._watch:
            await self._bell.release()

    async def _doze(self, timeout_s: float) -> bool:
        """Waits for the bell; makes sure now and then that it could be heard."""
        end_s = monotonic() + timeout_s
        while (left_s := end_s - monotonic()) > 0:
            quiet = monotonic() - self._busy_at_s > link.QUIET_AFTER_S
            if await self._bell.wait(left_s if quiet else min(left_s, link.TOUCH_INTERVAL_S)):
                return True
            if not quiet:
                await link.touch(self._connection)
        return False

    async def _append(self, messages: list[Message]) -> None:
        standing = self._standing
        shards = {
            shard: list(group)
            for shard, group in groupby(messages, key=lambda message: message.shard)
        }
        redacted = await self._log.redacted(messages)
        appends = {
            shard: asyncio.create_task(
                self._streams.append(standing.epoch, shard, group, redacted=redacted)
            )
            for shard, group in shards.items()
        }
        patience_s = None if self._streams.client.spans_shards else APPEND_PATIENCE_S
        failure: BaseException | None = None
        fork: Fork | None = None
        gone: dict[int, BaseException] = {}
        appended = False
        for shard, answer in (await self._away.answers(appends, patience_s)).items():
            if isinstance(answer, RedisError) and not self._streams.client.spans_shards:
                gone[shard] = answer
            elif isinstance(answer, BaseException):
                if failure is None or refusal.may_be(failure):
                    failure = answer
                standing.ready.discard(shard)
            elif answer.status is Status.APPENDED:
                standing.lasts[shard] = answer.last
                appended = True
            else:
                standing.ready.discard(shard)
                if answer.status is Status.FORK:
                    fork = Fork(
                        f"the streams of shard {shard} hold messages that Postgres does not have, "
                        f"up to seq {answer.last}"
                    )
        standing.appended.set()
        if gone:
            self._set_aside(gone, next(iter(gone.values())))
        if failure is not None and not (appended and refusal.may_be(failure)):
            raise failure
        if fork is not None:
            await self._replace_epoch(fork)

    async def _reconcile(self, shards: frozenset[int]) -> None:
        standing = self._standing
        # As with batches.
        alone = shards & standing.failing.keys()
        together = shards - alone
        if together:
            try:
                await self._reconcile_together(together)
            except SHARD_ERRORS:
                if len(standing.held) == 1:
                    raise
                alone = shards
            except RedisError as error:
                if not refusal.may_be(error):
                    raise
                await refusal.answers(self._streams, standing.epoch, sorted(together))
                alone = shards
        failures: list[Exception] = []
        for shard in sorted(alone):
            try:
                await self._reconcile_together(frozenset({shard}), patient=False)
            except RedisError as error:
                if not refusal.may_be(error):
                    raise
                await self._find_refused(shard)
            except SHARD_ERRORS as error:
                failures.append(error)
                await self._failed(shard, str(error).partition("\n")[0])
            else:
                if shard in standing.ready:
                    await self._works(shard)
        if failures and len(failures) >= len(standing.held):
            raise failures[0]

    async def _reconcile_together(self, shards: frozenset[int], patient: bool = True) -> None:
        standing = self._standing
        if not self._streams.client.spans_shards:
            reached = await self._away.answering(shards, APPEND_PATIENCE_S)
            if reached != shards:
                self._set_aside(shards - reached, RedisTimeoutError("no answer"))
            shards = reached
        if not shards:
            return

        async def read_heads() -> tuple[str, Mapping[int, int]]:
            async with self._sequencer.hold(sorted(shards), patient=patient) as found:
                return found

        try:
            done = await reconcile(self._streams, self._log, standing.epoch, shards, read_heads)
        except EpochChanged:
            self._adopt((await layout(self._connection)).epoch)
            return
        except Fork as fork:
            await self._replace_epoch(fork)
            return
        except RedisError as error:
            if self._streams.client.spans_shards:
                raise
            if len(shards) == 1 and refusal.may_be(error):
                await self._find_refused(min(shards))
            else:
                self._set_aside(shards, error)
            return
        standing.lasts |= done.lasts
        standing.ready |= done.lasts.keys() - done.unfinished
        self._away.returned()
        for shard in standing.ready & self._refused.keys():
            await self._works(shard)
        standing.refilled += done.refilled
        for shard, reason in done.unreached.items():
            if reason is not None and refusal.may_be(reason):
                await self._find_refused(shard)
            else:
                self._set_aside([shard], None)
        if done.refilled:
            standing.appended.set()
            self._journal.info("buses refilled", messages=done.refilled, shards=len(shards))
        if done.unfinished:
            await self._bell.wait(self._lock_polls.next_s())

    async def _find_refused(self, shard: int) -> None:
        """Finds the message that Redis refuses, if it is one that keeps a bus from its head."""
        try:
            found = await refusal.refused(self._streams, self._log, self._standing.epoch, shard)
        except RedisError as error:
            if self._streams.client.spans_shards:
                raise
            self._set_aside([shard], error)
            return
        if found is not None:
            cause = str(found)
            if self._refused.get(shard) == found.seq:
                # The next words for it may be others: the connection was closed sooner.
                cause = self._standing.failing.get(shard, cause)
            self._refused[shard] = found.seq
            await self._failed(shard, cause)

    async def _publish_epoch(self) -> None:
        """Writes the epoch as Postgres has it now: what this relay remembers may be out of date."""
        epoch, _ = await self._log.heads()
        self._adopt(epoch)
        await self._streams.set_epoch(epoch)
        self._standing.publish_epoch = False

    async def _replace_epoch(self, proof: Fork) -> None:
        """Ends a history of which Postgres has lost a part that was delivered."""
        lost = self._standing.epoch
        epoch = await self._sequencer.new_epoch(lost)
        self._journal.warning(
            "Postgres lost commits that were delivered", proof=str(proof), epoch=lost
        )
        self._adopt(epoch)
        await self._streams.set_epoch(epoch)
        await self._streams.expire(lost, self._shards, OLD_EPOCH_KEPT_S)

    def _adopt(self, epoch: str) -> None:
        before = self._standing.epoch
        if self._standing.adopt(epoch):
            self._journal.warning("epoch changed", epoch=epoch, before=before)
