"""Applications that commit while their database may fail, and know what they know of it."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import psycopg

from publisher import Message, publish_async, publish_many_async
from tests.oracle import Committed, Key
from tests.system.progress import Progress
from tests.system.writers import content

ROLLBACK = 0.15
DAWDLE = 0.05
"""The share of transactions that take long to commit, so that many overtake them."""
DAWDLE_S = (0.3, 2.0)
MESSAGES_MAX = 4
LARGE = 0.03
LARGE_CHARS = 20_000
TEXT = 'grüße "\\ \n€ 😀 '
RETRY_S = (0.05, 0.5)
ANSWER_TIMEOUT_S = 60.0
PREPARED_S = (0.0, 0.1, 8.0)
"""Half of the prepared transactions are ended within the second, the others within the third."""
PREPARED_MAX = 2
"""By each writer at a time."""

Sent = tuple[Key, Any, float]
"""Room, data and the time of the insert."""


class TwoPhases:
    """Whether writers may prepare transactions now, and how many are prepared or about to be."""

    def __init__(self, allowed: bool = False) -> None:
        self.allowed = allowed
        self.under_way = 0
        self.prepared = 0
        """All so far."""


@dataclass(slots=True)
class _Prepared:
    """A transaction that waits for its second phase."""

    name: str
    undo: bool
    txid: str
    sent: list[Sent]
    due_at: float
    certain: bool = False
    """Whether PREPARE was answered."""


class Writer:
    """One connection that commits to random rooms until told to stop; comes back when it breaks.

    Where the answer to a COMMIT is lost it cannot know, and says so (``Committed.certain``).
    """

    def __init__(
        self,
        name: str,
        dsn: Callable[[], str],
        rooms: Sequence[Key],
        seed: int,
        progress: Progress,
        two_phases: TwoPhases,
        pause_s: float = 0.1,
    ) -> None:
        """``dsn``: where the database is now. ``pause_s``: at most so long between two
        transactions. ``two_phases``: while allowed, half of the transactions are prepared, and
        committed or rolled back from there after a while, maybe over another connection."""
        self.committed: list[Committed] = []
        self.rolled_back = 0
        self.broken = 0
        """How often the connection was lost."""
        self._name = name
        self._dsn = dsn
        self._rooms = rooms
        self._random = random.Random(seed)
        self._progress = progress
        self._pause_s = pause_s
        self._two_phases = two_phases
        self._transactions = 0
        self._messages = 0
        self._prepared: list[_Prepared] = []

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set() or self._prepared:
            try:
                async with await psycopg.AsyncConnection.connect(
                    self._dsn(),
                    autocommit=True,
                    application_name=self._name,
                    prepare_threshold=None,
                    connect_timeout=10,
                ) as connection:
                    while not stop.is_set():
                        async with asyncio.timeout(ANSWER_TIMEOUT_S):
                            await self._second_phases(connection)
                            await self._transaction(connection)
                        await asyncio.sleep(self._random.uniform(0, self._pause_s))
                    async with asyncio.timeout(ANSWER_TIMEOUT_S):
                        await self._second_phases(connection, everything=True)
            except (psycopg.OperationalError, OSError):
                self.broken += 1
                await asyncio.sleep(self._random.uniform(*RETRY_S))

    async def _transaction(self, connection: psycopg.AsyncConnection[Any]) -> None:
        pick = self._random
        self._transactions += 1
        undo = pick.random() < ROLLBACK
        prepare = pick.random() < 0.5 and self._two_phases.allowed
        if prepare and len(self._prepared) < PREPARED_MAX:
            self._two_phases.under_way += 1
            try:
                await self._first_phase(connection, undo)
            finally:
                self._two_phases.under_way -= 1
            return
        txid, sent = await self._begin(connection)
        if undo:
            with suppress(psycopg.OperationalError):
                await connection.execute("ROLLBACK")
            self.rolled_back += len(sent)
            return
        name = f"{self._name}-{self._transactions}"
        committed_at = inf
        try:
            await connection.execute("COMMIT")
            committed_at = time.monotonic()
        finally:
            self._record(name, txid, sent, committed_at)

    async def _begin(self, connection: psycopg.AsyncConnection[Any]) -> tuple[str, list[Sent]]:
        """A transaction that has inserted messages."""
        pick = self._random
        await connection.execute("BEGIN")
        txid, sent = "", []
        for _ in range(pick.randint(1, MESSAGES_MAX)):
            txid, message = await self._publish(connection)
            sent += message
        if pick.random() < DAWDLE:
            await asyncio.sleep(pick.uniform(*DAWDLE_S))
        return txid, sent

    def _record(self, name: str, txid: str, sent: Sequence[Sent], committed_at: float) -> None:
        """``committed_at`` is infinity if it is not known whether it has committed."""
        self.committed += [
            Committed(
                key,
                content(txid, data),
                name,
                index,
                inserted_at,
                committed_at,
                certain=committed_at < inf,
            )
            for index, (key, data, inserted_at) in enumerate(sent)
        ]
        if committed_at < inf:
            self._progress.advance(len(sent))

    async def _first_phase(self, connection: psycopg.AsyncConnection[Any], undo: bool) -> None:
        txid, sent = await self._begin(connection)
        soon, later, last = PREPARED_S
        wait_s = self._random.choice(
            (self._random.uniform(soon, later), self._random.uniform(later, last))
        )
        name = f"{self._name}-{self._transactions}"
        prepared = _Prepared(name, undo, txid, sent, time.monotonic() + wait_s)
        self._prepared.append(prepared)
        self._two_phases.under_way += 1
        await connection.execute(f"PREPARE TRANSACTION '{name}'".encode())
        prepared.certain = True
        self._two_phases.prepared += 1

    async def _second_phases(
        self, connection: psycopg.AsyncConnection[Any], everything: bool = False
    ) -> None:
        """Ends those that are due."""
        hurry = everything or not self._two_phases.allowed
        for prepared in list(self._prepared):
            if not hurry and prepared.due_at > time.monotonic():
                continue
            order = "ROLLBACK" if prepared.undo else "COMMIT"
            # Only this writer ends it: one that was there and is gone has ended as it was told to
            # over a connection that broke, or it was lost, which the oracle will find.
            known = prepared.certain
            try:
                statement = f"{order} PREPARED '{prepared.name}'".encode()
                await connection.execute(statement)
                known = True
            except psycopg.errors.UndefinedObject:
                pass
            self._prepared.remove(prepared)
            self._two_phases.under_way -= 1
            if prepared.undo:
                self.rolled_back += len(prepared.sent)
            else:
                self._record(
                    prepared.name,
                    prepared.txid,
                    prepared.sent,
                    time.monotonic() if known else inf,
                )

    async def _publish(self, connection: psycopg.AsyncConnection[Any]) -> tuple[str, list[Sent]]:
        """One or two messages, in one of the ways that there are."""
        pick = self._random
        now = time.monotonic()
        (tenant, room), data = key, _ = pick.choice(self._rooms), self._data()
        match pick.randrange(4):
            case 0:
                other = (tenant, pick.choice([r for t, r in self._rooms if t == tenant]))
                sent = [(key, data, now), (other, self._data(), now)]
                messages = [Message(room, said, tenant=t) for (t, room), said, _ in sent]
                return await publish_many_async(connection, messages), sent
            case 1:
                # A part that is undone.
                await connection.execute("SAVEPOINT s")
                await publish_async(connection, room, {"id": "undone"}, tenant=tenant)
                await connection.execute("ROLLBACK TO SAVEPOINT s")
                self.rolled_back += 1
                txid = await publish_async(connection, room, data, tenant=tenant)
            case 2:
                cursor = await connection.execute(
                    "INSERT INTO tidegate.outbox (tenant, room, payload) VALUES (%s, %s, %s) "
                    "RETURNING pg_current_xact_id()::text",
                    (tenant, room, json.dumps(data)),
                )
                row = await cursor.fetchone()
                assert row is not None
                txid = row[0]
            case _:
                txid = await publish_async(connection, room, data, tenant=tenant)
        return txid, [(key, data, now)]

    def _data(self) -> dict[str, Any]:
        self._messages += 1
        large = self._random.random() < LARGE
        size = LARGE_CHARS if large else self._random.randint(0, 200)
        text = (TEXT * (size // len(TEXT) + 1))[:size]
        return {"id": f"{self._name}-{self._messages}", "text": text}
