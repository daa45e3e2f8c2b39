"""What a page loads before it subscribes, and the position to subscribe from.

The pattern for every page that shows a state and then follows its changes:

1. Read the state **and** the position in one statement, so in one snapshot of the database.
2. Subscribe from that position (``since``): the gateway replays what came after it, then goes live.
3. Drop what the state already shows. The position counts messages that a relay has taken up; a
   change that committed a moment before the snapshot may get its offset a moment after it, so it
   is in the state and comes as a message too. Every message carries its transaction's id as the
   tag ``txid``, and the snapshot tells for each id whether it saw it: no clock, no guess.

A page that joins late so starts at its own moment, with no gap and nothing twice.
"""

from typing import Any

from psycopg import AsyncConnection
from psycopg.rows import dict_row

from examples.orderboard.orders import OPEN, ROOM, TENANT

BOARD = """
SELECT pg_current_snapshot()::text AS snapshot,
       (SELECT epoch FROM tidegate.meta) AS epoch,
       coalesce(
           (SELECT head FROM tidegate.room WHERE tenant = %(tenant)s AND name = %(room)s), 0
       ) AS "offset",
       coalesce(
           (SELECT json_agg(o ORDER BY o."order")
              FROM (SELECT id AS "order", customer, dish, status, version
                      FROM orders WHERE status = ANY(%(open)s)) o),
           '[]'
       ) AS orders
"""


async def load(conn: AsyncConnection) -> dict[str, Any]:
    """``snapshot`` (text of a pg_snapshot), ``epoch`` and ``offset`` of the room, ``orders``."""
    async with conn.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(BOARD, {"tenant": TENANT, "room": ROOM, "open": list(OPEN)})
        [row] = await cursor.fetchall()
    return row
