"""Sequencing against a real server: every committed row once, in order, without a hole."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from gateway.embedded import EmbeddedPostgres
from outbox import sequence
from outbox.database import Connection, connect, open_pool
from outbox.errors import SchemaMismatch
from outbox.log import Log
from outbox.message import Message
from outbox.migrations import migrate
from outbox.sequence import Sequencer
from outbox.sharding import shard_of

SHARDS = range(16)
LIMIT = 500


class Bench:
    """Opens connections that are closed at the end of the test."""

    def __init__(self, dsn: str, stack: AsyncExitStack) -> None:
        self.dsn = dsn
        self._stack = stack

    async def connection(self) -> Connection:
        return await self._stack.enter_async_context(await connect(self.dsn))

    async def sequencer(self, **options: Any) -> Sequencer:
        return Sequencer(await self.connection(), **options)


@pytest.fixture
async def bench(migrated: str) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        yield Bench(migrated, stack)


async def publish(
    connection: Connection, room: str, payload: object = "1", tenant: str = "acme"
) -> None:
    await connection.execute("SELECT tidegate.publish(%s, %s, %s)", (tenant, room, str(payload)))


async def value(connection: Connection, statement: str, *parameters: object) -> Any:
    cursor = await connection.execute(statement.encode(), parameters or None)
    row = await cursor.fetchone()
    return None if row is None else row[0]


async def take(sequencer: Sequencer, limit: int = LIMIT) -> list[str]:
    """Payloads of one batch over all shards."""
    batch = await sequencer.batch(SHARDS, limit)
    return [message.payload.decode() for message in batch.messages]


async def drain(sequencer: Sequencer, limit: int = LIMIT) -> list[Message]:
    messages = []
    while (batch := await sequencer.batch(SHARDS, limit)).messages or batch.more:
        messages += batch.messages
    return messages


async def logged(dsn: str) -> list[Message]:
    """The whole log, ordered by shard and seq; checked to be dense."""
    pool = await open_pool(dsn, 1, 1, 5.0)
    try:
        log = Log(pool)
        _, heads = await log.heads()
        messages = []
        for shard, head in heads.items():
            after = 0
            while page := await log.span(shard, after, head, 1_000):
                messages += page
                after = page[-1].seq
            assert after == head
    finally:
        await pool.close()
    assert_dense(messages)
    return messages


def assert_dense(messages: Sequence[Message]) -> None:
    seqs = defaultdict(list)
    offsets = defaultdict(list)
    for message in messages:
        assert message.shard == shard_of(message.tenant, message.room, 16, 4)
        seqs[message.shard].append(message.seq)
        offsets[message.tenant, message.room].append(message.offset)
    for positions in [*seqs.values(), *offsets.values()]:
        assert positions == list(range(1, len(positions) + 1))


def other_shard(room: str) -> str:
    shard = shard_of("acme", room, 16, 4)
    return next(
        name
        for name in (f"other-{number}" for number in range(1_000))
        if shard_of("acme", name, 16, 4) != shard
    )


async def test_a_message_arrives_as_it_was_published(bench: Bench) -> None:
    writer, sequencer = await bench.connection(), await bench.sequencer()
    row = await writer.execute(
        """SELECT tidegate.publish('acme', 'orders:42', '{"a":\n 1}', '{"k": "v"}')::text"""
    )
    (txid,) = await row.fetchone() or ("",)
    row = await writer.execute(
        "SELECT (extract(epoch FROM created_at) * 1000000)::bigint FROM tidegate.outbox"
    )
    (created_us,) = await row.fetchone() or (0,)
    batch = await sequencer.batch(SHARDS, LIMIT)
    assert batch.epoch == await value(writer, "SELECT epoch FROM tidegate.meta")
    assert not batch.more
    (message,) = batch.messages
    assert message == Message(
        shard=shard_of("acme", "orders:42", 16, 4),
        seq=1,
        tenant="acme",
        room="orders:42",
        offset=1,
        batch=message.batch,
        txid=txid,
        tags={"k": "v"},
        payload=b'{"a":  1}',
        binary=False,
        created_us=created_us,
    )
    assert len(message.batch) == 16
    assert await logged(bench.dsn) == [message]
    assert await value(writer, "SELECT count(*) FROM tidegate.outbox") == 0
    assert (await sequencer.batch(SHARDS, LIMIT)).messages == []


@pytest.mark.parametrize("payload", [b"", b"\n\x00\xff", bytes(range(256)), bytes(1_048_576)])
async def test_bytes_arrive_as_they_are(bench: Bench, payload: bytes) -> None:
    writer, sequencer = await bench.connection(), await bench.sequencer()
    await writer.execute("SELECT tidegate.publish('acme', 'r', %b)", (payload,))
    (message,) = (await sequencer.batch(SHARDS, LIMIT)).messages
    assert (message.payload, message.binary, message.tags) == (payload, True, None)
    assert await logged(bench.dsn) == [message]


@pytest.mark.parametrize(
    "payload",
    [r'"\ud800"', r'"\u0000"', "1e400", "[" * 5_000 + "]" * 5_000, f'"{"x" * 1_048_574}"', "null"],
)
async def test_hard_json_disturbs_no_neighbour(bench: Bench, payload: str) -> None:
    writer, sequencer = await bench.connection(), await bench.sequencer()
    for text in ("1", payload, "2"):
        await publish(writer, "r", text)
    assert await take(sequencer) == ["1", payload, "2"]
    assert [m.payload.decode() for m in await logged(bench.dsn)] == ["1", payload, "2"]


async def test_a_lower_id_that_commits_later_comes_later(bench: Bench) -> None:
    slow, quick = await bench.connection(), await bench.connection()
    sequencer = await bench.sequencer()
    async with slow.transaction():
        await publish(slow, "r", '"slow"')
        await publish(quick, "r", '"quick"')
        assert await take(sequencer) == ['"quick"']
        assert await take(sequencer) == []
    assert await take(sequencer) == ['"slow"']
    assert [m.offset for m in await logged(bench.dsn)] == [1, 2]


INSERT_WITH_ID = """
    INSERT INTO tidegate.outbox (id, tenant, room, payload) OVERRIDING SYSTEM VALUE
    VALUES (%s, 'acme', 'r', '"late"')
