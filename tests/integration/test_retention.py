"""Retention: days are made ahead and dropped whole."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta

import pytest
from psycopg import sql

from outbox import retention
from outbox.database import Connection, connect
from outbox.retention import Maintenance, maintain
from outbox.sequence import Sequencer


@pytest.fixture
async def connection(migrated: str) -> AsyncIterator[Connection]:
    async with await connect(migrated) as connection:
        yield connection


async def partitions(connection: Connection) -> list[str]:
    cursor = await connection.execute(
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
        "WHERE i.inhparent = 'tidegate.message'::regclass ORDER BY 1"
    )
    return [name for (name,) in await cursor.fetchall()]


async def today(connection: Connection) -> date:
    cursor = await connection.execute("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date")
    row = await cursor.fetchone()
    day: date = row[0] if row else date.min
    return day


def name(day: date) -> str:
    return f"message_{day:%Y%m%d}"


async def make_old(connection: Connection, day: date) -> str:
    """A partition of a day that is over, with a message."""
    bounds = [datetime(d.year, d.month, d.day, tzinfo=UTC) for d in (day, day + timedelta(days=1))]
    await connection.execute(
        sql.SQL(
            "CREATE TABLE tidegate.{} PARTITION OF tidegate.message FOR VALUES FROM ({}) TO ({})"
        ).format(sql.Identifier(name(day)), *map(sql.Literal, bounds))
    )
    await connection.execute(
        'INSERT INTO tidegate.message (shard, seq, tenant, room, "offset", batch, txid, payload, '
        "size_bytes, created_at, sequenced_at) "
        "VALUES (0, 1, 't', 'r', 1, '', '1', '1', 1, %s, %s)",
        (bounds[0], bounds[0]),
    )
    return name(day)


async def test_days_are_made_ahead(connection: Connection) -> None:
    """Daily from today, each with its indexes, whatever the session's time zone."""
    await connection.execute("SET TimeZone = 'Pacific/Kiritimati'")
    await connection.execute("SET DateStyle = 'German'")
    first = await today(connection)
    assert await partitions(connection) == [name(first + timedelta(days=n)) for n in range(8)]
    assert await maintain(connection, 7, 7) == Maintenance(0, (), False)
    assert await maintain(connection, 7, 9) == Maintenance(2, (), False)
    await connection.execute("SET TimeZone = 'UTC'")
    await connection.execute("SET DateStyle = 'ISO'")
    cursor = await connection.execute(
        "SELECT c.relname, pg_get_expr(c.relpartbound, c.oid), "
        "(SELECT count(*) FROM pg_index x WHERE x.indrelid = c.oid AND x.indisunique) "
        "FROM pg_class c JOIN pg_inherits i ON c.oid = i.inhrelid "
        "WHERE i.inhparent = 'tidegate.message'::regclass ORDER BY 1"
    )
    days = [first + timedelta(days=n) for n in range(11)]
    assert await cursor.fetchall() == [
        (
            name(day),
            f"FOR VALUES FROM ('{day} 00:00:00+00') TO ('{days[n + 1]} 00:00:00+00')",
            2,
        )
        for n, day in enumerate(days[:-1])
    ]


async def test_what_is_older_is_dropped_and_nothing_else(connection: Connection) -> None:
    day = await today(connection)
    kept = await partitions(connection)
    for age in (9, 8, 100, 7):
        await make_old(connection, day - timedelta(days=age))
    done = await maintain(connection, 7, 7)
    expected = [name(day - timedelta(days=age)) for age in (100, 9, 8)]
    assert done == Maintenance(0, tuple(expected), False)
    assert await partitions(connection) == [name(day - timedelta(days=7)), *kept]
    # The room keeps its position, although its messages are gone.
    cursor = await connection.execute("SELECT count(*) FROM tidegate.message")
    assert await cursor.fetchone() == (1,)


