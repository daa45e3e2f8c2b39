"""The writer: a busy café that commits orders all the time, and sometimes changes its mind."""

import asyncio
import random
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from examples.orderboard import orders

RATES_PER_S = (0, 1, 2, 5, 10, 20, 50, 100)
"""The steps of the page's slider: transactions per second."""

DEFAULT_RATE_PER_S = 10
ROLLED_BACK_SHARE = 0.15
CANCELLED_SHARE = 0.06
OPEN_ORDERS = 18
"""About how many orders the board holds."""
IN_FLIGHT_MAX = 8
SECOND_THOUGHTS_S = 0.25
"""Longest time that a transaction stays open before it rolls back: others commit meanwhile."""
ROLLED_BACK_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class RolledBack:
    """A change that was made and published, and then rolled back."""

    number: int
    """Counts from 1 in the order of the roll-backs."""
    change_id: int


class Writer:
    """Runs transactions at ``rate_per_s``, several at once."""

    def __init__(self, pool: AsyncConnectionPool, seed: int | None = None) -> None:
        self.rate_per_s = DEFAULT_RATE_PER_S
        self._pool = pool
        self._rng = random.Random(seed)
        self._rolled_back: deque[RolledBack] = deque(maxlen=ROLLED_BACK_KEPT)
        self._rolled_back_count = 0

    @property
    def rolled_back_count(self) -> int:
        """How many changes were rolled back since the start."""
        return self._rolled_back_count

    def rolled_back_since(self, number: int) -> list[int]:
        """The ids of the changes rolled back after the first ``number`` (the newest 10,000)."""
        return [entry.change_id for entry in self._rolled_back if entry.number > number]

    async def run(self, stop: asyncio.Event) -> None:
        """Write until ``stop`` is set; then let the open transactions end."""
        in_flight: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                await _pause(stop, self._next_pause_s())
                if self.rate_per_s and len(in_flight) < IN_FLIGHT_MAX:
                    task = group.create_task(self._transaction())
                    in_flight.add(task)
                    task.add_done_callback(in_flight.discard)

    def _next_pause_s(self) -> float:
        # Poisson arrivals, as guests come; looked at often enough for the slider to feel direct.
        rate = self.rate_per_s
        return min(self._rng.expovariate(rate), 2.0) if rate else 0.2

    async def _transaction(self) -> None:
        try:
            async with self._pool.connection() as conn:
                if self._rng.random() < ROLLED_BACK_SHARE:
                    await self._change_its_mind(conn)
                else:
                    await self._change(conn, await orders.count_open(conn))
        except (psycopg.OperationalError, PoolTimeout):
            # The database is away: nothing was committed, and the next transaction tries again.
            return

    def _change(
        self, conn: psycopg.AsyncConnection, open_orders: int
    ) -> Coroutine[Any, Any, orders.Change | None]:
        if self._rng.random() < OPEN_ORDERS / (OPEN_ORDERS + 3.0 * open_orders):
            return orders.place(conn, *orders.invent(self._rng))
        if self._rng.random() < CANCELLED_SHARE:
            return orders.cancel(conn)
        return orders.advance(conn)

    async def _change_its_mind(self, conn: psycopg.AsyncConnection) -> None:
        """Change an order and publish it as usual, wait a little, roll back."""
        change = None
        async with conn.transaction(force_rollback=True):
            change = await self._change(conn, await orders.count_open(conn))
            await asyncio.sleep(self._rng.uniform(0, SECOND_THOUGHTS_S))
        if change is not None:
            self._rolled_back_count += 1
            self._rolled_back.append(RolledBack(self._rolled_back_count, change.id))


async def _pause(stop: asyncio.Event, pause_s: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), pause_s)
    except TimeoutError:
        return