"""
NEXT_ID = "SELECT nextval(pg_get_serial_sequence('tidegate.outbox', 'id'))"


@pytest.mark.parametrize("backlog", [False, True])
@pytest.mark.parametrize("transaction_known", [False, True])
async def test_a_lower_id_that_is_written_later_is_found(
    bench: Bench, backlog: bool, transaction_known: bool
) -> None:
    """An insert takes its id before its row and its transaction id exist."""
    late, quick = await bench.connection(), await bench.connection()
    sequencer = await bench.sequencer()
    reserved = await value(quick, NEXT_ID)
    async with late.transaction():
        if transaction_known:
            await value(late, "SELECT pg_current_xact_id()::text")
        for number in range(3):
            await publish(quick, "r", number)
        assert await take(sequencer, 1 if backlog else LIMIT) == (
            ["0"] if backlog else ["0", "1", "2"]
        )
        await late.execute(INSERT_WITH_ID, (reserved,))
        assert await take(sequencer, 1 if backlog else LIMIT) == (["1"] if backlog else [])
    assert await take(sequencer, 1 if backlog else LIMIT) == ['"late"']
    assert await take(sequencer) == (["2"] if backlog else [])
    assert_dense(await logged(bench.dsn))


async def test_holes_in_the_ids_are_irrelevant(bench: Bench) -> None:
    writer, sequencer = await bench.connection(), await bench.sequencer()
    for number in range(6):
        async with writer.transaction(force_rollback=number % 2 == 0):
            await publish(writer, "r", number)
    assert await take(sequencer, 2) == ["1", "3"]
    assert await take(sequencer, 2) == ["5"]
    assert_dense(await logged(bench.dsn))


async def test_a_row_that_somebody_removes_leaves_no_hole(bench: Bench) -> None:
    writer, sequencer = await bench.connection(), await bench.sequencer()
    for number in range(4):
        await publish(writer, "r", number)
    remover = await bench.connection()
    async with remover.transaction():
        await remover.execute("DELETE FROM tidegate.outbox WHERE payload::text = '1'")
        batch = asyncio.create_task(sequencer.batch(SHARDS, LIMIT))
        while not await value(
            writer, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        ):
            await asyncio.sleep(0.01)
    assert [message.payload for message in (await batch).messages] == [b"0", b"2", b"3"]
    assert_dense(await logged(bench.dsn))


async def test_subtransactions_belong_to_their_transaction(bench: Bench) -> None:
    writer, sequencer = await bench.connection(), await bench.sequencer()
    async with writer.transaction():
        await publish(writer, "r", 1)
        async with writer.transaction(force_rollback=True):
            await publish(writer, "r", 2)
        async with writer.transaction():
            await publish(writer, "r", 3)
        assert await take(sequencer) == []
    assert await take(sequencer) == ["1", "3"]


async def test_limits_starve_nobody(bench: Bench) -> None:
    writer, sequencer = await bench.connection(), await bench.sequencer()
    await writer.execute(
        "INSERT INTO tidegate.outbox (tenant, room, payload) "
        "SELECT 'acme', 'busy', to_json(i) FROM generate_series(1, 250) i"
    )
    await publish(writer, other_shard("busy"), '"quiet"')
    batch = await sequencer.batch(SHARDS, 100)
    assert batch.more
    by_room = defaultdict(list)
    for message in batch.messages:
        by_room[message.room].append(message.payload)
    assert by_room["busy"] == [b"%d" % number for number in range(1, 101)]
    assert by_room[other_shard("busy")] == [b'"quiet"']
    assert [len((await sequencer.batch(SHARDS, 100)).messages) for _ in range(3)] == [100, 50, 0]
    assert_dense(await logged(bench.dsn))


async def test_only_the_shards_asked_for_are_taken(bench: Bench) -> None:
    writer, sequencer = await bench.connection(), await bench.sequencer()
    other = other_shard("r")
    await publish(writer, "r", 1)
    await publish(writer, other, 2)
    batch = await sequencer.batch([shard_of("acme", other, 16, 4)], LIMIT)
    assert [message.room for message in batch.messages] == [other]
    assert await take(sequencer) == ["1"]


async def test_a_batch_has_bounded_bytes(bench: Bench) -> None:
    writer, sequencer = await bench.connection(), await bench.sequencer(limit_bytes=1_000_000)
    for digit in "12345":
        await publish(writer, "r", digit * 300_000)
    await publish(writer, "r", "6" * 1_048_576)
    await publish(writer, "r", "7")
    sizes = []
    while True:
        batch = await sequencer.batch(SHARDS, LIMIT)
        sizes.append([message.payload[:1] for message in batch.messages])
        if not batch.more:
            break
    # The message that crosses the limit still belongs to the batch.
    assert sizes == [[b"1", b"2", b"3", b"4"], [b"5", b"6"], [b"7"]]
    assert_dense(await logged(bench.dsn))


async def reads(connection: Connection) -> int:
    """Index entries of Tidegate's tables that statements on this server have stepped over."""
    await connection.execute("SELECT pg_stat_force_next_flush()")
    found = await value(
        connection,
        "SELECT sum(idx_tup_read)::bigint FROM pg_stat_all_indexes WHERE schemaname = 'tidegate'",
    )
    return int(found)


