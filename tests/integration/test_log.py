"""Reading the log: pages with the position that they are true for."""

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from outbox.database import Connection, Pool, connect, open_pool
from outbox.errors import OutboxError, PostgresUnavailable, SchemaMismatch
from outbox.head import RoomHead
from outbox.log import Log, LogPage
from outbox.sequence import Sequencer
from outbox.sharding import shard_of
from tests import probe
from tests.chaos.proxy import Link

TENANT = "acme"
ROOM = "orders:42"
SHARD = shard_of(TENANT, ROOM, 16, 4)


@pytest.fixture
async def pool(migrated: str) -> AsyncIterator[Pool]:
    pool = await open_pool(migrated, 1, 2, 5.0)
    yield pool
    await pool.close()


@pytest.fixture
def log(pool: Pool) -> Log:
    return Log(pool)


@pytest.fixture
async def connection(migrated: str) -> AsyncIterator[Connection]:
    async with await connect(migrated) as connection:
        yield connection


async def fill(connection: Connection, count: int, size: int = 1, first: int = 1) -> None:
    await connection.execute(
        "INSERT INTO tidegate.outbox (tenant, room, payload) "
        "SELECT %s, %s, to_json(repeat('x', %s) || i) FROM generate_series(%s::int, %s) i",
        (TENANT, ROOM, size, first, first + count - 1),
    )
    await Sequencer(connection).batch(range(16), 100_000)


async def page(log: Log, after: int, limit: int, **options: int) -> LogPage:
    return await log.page(TENANT, ROOM, SHARD, after, limit, **options)


def offsets(page: LogPage) -> list[int]:
    return [message.offset for message in page.messages]


async def test_a_room_that_never_had_a_message(log: Log, connection: Connection) -> None:
    found = await page(log, 0, 10)
    cursor = await connection.execute("SELECT epoch FROM tidegate.meta")
    (epoch,) = await cursor.fetchone() or ("",)
    assert found == LogPage(epoch, seq=0, head=0, first=1, messages=())
    assert await log.latest(TENANT, ROOM, SHARD, 10) == found


async def test_pages(log: Log, connection: Connection) -> None:
    await fill(connection, 25)
    first = await page(log, 0, 10)
    assert (first.seq, first.head, first.first) == (25, 25, 1)
    assert offsets(first) == list(range(1, 11))
    assert [m.payload for m in first.messages] == [b'"x%d"' % n for n in range(1, 11)]
    assert offsets(await page(log, 10, 10)) == list(range(11, 21))
    assert offsets(await page(log, 20, 10)) == list(range(21, 26))
    for nothing in [await page(log, 25, 10), await page(log, 99, 10), await page(log, 3, 0)]:
        assert nothing == LogPage(first.epoch, 25, 25, 1, ())


async def test_another_room_of_the_tenant_is_not_in_it(log: Log, connection: Connection) -> None:
    await fill(connection, 2)
    await connection.execute("SELECT tidegate.publish('acme', 'orders:4', '1')")
    await connection.execute("SELECT tidegate.publish('acme2', 'orders:42', '1')")
    await Sequencer(connection).batch(range(16), 10)
    assert offsets(await page(log, 0, 10)) == [1, 2]
    assert (await log.page("acme2", ROOM, shard_of("acme2", ROOM, 16, 4), 0, 10)).head == 1


async def test_latest(log: Log, connection: Connection) -> None:
    await fill(connection, 25)
    assert offsets(await log.latest(TENANT, ROOM, SHARD, 3)) == [23, 24, 25]
    assert offsets(await log.latest(TENANT, ROOM, SHARD, 99)) == list(range(1, 26))
    assert offsets(await log.latest(TENANT, ROOM, SHARD, 0)) == []
    assert offsets(await log.latest(TENANT, ROOM, SHARD, 9, limit_bytes=10)) == [24, 25]


async def test_bytes_are_bounded(log: Log, connection: Connection) -> None:
    await fill(connection, 5, size=300_000)
    assert offsets(await page(log, 0, 10, limit_bytes=1_000_000)) == [1, 2, 3, 4]
    assert offsets(await page(log, 4, 10, limit_bytes=1_000_000)) == [5]
    assert offsets(await page(log, 0, 10, limit_bytes=1)) == [1]
    assert offsets(await log.latest(TENANT, ROOM, SHARD, 10, limit_bytes=400_000)) == [4, 5]
    span = await log.span(SHARD, 0, 5, 10, limit_bytes=400_000)
    assert [message.seq for message in span] == [1, 2]