async def test_a_table_that_somebody_attached_is_left_alone(connection: Connection) -> None:
    await connection.execute(
        "CREATE TABLE archive PARTITION OF tidegate.message "
        "FOR VALUES FROM ('2001-01-01') TO ('2002-01-01')"
    )
    assert (await maintain(connection, 1, 1)).dropped == ()


async def test_positions_go_on_after_a_drop(connection: Connection) -> None:
    async def publish() -> int:
        await connection.execute("SELECT tidegate.publish('t', 'r', '1')")
        (message,) = (await Sequencer(connection).batch(range(16), 10)).messages
        return message.offset

    assert await publish() == 1
    (current,) = [p for p in await partitions(connection) if p == name(await today(connection))]
    await connection.execute(sql.SQL("DROP TABLE tidegate.{}").format(sql.Identifier(current)))
    assert await publish() == 2


async def test_a_reader_is_not_waited_for_for_long(
    connection: Connection, migrated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "DROP_LOCK_TIMEOUT_MS", 20)
    monkeypatch.setattr(retention, "BACKOFF_S", 0.001)
    old = await make_old(connection, await today(connection) - timedelta(days=30))
    async with await connect(migrated) as reader:
        async with reader.transaction():
            await reader.execute("SELECT count(*) FROM tidegate.message")
            assert await maintain(connection, 7, 7) == Maintenance(0, (), True)
            assert old in await partitions(connection)
            # Sequencing goes on meanwhile.
            await connection.execute("SELECT tidegate.publish('t', 'r', '1')")
            assert len((await Sequencer(connection).batch(range(16), 10)).messages) == 1
        assert await maintain(connection, 7, 7) == Maintenance(0, (old,), False)


async def test_partitions_are_made_while_others_read_and_write(
    connection: Connection, migrated: str
) -> None:
    async with (
        await connect(migrated) as other,
        await connect(migrated) as relay,
        other.transaction(),
        Sequencer(relay).hold(range(16)),
        asyncio.timeout(3),
    ):
        await other.execute("SELECT tidegate.publish('t', 'r', '1')")
        await other.execute("SELECT count(*) FROM tidegate.message")
        assert await maintain(connection, 7, 8) == Maintenance(1, (), False)


async def test_several_at_once(connection: Connection, migrated: str) -> None:
    day = await today(connection)
    old = {await make_old(connection, day - timedelta(days=age)) for age in range(20, 26)}
    relays = [await connect(migrated) for _ in range(4)]
    try:
        done = await asyncio.gather(*(maintain(relay, 7, 9) for relay in relays))
        last = await maintain(connection, 7, 9)
    finally:
        for relay in relays:
            await relay.close()
    dropped = [part for result in [*done, last] for part in result.dropped]
    assert sorted(dropped) == sorted(old)
    assert sum(result.made for result in [*done, last]) == 2
    assert not last.postponed


async def test_a_relay_may_do_it(connection: Connection, migrated: str) -> None:
    old = await make_old(connection, await today(connection) - timedelta(days=30))
    await connection.execute("CREATE ROLE retention_relay")
    try:
        await connection.execute("SELECT tidegate.allow_relay('retention_relay')")
        async with await connect(migrated) as relay:
            await relay.execute("SET ROLE retention_relay")
            assert await maintain(relay, 7, 8) == Maintenance(1, (old,), False)
            # Partitions made by it serve everybody.
            await connection.execute("SELECT tidegate.publish('t', 'r', '1')")
            assert len((await Sequencer(relay).batch(range(16), 10)).messages) == 1
    finally:
        await connection.execute("DROP OWNED BY retention_relay")
        await connection.execute("DROP ROLE retention_relay")


@pytest.mark.parametrize(
    ("days", "message"),
    [((0, 7), "retention_days is 0, the least is 1"), ((7, 0), "ahead_days is 0, the least is 1")],
)
async def test_impossible_numbers(
    connection: Connection, days: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        await maintain(connection, *days)