async def reads_of_a_batch(sequencer: Sequencer, writer: Connection, connection: Connection) -> int:
    await publish(writer, "r")
    before = await reads(connection)
    assert len(await take(sequencer)) == 1
    return await reads(connection) - before


async def test_dead_rows_under_an_old_snapshot_are_not_stepped_over(bench: Bench) -> None:
    writer, holder = await bench.connection(), await bench.connection()
    connection = await bench.connection()
    sequencer = Sequencer(connection)
    await reads_of_a_batch(sequencer, writer, connection)
    fresh = await reads_of_a_batch(sequencer, writer, connection)
    async with holder.transaction():
        await holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        await holder.execute("SELECT FROM tidegate.meta")
        await writer.execute(
            "INSERT INTO tidegate.outbox (tenant, room, payload) "
            "SELECT 'acme', 'r', to_json(i) FROM generate_series(1, 5000) i"
        )
        assert len(await drain(sequencer, 50)) == 5_000
        assert await reads_of_a_batch(sequencer, writer, connection) <= fresh + 5
        # What is remembered of one shard outlasts a look at others.
        await sequencer.batch([shard_of("acme", other_shard("r"), 16, 4)], LIMIT)
        assert await reads_of_a_batch(sequencer, writer, connection) <= fresh + 5
        # What a new relay does once.
        sequencer.forget()
        assert await reads_of_a_batch(sequencer, writer, connection) > fresh + 4_000
        assert await reads_of_a_batch(sequencer, writer, connection) <= fresh + 5


