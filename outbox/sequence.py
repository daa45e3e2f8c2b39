"""Sequencing: from the outbox table into the log, each message with its seq and its offset.

One transaction, sent in one go: set up, lock the rows of the shards, take a batch
(``sequence.sql``), commit. The locks put concurrent relays in a row; READ COMMITTED gives the batch
a snapshot that is younger than the locks.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from secrets import token_hex
from typing import Any, LiteralString

from psycopg import AsyncCursor, errors
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from outbox import rows
from outbox.database import Connection
from outbox.errors import SchemaMismatch
from outbox.link import Unwatched, Watch
from outbox.message import Message

LIMIT_BYTES = 4_194_304
"""Payload bytes per shard and batch; a single message may exceed them."""
LOCK_TIMEOUT_MS = 5_000
IMPATIENT_LOCK_TIMEOUT_MS = 200
"""For a shard that has failed: others must not wait with it again and again."""
STATEMENT_TIMEOUT_MS = 30_000
IDLE_TIMEOUT_MS = 15_000
"""How long a relay that stopped in the middle may hold the locks of its shards."""
ANSWER_TIMEOUT_S = 40.0
"""Above the server's own time-outs: reached only if the server or the link is dead."""

EVERYTHING = 2**63 - 1
NOTHING = (0, None)

