"""The application: orders, and the transactions that change and announce them.

Each function here runs inside a transaction of its caller and leaves the decision to commit or to
roll back to it. The message is published on the same connection, so it exists if and only if the
change does: there is nothing to keep in step, to retry or to clean up.
"""

import random
import time
from dataclasses import dataclass
from importlib import resources

from psycopg import AsyncConnection
from psycopg.rows import class_row

from publisher import publish_async

TENANT = "cafe"
ROOM = "orders:board"

NEXT_STATUS = {"received": "preparing", "preparing": "ready", "ready": "picked up"}
OPEN = tuple(NEXT_STATUS)

CUSTOMERS = (
    "Ada", "Alan", "Barbara", "Claude", "Donald", "Edsger", "Frances", "Grace", "Hedy", "Ivan",
    "Jean", "Katherine", "Leslie", "Margaret", "Niklaus", "Olga", "Radia", "Sophie", "Tim", "Vint",
)  # fmt: skip
DISHES = (
    "Flat white", "Espresso", "Cappuccino", "Green tea", "Lemonade", "Croissant", "Almond cake",
    "Bagel", "Shakshuka", "Ramen", "Falafel", "Tomato soup", "Pancakes", "Avocado toast",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Order:
    """A row of ``orders``."""

    id: int
    customer: str
    dish: str
    status: str
    version: int


@dataclass(frozen=True, slots=True)
class Change:
    """A row of ``order_change``: what one transaction did to one order."""

    id: int
    order: Order


async def create_tables(conn: AsyncConnection) -> None:
    """Make the tables if they are not there, and forget what is older than a day."""
    await conn.execute(resources.files(__package__).joinpath("orders.sql").read_bytes())
    await conn.execute("DELETE FROM order_change WHERE changed_at < now() - interval '1 day'")
    await conn.execute(
        "DELETE FROM orders WHERE changed_at < now() - interval '1 day' AND status <> ALL(%s)",
        [list(OPEN)],
    )


async def place(conn: AsyncConnection, customer: str, dish: str) -> Change:
    """Take a new order."""
    async with conn.cursor(row_factory=class_row(Order)) as cursor:
        await cursor.execute(
            "INSERT INTO orders (customer, dish) VALUES (%s, %s)"
            " RETURNING id, customer, dish, status, version",
            [customer, dish],
        )
        [order] = await cursor.fetchall()
    return await _announce(conn, order)


async def advance(conn: AsyncConnection) -> Change | None:
    """Move an open order to its next status; None if no order is open that nobody else changes."""
    order = await _take_open(conn)
    return await _change(conn, order, NEXT_STATUS[order.status]) if order else None


async def cancel(conn: AsyncConnection) -> Change | None:
    """Cancel an open order; None as in ``advance``."""
    order = await _take_open(conn)
    return await _change(conn, order, "cancelled") if order else None


async def count_open(conn: AsyncConnection) -> int:
    """How many orders are on the board."""
    cursor = await conn.execute("SELECT count(*) FROM orders WHERE status = ANY(%s)", [list(OPEN)])
    [(count,)] = await cursor.fetchall()
    return int(count)


def invent(rng: random.Random) -> tuple[str, str]:
    """A customer and a dish."""
    return rng.choice(CUSTOMERS), rng.choice(DISHES)


async def _take_open(conn: AsyncConnection) -> Order | None:
    # The older an order, the sooner it is served; SKIP LOCKED, since several transactions run at
    # once and each should find an order of its own.
    async with conn.cursor(row_factory=class_row(Order)) as cursor:
        await cursor.execute(
            "SELECT id, customer, dish, status, version FROM orders WHERE status = ANY(%s)"
            " ORDER BY changed_at + random() * interval '4 seconds' LIMIT 1"
            " FOR UPDATE SKIP LOCKED",
            [list(OPEN)],
        )
        return await cursor.fetchone()


async def _change(conn: AsyncConnection, order: Order, status: str) -> Change:
    async with conn.cursor(row_factory=class_row(Order)) as cursor:
        await cursor.execute(
            "UPDATE orders SET status = %s, version = version + 1, changed_at = clock_timestamp()"
            " WHERE id = %s RETURNING id, customer, dish, status, version",
            [status, order.id],
        )
        [changed] = await cursor.fetchall()
    return await _announce(conn, changed)


async def _announce(conn: AsyncConnection, order: Order) -> Change:
    """Note the change in the journal and publish it: both in the caller's transaction."""
    cursor = await conn.execute(
        "INSERT INTO order_change (order_id, status, version) VALUES (%s, %s, %s) RETURNING id",
        [order.id, order.status, order.version],
    )
    [(change_id,)] = await cursor.fetchall()
    change = Change(change_id, order)
    await publish_async(
        conn,
        ROOM,
        {
            "change": change.id,
            "order": order.id,
            "customer": order.customer,
            "dish": order.dish,
            "status": order.status,
            "version": order.version,
            "at_ms": round(time.time() * 1000),
        },
        tenant=TENANT,
    )
    return change