async def test_rows_of_a_long_transaction_are_not_stepped_over(bench: Bench) -> None:
    writer, bulk = await bench.connection(), await bench.connection()
    connection = await bench.connection()
    sequencer = Sequencer(connection)
    await reads_of_a_batch(sequencer, writer, connection)
    fresh = await reads_of_a_batch(sequencer, writer, connection)
    async with bulk.transaction():
        for _ in range(3):
            await bulk.execute(
                "INSERT INTO tidegate.outbox (tenant, room, payload) "
                "SELECT 'acme', 'r', '\"bulk\"' FROM generate_series(1, 1000) i"
            )
            await reads_of_a_batch(sequencer, writer, connection)
            assert await reads_of_a_batch(sequencer, writer, connection) <= fresh + 5
    assert len(await drain(sequencer)) == 3_000
    assert_dense(await logged(bench.dsn))


async def write(connection: Connection, name: str, seed: int, count: int) -> list[Any]:
    """Transactions of a writer: gives (begin of insert, end of commit, room, payload) of each row
    that was committed."""
    chance = random.Random(seed)
    committed = []
    for number in range(count):
        rooms = chance.choices([f"room-{n}" for n in range(8)], k=chance.randint(1, 3))
        rolls_back = chance.random() < 0.2
        rows = []
        async with connection.transaction(force_rollback=rolls_back):
            for part, room in enumerate(rooms):
                payload = f'"{name}-{number}-{part}"'
                rows.append((time.monotonic(), room, payload))
                await publish(connection, room, payload)
                await asyncio.sleep(chance.choice([0, 0.001, 0.01]))
        if not rolls_back:
            done = time.monotonic()
            committed += [(begun, done, room, payload) for begun, room, payload in rows]
    return committed


def assert_complete(messages: list[Message], committed: list[Any]) -> None:
    """Exactly what was committed; and A before B if A was committed before B was inserted."""
    positions = {message.payload.decode(): message for message in messages}
    assert len(positions) == len(messages)
    assert set(positions) == {payload for *_, payload in committed}
    by_room = defaultdict(list)
    for begun, done, room, payload in committed:
        assert positions[payload].room == room
        by_room[room].append((positions[payload].offset, begun, done))
    for rows in by_room.values():
        latest_begin = 0.0
        for _, begun, done in sorted(rows):
            assert done >= latest_begin, "committed before an insert that got a lower offset"
            latest_begin = max(latest_begin, begun)


async def test_many_writers_and_two_sequencers_on_the_same_shards(bench: Bench) -> None:
    writers = [await bench.connection() for _ in range(20)]
    writing = asyncio.gather(*(write(c, f"w{n}", n, 20) for n, c in enumerate(writers)))
    batches: list[Message] = []

    async def sequence_all(limit: int) -> None:
        sequencer = await bench.sequencer()
        while not writing.done():
            batches.extend((await sequencer.batch(SHARDS, limit)).messages)
        batches.extend(await drain(sequencer, limit))

    await asyncio.gather(sequence_all(3), sequence_all(LIMIT), writing)
    messages = await logged(bench.dsn)
    assert sorted(batches) == messages
    assert_complete(messages, list(chain(*await writing)))


