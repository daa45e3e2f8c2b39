"""How Postgres stands, for operators: heads, and what waits in the outbox."""

from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection

from outbox.layout import Layout, layout


@dataclass(frozen=True, slots=True)
class ShardOverview:
    """One shard as Postgres has it."""

    head: int
    """The last seq given."""
    waiting: int
    """Committed rows that no relay has sequenced yet."""
    oldest_s: float | None
    """Age of the oldest of them, in seconds; None if none waits."""


@dataclass(frozen=True, slots=True)
class Overview:
    """All shards in one snapshot."""

    layout: Layout
    shards: dict[int, ShardOverview]


# Read after the layout, so the epoch can only be older than the heads.
STATEMENT = """
    SELECT shard.id, shard.head, coalesce(waiting.count, 0),
           extract(epoch FROM clock_timestamp() - waiting.oldest)::float8
    FROM tidegate.shard
    LEFT JOIN (SELECT shard, count(*), min(created_at) AS oldest
               FROM tidegate.outbox GROUP BY shard) AS waiting ON waiting.shard = shard.id
    ORDER BY shard.id
"""


async def overview(connection: AsyncConnection[Any]) -> Overview:
    """Raises SchemaMismatch as ``layout`` does, and psycopg.Error."""
    found = await layout(connection)
    cursor = await connection.execute(STATEMENT)
    return Overview(
        found,
        {
            shard: ShardOverview(head, waiting, oldest_s)
            for shard, head, waiting, oldest_s in await cursor.fetchall()
        },
    )
