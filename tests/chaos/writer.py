"""Applications that commit while their database may fail, and know what they know of it."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
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


class Writer:
    """One connection that commits to random rooms until told to stop; comes back when it breaks.

    Where the answer to a COMMIT is lost it cannot know, and says so (``Committed.certain``).
    """

    def __init__(
        self,
        name: str,
        dsn: str,
        rooms: Sequence[Key],
        seed: int,
        progress: Progress,
        pause_s: float = 0.1,
        two_phases: bool = False,
    ) -> None:
        """``pause_s``: at most so long between two transactions. ``two_phases``: half of the
        transactions are prepared, and committed from there after a moment."""
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

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                async with await psycopg.AsyncConnection.connect(
                    self._dsn,
                    autocommit=True,
                    application_name=self._name,
                    prepare_threshold=None,
                    connect_timeout=10,
                ) as connection:
                    while not stop.is_set():
                        async with asyncio.timeout(ANSWER_TIMEOUT_S):
                            await self._transaction(connection)
                        await asyncio.sleep(self._random.uniform(0, self._pause_s))
            except (psycopg.OperationalError, OSError):
                self.broken += 1
                await asyncio.sleep(self._random.uniform(*RETRY_S))

    async def _transaction(self, connection: psycopg.AsyncConnection[Any]) -> None:
        pick = self._random
        self._transactions += 1
        undo = pick.random() < ROLLBACK
        prepare = self._two_phases and pick.random() < 0.5
        await connection.execute("BEGIN")
        txid, sent = "", []
        for _ in range(pick.randint(1, MESSAGES_MAX)):
            txid, message = await self._publish(connection)
            sent += message
        if pick.random() < DAWDLE:
            await asyncio.sleep(pick.uniform(*DAWDLE_S))
        end = "ROLLBACK" if undo else "COMMIT"
        if prepare:
            name = f"{self._name}-{self._transactions}"
            await connection.execute(f"PREPARE TRANSACTION '{name}'")
            await asyncio.sleep(pick.uniform(0, self._pause_s))
            end += f" PREPARED '{name}'"
        if undo:
            with suppress(psycopg.OperationalError):
                await connection.execute(end)
            self.rolled_back += len(sent)
            return
        committed_at = inf
        try:
            await connection.execute(end)
            committed_at = time.monotonic()
        finally:
            self.committed += [
                Committed(
                    key,
                    content(txid, data),
                    f"{self._name}-{self._transactions}",
                    index,
                    inserted_at,
                    committed_at,
                    certain=committed_at < inf,
                )
                for index, (key, data, inserted_at) in enumerate(sent)
            ]
        self._progress.advance(len(sent))

    async def _publish(
        self, connection: psycopg.AsyncConnection[Any]
    ) -> tuple[str, list[tuple[Key, Any, float]]]:
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
