"""What Postgres committed, for the page to hold against what it was sent.

The answer comes from the application's journal alone, by a way that no message takes. "What has
been committed since my last look" cannot be asked by id or by time: an id may be given out early
and committed late. It is asked by snapshot: the rows that this snapshot sees and the last did not.
"""

import re

from psycopg import AsyncConnection

SNAPSHOT = re.compile(r"\d{1,20}:\d{1,20}:(\d{1,20}(,\d{1,20}){0,999})?", re.ASCII)
"""The text form of a pg_snapshot: xmin, xmax, transactions in progress."""

COMMITTED = """
SELECT pg_current_snapshot()::text,
       coalesce(array_agg(id ORDER BY id), '{}')
  FROM order_change
 WHERE txid >= pg_snapshot_xmin(%(last)s::pg_snapshot)  -- for the index: all before was seen
   AND NOT pg_visible_in_snapshot(txid, %(last)s::pg_snapshot)
"""


async def committed_since(conn: AsyncConnection, last: str) -> tuple[str, list[int]]:
    """A new snapshot, and the ids of the changes that it sees and ``last`` does not.

    ``last`` is a text that matches ``SNAPSHOT``.
    """
    cursor = await conn.execute(COMMITTED, {"last": last})
    [(snapshot, changes)] = await cursor.fetchall()
    return snapshot, changes