async def test_spans(log: Log, connection: Connection) -> None:
    await fill(connection, 25)
    for after, until, limit, expected in [
        (0, 25, 100, range(1, 26)),
        (3, 7, 100, range(4, 8)),
        (3, 25, 2, range(4, 6)),
        (7, 7, 100, range(0)),
        (25, 99, 100, range(0)),
    ]:
        found = await log.span(SHARD, after, until, limit)
        assert [message.seq for message in found] == list(expected)
    (message,) = await log.span(SHARD, 4, 5, 1)
    assert message == (await page(log, 4, 1)).messages[0]


async def test_heads(log: Log, connection: Connection) -> None:
    await fill(connection, 3)
    epoch, heads = await log.heads()
    assert epoch == (await page(log, 0, 1)).epoch
    assert heads == {shard: 3 if shard == SHARD else 0 for shard in range(16)}


async def dropped(connection: Connection, retained: int) -> None:
    """As if retention had dropped what is older than the newest ``retained`` messages."""
    await connection.execute(
        'DELETE FROM tidegate.message WHERE "offset" <= (SELECT max(head) FROM tidegate.room) - %s',
        (retained,),
    )


async def test_what_retention_has_dropped_is_told(log: Log, connection: Connection) -> None:
    await fill(connection, 25)
    await dropped(connection, 5)
    for after in (0, 19):
        found = await page(log, after, 10)
        assert (found.head, found.first, offsets(found)) == (25, 21, [])
    assert offsets(await page(log, 20, 10)) == [21, 22, 23, 24, 25]
    assert offsets(await log.latest(TENANT, ROOM, SHARD, 10)) == [21, 22, 23, 24, 25]
    # A span begins with what is left.
    assert [m.seq for m in await log.span(SHARD, 0, 25, 3)] == [21, 22, 23]
    await dropped(connection, 0)
    found = await page(log, 20, 10)
    assert (found.seq, found.head, found.first, found.messages) == (25, 25, 26, ())
    assert await log.latest(TENANT, ROOM, SHARD, 10) == found
    assert await log.span(SHARD, 0, 25, 3) == []


async def test_a_hole_is_never_papered_over(log: Log, connection: Connection) -> None:
    await fill(connection, 9)
    await connection.execute('DELETE FROM tidegate.message WHERE "offset" IN (4, 5)')
    assert offsets(await page(log, 1, 10)) == [2, 3]
    found = await page(log, 3, 10)
    assert (found.first, offsets(found)) == (6, [])
    assert offsets(await page(log, 5, 10)) == [6, 7, 8, 9]
    assert offsets(await log.latest(TENANT, ROOM, SHARD, 10)) == [6, 7, 8, 9]
    assert [m.seq for m in await log.span(SHARD, 1, 9, 10)] == [2, 3]
    assert [m.seq for m in await log.span(SHARD, 3, 9, 10)] == [6, 7, 8, 9]


async def test_days_are_one_log(log: Log, connection: Connection) -> None:
    """The messages of a room lie in several partitions."""
    await fill(connection, 6)
    await connection.execute(
        "UPDATE tidegate.message SET sequenced_at = sequenced_at + seq / 3 * interval '1 day'"
    )
    cursor = await connection.execute("SELECT count(DISTINCT tableoid) FROM tidegate.message")
    assert await cursor.fetchone() == (3,)
    assert offsets(await page(log, 1, 4)) == [2, 3, 4, 5]
    assert offsets(await log.latest(TENANT, ROOM, SHARD, 4)) == [3, 4, 5, 6]
    assert [m.seq for m in await log.span(SHARD, 1, 6, 9)] == [2, 3, 4, 5, 6]


async def test_an_answer_is_one_snapshot(log: Log, migrated: str, connection: Connection) -> None:
    """While the relay works: the page always reaches the head that it tells, and the head of the
    only room is that of the shard."""

    async def write() -> None:
        sequencer = Sequencer(connection)
        for number in range(150):
            await connection.execute(
                "SELECT tidegate.publish(%s, %s, %s)", (TENANT, ROOM, str(number))
            )
            await sequencer.batch(range(16), 10)

    writing = asyncio.create_task(write())
    seen = set()
    while not writing.done():
        found = await page(log, 0, 1_000)
        assert found.seq == found.head == len(found.messages)
        newest = await log.latest(TENANT, ROOM, SHARD, 5)
        assert newest.seq == newest.head
        assert not newest.messages or newest.messages[-1].offset == newest.head
        seen.add(found.head)
    await writing
    assert len(seen) > 3