async def test_killed_connections_lose_and_double_nothing(bench: Bench) -> None:
    writers = [await bench.connection() for _ in range(10)]
    writing = asyncio.gather(*(write(c, f"w{n}", n, 25) for n, c in enumerate(writers)))
    killer = await bench.connection()
    chance = random.Random(7)
    pids: list[int] = []
    kills = 0

    async def sequence_all() -> None:
        while True:
            connection = await connect(bench.dsn)
            pids.append(connection.info.backend_pid)
            try:
                sequencer = Sequencer(connection)
                while not writing.done():
                    await sequencer.batch(SHARDS, 20)
                await drain(sequencer)
                return
            except psycopg.OperationalError:
                continue
            finally:
                await connection.close()

    async def kill() -> None:
        nonlocal kills
        while not writing.done():
            await asyncio.sleep(chance.random() * 0.03)
            if pids:
                kills += await value(killer, "SELECT pg_terminate_backend(%s)", pids[-1])

    await asyncio.gather(sequence_all(), kill(), writing)
    assert kills > 3
    assert_complete(await logged(bench.dsn), list(chain(*await writing)))


async def test_cancelled_batches_lose_and_double_nothing(bench: Bench) -> None:
    writer = await bench.connection()
    chance = random.Random(11)
    for round_ in range(30):
        for number in range(5):
            await publish(writer, "r", f'"{round_}-{number}"')
        connection = await bench.connection()
        task = asyncio.create_task(Sequencer(connection).batch(SHARDS, 3))
        await asyncio.wait([task], timeout=chance.random() * 0.004)
        if not task.cancel():
            continue
        await asyncio.wait([task])
        if not connection.closed:  # then it is as good as new
            await Sequencer(connection).batch(SHARDS, 3)
    await drain(await bench.sequencer())
    payloads = [message.payload.decode() for message in await logged(bench.dsn)]
    assert payloads == [f'"{round_}-{number}"' for round_ in range(30) for number in range(5)]


async def test_after_an_error_the_connection_serves_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sequence._SETTINGS, "lock_timeout", "50ms")
    writer, holder = await bench.connection(), await bench.sequencer()
    sequencer = await bench.sequencer()
    await publish(writer, "r", 1)
    shard = shard_of("acme", "r", 16, 4)
    async with holder.hold([shard]) as (epoch, heads):
        assert heads == {shard: 0}
        assert epoch == await value(writer, "SELECT epoch FROM tidegate.meta")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await sequencer.batch(SHARDS, LIMIT)
        others = [other for other in SHARDS if other != shard]
        assert (await sequencer.batch(others, LIMIT)).messages == []
    assert await take(sequencer) == ["1"]


