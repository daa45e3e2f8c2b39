"""Retention: the log's partitions are made ahead of time and dropped when their day is over."""

import asyncio
import random
from dataclasses import dataclass
from typing import LiteralString

from psycopg import errors

from outbox.database import ADVISORY_CLASS, MAINTENANCE_KEY, Connection

DROP_LOCK_TIMEOUT_MS = 200
"""How long a drop may wait for its lock: sequencing and readers queue behind it."""
DROP_ATTEMPTS = 5
MAKE_LOCK_TIMEOUT_MS = 5_000
STATEMENT_TIMEOUT_MS = 60_000
BACKOFF_S = 0.5


@dataclass(frozen=True, slots=True)
class Maintenance:
    """What ``maintain`` has done."""

    made: int
    """New partitions."""
    dropped: tuple[str, ...]
    """Names of the partitions that are gone, oldest first."""
    postponed: bool
    """Whether another process was at it, or a reader would not let go: try again later."""


async def maintain(connection: Connection, retention_days: int, ahead_days: int) -> Maintenance:
    """Makes partitions for today and ``ahead_days`` more, drops those that have expired.

    Any number of relays may call it. A message is kept for at least ``retention_days`` (>= 1).

    Raises:
        ValueError: a number of days makes no sense.
        psycopg.Error: what a further attempt will not change by itself.
    """
    if retention_days < 1:
        raise ValueError(f"retention_days is {retention_days}, the least is 1")
    if ahead_days < 1:
        raise ValueError(f"ahead_days is {ahead_days}, the least is 1")
    made = await _alone(
        connection,
        "SELECT tidegate.make_partitions(%(days)s)",
        ahead_days,
        MAKE_LOCK_TIMEOUT_MS,
    )
    if made is None:
        return Maintenance(0, (), True)
    dropped: list[str] = []
    failures = 0
    while failures < DROP_ATTEMPTS:
        try:
            name = await _alone(
                connection,
                "SELECT coalesce(tidegate.drop_oldest_partition(%(days)s), '')",
                retention_days,
                DROP_LOCK_TIMEOUT_MS,
            )
        except (errors.LockNotAvailable, errors.DeadlockDetected):
            failures += 1
            await asyncio.sleep(random.uniform(0, BACKOFF_S * 2**failures))
            continue
        if name is None:
            break
        if name == "":
            return Maintenance(int(made), tuple(dropped), False)
        dropped.append(str(name))
    return Maintenance(int(made), tuple(dropped), True)


async def _alone(
    connection: Connection, statement: LiteralString, days: int, lock_timeout_ms: int
) -> int | str | None:
    """The statement's one value; None, without running it, while another process is at it."""
    async with connection.transaction():
        cursor = await connection.execute(
            "SELECT set_config('lock_timeout', %s, true), "
            "set_config('statement_timeout', %s, true), pg_try_advisory_xact_lock(%s, %s)",
            (
                f"{lock_timeout_ms}ms",
                f"{STATEMENT_TIMEOUT_MS}ms",
                ADVISORY_CLASS,
                MAINTENANCE_KEY,
            ),
        )
        row = await cursor.fetchone()
        if row is None or not row[2]:
            return None
        cursor = await connection.execute(statement, {"days": days})
        row = await cursor.fetchone()
        value: int | str | None = None if row is None else row[0]
        return value