async def test_a_shard_that_does_not_exist(log: Log) -> None:
    with pytest.raises(SchemaMismatch, match="no shard 16"):
        await log.page(TENANT, ROOM, 16, 0, 10)


async def test_a_database_without_the_schema(database: str) -> None:
    pool = await open_pool(database, 1, 1, 5.0)
    with pytest.raises(SchemaMismatch, match="run `tidegate migrate`"):
        await Log(pool).heads()
    await pool.close()


async def test_an_answer_that_does_not_come(pool: Pool, connection: Connection) -> None:
    async with connection.transaction():
        await connection.execute("LOCK TABLE tidegate.meta")
        with pytest.raises(PostgresUnavailable, match="does not answer in time"):
            await Log(pool, timeout_s=0.05).heads()
    # The connection that waited was cleaned or replaced.
    assert (await Log(pool).heads())[1][0] == 0


async def test_a_killed_connection(log: Log, pool: Pool, connection: Connection) -> None:
    """The read is made again on another one."""
    async with connection.transaction():
        await connection.execute("LOCK TABLE tidegate.meta")
        reading = asyncio.create_task(log.heads())
        blocked = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND pid <> %s"
        while not (row := await (await connection.execute(blocked, (0,))).fetchone()):
            await asyncio.sleep(0.01)
        await connection.execute("SELECT pg_terminate_backend(%s)", row)
    assert (await reading)[1]
    await log.heads()


async def test_connections_that_hang_are_replaced_together(migrated: str) -> None:
    """Whoever comes after a late answer need not find out about each connection of the pool."""
    port = int(conninfo_to_dict(migrated)["port"] or 0)
    async with Link("log", port) as link:
        pool = await open_pool(make_conninfo(migrated, port=link.port), 4, 4, 5.0)
        await pool.wait()
        before = link.connections
        link.half_open()
        waiting = asyncio.create_task(Log(pool).heads())
        await probe.until(lambda: link.connections > before, "an answer is late")
        async with asyncio.timeout(2):
            await Log(pool).heads()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await pool.close(0)


async def test_a_closed_pool(log: Log, pool: Pool) -> None:
    await pool.close()
    with pytest.raises(PostgresUnavailable, match="are closed"):
        await log.heads()


async def test_a_server_that_is_not_there() -> None:
    with pytest.raises(PostgresUnavailable) as caught:
        await open_pool("host=127.0.0.1 port=1 user=u password=s3cret dbname=d", 1, 1, 1.0)
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_missing_rights_are_said(migrated: str, connection: Connection) -> None:
    with psycopg.connect(migrated, autocommit=True) as admin:
        admin.execute("CREATE ROLE log_reader LOGIN PASSWORD 'x'")
    pool = await open_pool(migrated, 1, 1, 5.0)
    try:
        async with pool.connection() as reader:
            await reader.execute("SET ROLE log_reader")
        with pytest.raises(OutboxError, match="permission denied for schema tidegate"):
            await Log(pool).heads()
        await connection.execute("SELECT tidegate.allow_gateway('log_reader')")
        assert (await page(Log(pool), 0, 1)).head == 0
    finally:
        await pool.close()
        await connection.execute("DROP OWNED BY log_reader")
        await connection.execute("DROP ROLE log_reader")


async def test_where_many_rooms_stand_is_one_statement(log: Log, connection: Connection) -> None:
    await fill(connection, 7)
    rooms = [(shard_of(TENANT, f"idle:{n}", 16, 4), TENANT, f"idle:{n}") for n in range(300)]
    rooms.insert(5, (SHARD, TENANT, ROOM))
    epoch, heads = await log.room_heads(rooms)
    state = await page(log, 0, 0)
    assert epoch == state.epoch
    assert heads[5] == RoomHead(7, state.seq)
    assert [head.offset for head in heads].count(0) == 300
    _, shards = await log.heads()
    assert [head.seq for head in heads] == [shards[shard] for shard, _, _ in rooms]
    assert await log.room_heads([]) == (epoch, ())
    with pytest.raises(SchemaMismatch, match="shard 77"):
        await log.room_heads([(SHARD, TENANT, ROOM), (77, TENANT, ROOM)])