async def test_a_relay_that_stopped_reading_is_evicted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server holds the locks and waits for ever to hand over the rest of a large batch."""
    monkeypatch.setitem(sequence._SETTINGS, "lock_timeout", "200ms")
    writer, sequencer = await bench.connection(), await bench.sequencer()
    await publish(writer, "r", 1)
    with psycopg.connect(bench.dsn) as stopped:
        stopped.pgconn.send_query(
            b"BEGIN; SELECT FROM tidegate.shard FOR NO KEY UPDATE;"
            b"SELECT repeat('x', 100000) FROM generate_series(1, 1000)"
        )
        stopped.pgconn.flush()
        while not await value(
            writer, "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'ClientWrite'"
        ):
            await asyncio.sleep(0.01)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            async with sequencer.hold(SHARDS):
                pass
        assert await take(sequencer) == ["1"]
        stopped.close()


async def test_hold_keeps_others_waiting(bench: Bench) -> None:
    writer, holder = await bench.connection(), await bench.sequencer()
    sequencer = await bench.sequencer()
    await publish(writer, "r", 1)
    async with holder.hold(SHARDS):
        batch = asyncio.create_task(sequencer.batch(SHARDS, LIMIT))
        while not await value(
            writer, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        ):
            await asyncio.sleep(0.01)
        assert await value(writer, "SELECT count(*) FROM tidegate.outbox") == 1
    assert len((await batch).messages) == 1
    with pytest.raises(psycopg.errors.DivisionByZero):
        async with holder.hold(SHARDS):
            await holder._connection.execute("SELECT 1 / 0")
    async with holder.hold(SHARDS) as (_, heads):
        assert sum(heads.values()) == 1
    assert await take(holder) == []


async def test_a_new_epoch_is_seen_by_a_batch_that_waited_for_it(bench: Bench) -> None:
    writer, sequencer = await bench.connection(), await bench.sequencer()
    other = await bench.sequencer()
    await publish(writer, "r", 1)
    before = (await sequencer.batch(SHARDS, LIMIT)).epoch
    await publish(writer, "r", 2)
    changer = await bench.connection()
    async with changer.transaction():
        await changer.execute("SELECT FROM tidegate.shard FOR NO KEY UPDATE")
        batch = asyncio.create_task(other.batch(SHARDS, LIMIT))
        while not await value(
            writer, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        ):
            await asyncio.sleep(0.01)
        await changer.execute("UPDATE tidegate.meta SET epoch = repeat('0', 16)")
    assert (await batch).epoch == "0" * 16
    epoch = await sequencer.new_epoch()
    assert len({before, epoch, "0" * 16}) == 3
    assert (await other.batch(SHARDS, LIMIT)).epoch == epoch
    # Positions go on: an epoch is a new name for the same log.
    await publish(writer, "r", 3)
    (message,) = (await other.batch(SHARDS, LIMIT)).messages
    assert message.offset == 3


async def test_a_shard_that_does_not_exist(bench: Bench) -> None:
    sequencer = await bench.sequencer()
    with pytest.raises(SchemaMismatch, match="no shard 16"):
        await sequencer.batch([0, 16], LIMIT)
    assert await take(sequencer) == []


async def test_the_prelude_is_sent_along(bench: Bench) -> None:
    connection = await bench.connection()
    await connection.execute("SELECT pg_advisory_lock(1, 2)")
    await Sequencer(connection).batch(SHARDS, LIMIT, "SELECT pg_advisory_unlock_all()")
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
    assert await value(connection, held) == 0


async def test_a_missing_partition_is_made(bench: Bench) -> None:
    writer, sequencer = await bench.connection(), await bench.sequencer()
    cursor = await writer.execute(
        "SELECT inhrelid::regclass::text FROM pg_inherits "
        "WHERE inhparent = 'tidegate.message'::regclass"
    )
    for (name,) in await cursor.fetchall():
        await writer.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(*name.split("."))))
    await publish(writer, "r", 1)
    assert await take(sequencer) == ["1"]
    assert [m.payload for m in await logged(bench.dsn)] == [b"1"]


async def test_a_relay_needs_no_more_than_its_grants(bench: Bench) -> None:
    writer, connection = await bench.connection(), await bench.connection()
    await writer.execute("CREATE ROLE sequencing_relay")
    try:
        await writer.execute("SELECT tidegate.allow_relay('sequencing_relay')")
        await connection.execute("SET ROLE sequencing_relay")
        sequencer = Sequencer(connection)
        await publish(writer, "r", 1)
        await publish(writer, "r", 2)
        assert await take(sequencer, 1) == ["1"]
        assert await take(sequencer, 1) == ["2"]
        async with sequencer.hold(SHARDS) as (_, heads):
            assert sum(heads.values()) == 2
        assert await sequencer.new_epoch()
    finally:
        await connection.close()
        await writer.execute("DROP OWNED BY sequencing_relay")
        await writer.execute("DROP ROLE sequencing_relay")


async def test_prepared_transactions() -> None:
    with EmbeddedPostgres(settings={"max_prepared_transactions": "2"}) as server:
        migrate(server.dsn())
        async with AsyncExitStack() as stack:
            bench = Bench(server.dsn(), stack)
            writer, sequencer = await bench.connection(), await bench.sequencer()
            await writer.execute("BEGIN")
            await publish(writer, "r", '"prepared"')
            await writer.execute("PREPARE TRANSACTION 'one'")
            await publish(writer, "r", '"plain"')
            assert await take(sequencer) == ['"plain"']
            assert await take(sequencer) == []
            await writer.execute("COMMIT PREPARED 'one'")
            assert await take(sequencer) == ['"prepared"']
        assert len(await logged(server.dsn())) == 2


# A history is a list of steps (who, what): a writer inserts into a room, commits or rolls back;
# or a sequencer takes a batch with a limit. Small limits leave a backlog.
STEP = st.one_of(
    st.tuples(st.integers(0, 3), st.sampled_from(["insert a", "insert b", "insert c"])),
    st.tuples(st.integers(0, 3), st.sampled_from(["commit", "commit", "roll back"])),
    st.tuples(st.integers(0, 1), st.sampled_from(["take 1", "take 2", "take 500", "forget"])),
)


@pytest.fixture(scope="module")
def histories(postgres: EmbeddedPostgres, _template: str) -> Iterator[str]:
    """A database for all examples: what a sequencer remembers of one is the start of the next."""
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE histories")
        migrate(postgres.dsn("histories"))
        yield postgres.dsn("histories")
        connection.execute("DROP DATABASE histories WITH (FORCE)")


class Histories:
    """Runs histories against one database, one after the other."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.tenant = 0

    async def open(self) -> None:
        self.writers = [await connect(self.dsn) for _ in range(4)]
        self.sequencers = [Sequencer(await connect(self.dsn)) for _ in range(2)]
        self.connections = [*self.writers, *(s._connection for s in self.sequencers)]

    async def close(self) -> None:
        for connection in self.connections:
            await connection.close()

    async def run(self, steps: list[tuple[int, str]]) -> None:
        self.tenant += 1
        tenant = f"t{self.tenant}"
        open_rows: dict[int, list[tuple[int, str]]] = {}
        committed: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        got: list[Message] = []
        for at, (who, what) in enumerate([*steps, *((w, "commit") for w in range(4))]):
            verb, _, rest = what.partition(" ")
            if verb == "insert":
                if who not in open_rows:
                    await self.writers[who].execute("BEGIN")
                open_rows.setdefault(who, []).append((at, rest))
                await publish(self.writers[who], rest, at, tenant)
            elif verb in ("commit", "roll"):
                if who in open_rows:
                    await self.writers[who].execute("COMMIT" if verb == "commit" else "ROLLBACK")
                    for inserted_at, room in open_rows.pop(who):
                        if verb == "commit":
                            committed[room].append((inserted_at, at, str(inserted_at)))
            elif verb == "take":
                got += (await self.sequencers[who].batch(SHARDS, int(rest))).messages
            else:
                self.sequencers[who].forget()
        for sequencer in self.sequencers:
            got += await drain(sequencer)
        for room in {message.room for message in got} | set(committed):
            found = sorted(message.offset for message in got if message.room == room)
            assert found == list(range(1, len(committed[room]) + 1))
            order = {m.payload.decode(): m.offset for m in got if m.room == room}
            assert set(order) == {payload for *_, payload in committed[room]}
            for _, committed_at, first in committed[room]:
                for inserted_at, _, second in committed[room]:
                    if committed_at < inserted_at:
                        assert order[first] < order[second]


def test_any_history(histories: str) -> None:
    with asyncio.Runner() as runner:
        world = Histories(histories)
        runner.run(world.open())

        @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(STEP, max_size=40))
        def run(steps: list[tuple[int, str]]) -> None:
            runner.run(world.run(steps))

        try:
            run()
        finally:
            runner.run(world.close())
