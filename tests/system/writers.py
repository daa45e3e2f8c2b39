"""Applications that commit messages, each in its own way, and remember what they committed."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.types.json import Json

from publisher import Message, RawJSON, publish_async, publish_many_async
from tests.oracle import Committed, Key
from tests.sdk.client import canonical
from tests.system.progress import Progress

ROLLBACK = 0.2
"""The share of transactions that roll back."""
SAVEPOINT = 0.1
"""The share of the others of which a part rolls back."""
MESSAGES_MAX = 5
PAUSE_S = 0.05
DAWDLE = 0.03
"""The share of transactions that take long to commit, so that many overtake them."""
DAWDLE_S = (0.2, 1.2)
LARGE = 0.05
TEXT = 'grüße "\\ \n€ 😀 '


def content(txid: str, data: Any) -> str:
    """What the oracle compares: a text that differs for any two messages."""
    return f"{txid} {canonical(data)}"


class Writer:
    """One connection that commits ``quota`` messages to random rooms."""

    def __init__(
        self, name: str, dsn: str, rooms: Sequence[Key], quota: int, seed: int, progress: Progress
    ) -> None:
        self.committed: list[Committed] = []
        self.rolled_back = 0
        self._name = name
        self._dsn = dsn
        self._rooms = rooms
        self._left = quota
        self._random = random.Random(seed)
        self._progress = progress
        self._transactions = 0
        self._messages = 0

    async def run(self) -> None:
        async with await psycopg.AsyncConnection.connect(
            self._dsn, autocommit=True, application_name=self._name
        ) as connection:
            while self._left:
                await self._transaction(connection)
                await asyncio.sleep(self._random.uniform(0, PAUSE_S))

    async def _transaction(self, connection: psycopg.AsyncConnection[Any]) -> None:
        pick = self._random
        self._transactions += 1
        count = min(pick.randint(1, MESSAGES_MAX), self._left)
        sent: list[tuple[Key, Any, float]] = []
        txid = ""
        undo = pick.random() < ROLLBACK
        async with connection.transaction(force_rollback=undo):
            while len(sent) < count:
                if pick.random() < SAVEPOINT:
                    async with connection.transaction(force_rollback=True):
                        await self._publish(connection, 1)
                        self.rolled_back += 1
                many = pick.randint(1, count - len(sent))
                txid, messages = await self._publish(connection, many)
                sent += messages
                await asyncio.sleep(pick.uniform(0, PAUSE_S / 4))
            if pick.random() < DAWDLE:
                await asyncio.sleep(pick.uniform(*DAWDLE_S))
        committed_at = time.monotonic()
        if undo:
            self.rolled_back += len(sent)
            return
        self.committed += [
            Committed(
                key,
                content(txid, data),
                f"{self._name}-{self._transactions}",
                index,
                inserted_at,
                committed_at,
            )
            for index, (key, data, inserted_at) in enumerate(sent)
        ]
        self._left -= len(sent)
        self._progress.advance(len(sent))

    async def _publish(
        self, connection: psycopg.AsyncConnection[Any], count: int
    ) -> tuple[str, list[tuple[Key, Any, float]]]:
        """Insert messages in one of the ways that there are."""
        pick = self._random
        now = time.monotonic()
        messages = [(pick.choice(self._rooms), self._data(), now) for _ in range(count)]
        if count > 1:
            txid = await publish_many_async(
                connection,
                [Message(room, data, tenant=tenant) for (tenant, room), data, _ in messages],
            )
            return txid, messages
        ((tenant, room), data, _) = messages[0]
        match pick.randrange(4):
            case 0:
                txid = await publish_async(connection, room, data, tenant=tenant)
            case 1:
                raw = RawJSON(json.dumps(data, indent=1))
                txid = await publish_async(connection, room, raw, tenant=tenant)
            case 2:
                txid = await self._row(
                    connection,
                    "SELECT tidegate.publish(%s, %s, %s::json)::text",
                    (tenant, room, Json(data)),
                )
            case _:
                txid = await self._row(
                    connection,
                    "INSERT INTO tidegate.outbox (tenant, room, payload) VALUES (%s, %s, %s) "
                    "RETURNING pg_current_xact_id()::text",
                    (tenant, room, Json(data)),
                )
        return txid, messages

    @staticmethod
    async def _row(
        connection: psycopg.AsyncConnection[Any], sql: str, parameters: Sequence[Any]
    ) -> str:
        row = await (await connection.execute(sql, parameters)).fetchone()
        assert row is not None
        return str(row[0])

    def _data(self) -> dict[str, Any]:
        self._messages += 1
        size = 20_000 if self._random.random() < LARGE else self._random.randint(0, 300)
        text = (TEXT * (size // len(TEXT) + 1))[:size]
        return {"id": f"{self._name}-{self._messages}", "text": text}