# The outbox is mostly empty, so its statistics say nothing; and no plan may read past dead rows.
# Costs of the disabled ways would call the JIT compiler into each batch.
_SETUP = """
    SELECT set_config('synchronous_commit', 'on', true),
           set_config('lock_timeout', %(lock_timeout)s, true),
           set_config('statement_timeout', %(statement_timeout)s, true),
           set_config('idle_in_transaction_session_timeout', %(idle_timeout)s, true),
           set_config('enable_seqscan', 'off', true),
           set_config('enable_bitmapscan', 'off', true),
           set_config('enable_nestloop', 'off', true),
           set_config('jit', 'off', true),
           set_config('plan_cache_mode', 'force_generic_plan', true)
"""
_SETTINGS = {
    "lock_timeout": f"{LOCK_TIMEOUT_MS}ms",
    "statement_timeout": f"{STATEMENT_TIMEOUT_MS}ms",
    "idle_timeout": f"{IDLE_TIMEOUT_MS}ms",
}
_BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_LOCK = """
    SELECT s.id
    FROM unnest(%(shards)s::int[]) AS a (id) CROSS JOIN LATERAL (
        SELECT s.id FROM tidegate.shard s
        WHERE s.id = a.id
        ORDER BY s.head DESC LIMIT 1
        FOR NO KEY UPDATE
    ) s
"""
_HEADS = """
    SELECT s.id, s.head, m.epoch
    FROM tidegate.meta m CROSS JOIN unnest(%(shards)s::int[]) AS a (id) CROSS JOIN LATERAL (
        SELECT s.id, s.head FROM tidegate.shard s
        WHERE s.id = a.id
        ORDER BY s.head DESC LIMIT 1
    ) s
"""
# A relay that was stopped, or whose link is dead, may leave its server waiting to hand over a large
# batch, which no time-out of the server's ends.
_EVICT = """
    SELECT pg_terminate_backend(a.pid)
    FROM pg_stat_activity a
    WHERE a.pid <> pg_backend_pid() AND a.wait_event = 'ClientWrite'
      AND a.xact_start < clock_timestamp() - %(lock_timeout)s::interval
      AND a.pid IN (SELECT l.pid FROM pg_locks l
                    WHERE l.relation = 'tidegate.shard'::regclass
                      AND l.database = (SELECT oid FROM pg_database
                                        WHERE datname = current_database()))
"""
_SHARDS = "SELECT array_agg(i) FROM generate_series(0, (SELECT shards FROM tidegate.meta) - 1) i"
_NEW_EPOCH = """
    UPDATE tidegate.meta
    SET epoch = CASE WHEN epoch = coalesce(%(lost)s, epoch)
                THEN left(md5(gen_random_uuid()::text), 16) ELSE epoch END
    RETURNING epoch
"""
SEQUENCE: LiteralString = (
    resources.files("outbox").joinpath("sequence.sql").read_text().format(columns=rows.COLUMNS)
)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one sequencing transaction has committed."""

    epoch: str
    messages: list[Message]
    """Ordered by (shard, seq)."""
    more: bool
    """Whether a limit was reached, so that there may be more to take at once."""


class Sequencer:
    """Sequences over one connection, for one task at a time.

    Any error may leave the last batch committed or not; the log says which (``Log.span``).
    """

    def __init__(
        self,
        connection: Connection,
        limit_bytes: int = LIMIT_BYTES,
        watch: Watch | Unwatched | None = None,
    ) -> None:
        """``watch`` looks after the link while an answer is awaited."""
        self._connection = connection
        self._watch = watch or Unwatched()
        self._limit_bytes = limit_bytes
        self._memory: dict[int, tuple[int, str | None]] = {}

    def forget(self) -> None:
        """Have the next batch look at the whole outbox, as the first one does."""
        self._memory.clear()

    async def batch(
        self,
        shards: Sequence[int],
        limit_per_shard: int,
        prelude: LiteralString | None = None,
        *,
        patient: bool = True,
    ) -> Batch:
        """Takes up to ``limit_per_shard`` (>= 1) messages of each shard, in the order of their ids.

        ``prelude`` is a statement to send ahead, outside of the transaction; ``patient`` says
        whether to wait for locks longer than a moment.

        Raises:
            SchemaMismatch: a shard does not exist.
            psycopg.Error: also if the commit's outcome is unknown.
            TimeoutError: no answer; the connection is closed.
        """
        try:
            return await self._batch(shards, limit_per_shard, prelude, patient)
        except errors.CheckViolation:
            # The log has no partition for today: no relay has run for days, or the clock jumped.
            await self._connection.execute("SELECT tidegate.make_partitions(1)")
            return await self._batch(shards, limit_per_shard, None, patient)

    async def _batch(
        self,
        shards: Sequence[int],
        limit_per_shard: int,
        prelude: LiteralString | None,
        patient: bool,
    ) -> Batch:
        ordered = sorted(set(shards))
        # Out of memory until this batch has succeeded.
        remembered = [self._memory.pop(shard, NOTHING) for shard in ordered]
        parameters = {
            "shards": ordered,
            "marks": [mark for mark, _ in remembered],
            "snapshots": [snapshot for _, snapshot in remembered],
            "limit_rows": limit_per_shard,
            "limit_bytes": self._limit_bytes,
            "batch": token_hex(8),
        }
        async with self._transaction():
            with self._watch:
                return await self._exchange(ordered, parameters, prelude, patient)

    async def _exchange(
        self,
        ordered: list[int],
        parameters: dict[str, Any],
        prelude: LiteralString | None,
        patient: bool,
    ) -> Batch:
        """The transaction in one go."""
        async with self._connection.pipeline():
            if prelude is not None:
                await self._connection.execute(prelude)
            locked = await self._begin(ordered, patient)
            answer = await self._connection.execute(SEQUENCE, parameters, prepare=True)
            commit = await self._connection.execute("COMMIT")
        await _check_locked(locked, ordered)
        if commit.statusmessage != "COMMIT":
            raise errors.InFailedSqlTransaction("the sequencing transaction was rolled back")
        return self._read(await answer.fetchall())

    def _read(self, answer: list[TupleRow]) -> Batch:
        messages = []
        epoch = ""
        more = False
        memory = {}
        for row in answer:
            if row[1] is not None:
                messages.append(rows.message(row))
                continue
            shard = row[0]
            epoch, snapshot, last_id, emptied = row[11:]
            memory[shard] = (EVERYTHING if emptied else last_id, snapshot)
            more = more or not emptied
        # Behind a pooler the next batch may meet another server, with other transaction ids.
        if not self._connection.pooled:
            self._memory |= memory
        messages.sort()
        return Batch(epoch, messages, more)

    @asynccontextmanager
    async def hold(
        self, shards: Sequence[int], *, patient: bool = True
    ) -> AsyncIterator[tuple[str, dict[int, int]]]:
        """Holds the locks of the shards: while it lasts nobody sequences into them.

        Gives the epoch and each shard's head. The server ends it after IDLE_TIMEOUT_MS.

        Raises: as ``batch``.
        """
        ordered = sorted(set(shards))
        async with self._transaction():
            with self._watch:
                async with self._connection.pipeline():
                    locked = await self._begin(ordered, patient)
                    answer = await self._connection.execute(_HEADS, {"shards": ordered})
            await _check_locked(locked, ordered)
            found = await answer.fetchall()
            epoch = found[0][2] if found else ""
            yield epoch, {shard: head for shard, head, _ in found}
            await self._connection.execute("COMMIT")

    async def new_epoch(self, lost: str | None = None) -> str:
        """Ends the present history: everything sequenced from now on belongs to the epoch returned.

        With ``lost``, only the history of that epoch: of several relays that found its loss, one
        replaces it and all get the same answer. Waits until nobody sequences. Raises: as ``batch``.
        """
        self.forget()
        async with self._transaction():
            cursor = await self._connection.execute(_SHARDS)
            row = await cursor.fetchone()
            shards = row[0] if row is not None and row[0] is not None else []
            async with self._connection.pipeline():
                await self._begin(shards)
                answer = await self._connection.execute(_NEW_EPOCH, {"lost": lost})
                await self._connection.execute("COMMIT")
            row = await answer.fetchone()
        if row is None:
            raise SchemaMismatch("table tidegate.meta is empty: restore it from a backup")
        epoch: str = row[0]
        return epoch

    async def _begin(self, shards: list[int], patient: bool = True) -> AsyncCursor[TupleRow]:
        settings = _SETTINGS
        if not patient:
            settings = settings | {"lock_timeout": f"{IMPATIENT_LOCK_TIMEOUT_MS}ms"}
        await self._connection.execute(_BEGIN)
        await self._connection.execute(_SETUP, settings)
        return await self._connection.execute(_LOCK, {"shards": shards})

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[None]:
        """Leaves no transaction behind: it is rolled back, or the connection closed."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                yield
        except BaseException as error:
            self.forget()
            await self._clean(error)
            if isinstance(error, errors.LockNotAvailable):
                # Without the right to do so the next attempt will say the same.
                with suppress(errors.Error):
                    await self._connection.execute(_EVICT, _SETTINGS)
            raise

    async def _clean(self, error: BaseException) -> None:
        status = self._connection.pgconn.transaction_status
        if status == TransactionStatus.IDLE:
            return
        if isinstance(error, Exception) and not isinstance(error, TimeoutError):
            try:
                async with asyncio.timeout(1):
                    await self._connection.execute("ROLLBACK")
                return
            except (errors.Error, TimeoutError):
                pass
        await self._connection.close()


async def _check_locked(locked: AsyncCursor[Any], shards: list[int]) -> None:
    missing = set(shards) - {row[0] for row in await locked.fetchall()}
    if missing:
        raise SchemaMismatch(f"the database has no shard {min(missing)}: compare its layout")
