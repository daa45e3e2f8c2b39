"""What writers and other users of the database do: it delays their own messages at most."""

import asyncio
import importlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest
import pytest_asyncio

from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
from publisher import publish_async
from tests.chaos.cluster import POSTGRES_SETTINGS, Cluster
from tests.chaos.trial import Trial, within
from tests.oracle import Key
from tests.pgbouncer import pgbouncer
from tests.processes import Processes

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

POLLING = "doorbell is off: polling"
PROMPTLY_S = 20.0
"""Far below the time for which the transactions are held."""


async def test_many_writers_with_roll_backs_and_delays(trial: Trial, cluster: Cluster) -> None:
    """And a relay killed in the middle."""
    await trial.arrive(4)
    trial.write(50, pause_s=0.3)
    await trial.written(300)
    await asyncio.to_thread(cluster.relays[0].kill)
    await trial.written(300)
    await asyncio.to_thread(cluster.relays[0].restart)
    await trial.written(300)
    await trial.must_be_good()


async def test_transactions_that_stay_open(
    trial: Trial, cluster: Cluster, other_database: str
) -> None:
    """One that has inserted, one that holds a snapshot, an idle one, one in another database."""
    await trial.arrive(4)
    async with (
        await psycopg.AsyncConnection.connect(cluster.dsn) as inserted,
        await psycopg.AsyncConnection.connect(cluster.dsn) as snapshot,
        await psycopg.AsyncConnection.connect(cluster.dsn) as idle,
        await psycopg.AsyncConnection.connect(other_database) as elsewhere,
    ):
        tenant, room = trial.rooms[0]
        await inserted.execute("SELECT tidegate.publish(%s, %s, '{}')", (tenant, room))
        await snapshot.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        await snapshot.execute("SELECT FROM tidegate.outbox")
        await idle.execute("SELECT pg_current_xact_id()")
        await elsewhere.execute("CREATE TABLE something (id int)")
        for _ in range(10):
            await trial.publish(*trial.rooms)
            await trial.delivered(PROMPTLY_S)
        trial.write()
        await trial.written(50)
        await trial.delivered(PROMPTLY_S)
        await inserted.rollback()
        await elsewhere.rollback()
    await trial.must_be_good()


async def test_a_lower_id_whose_transaction_id_comes_late(trial: Trial, cluster: Cluster) -> None:
    """The id is drawn, others commit and are delivered, and only then the row is written."""
    await trial.arrive(2)
    for _ in range(3):
        ((drawn,),) = await cluster.sql(
            "SELECT nextval(pg_get_serial_sequence('tidegate.outbox', 'id'))"
        )
        await trial.publish(*trial.rooms)
        await trial.delivered(PROMPTLY_S)
        key, data, inserted_at = trial.rooms[0], {"drawn": drawn}, time.monotonic()
        ((txid,),) = await cluster.sql(
            "INSERT INTO tidegate.outbox (id, tenant, room, payload) "
            "OVERRIDING SYSTEM VALUE VALUES (%s, %s, %s, %s) RETURNING pg_current_xact_id()::text",
            (drawn, *key, json.dumps(data)),
        )
        trial.record(txid, [(key, data)], inserted_at)
        await trial.delivered(PROMPTLY_S)
    await trial.must_be_good()


async def test_prepared_transactions(tmp_path: Path, seed: int) -> None:
    """The bell is off where PREPARE TRANSACTION is allowed; relays poll, and say so once.

    Prepared transactions outlive the writers' connections, a relay and a crash of the server.
    """
    with EmbeddedPostgres(settings=POSTGRES_SETTINGS) as postgres, EmbeddedRedis() as redis:
        importlib.import_module("outbox.migrations").migrate(postgres.dsn())
        async with Cluster(tmp_path / "processes", postgres, postgres.dsn(), redis) as cluster:
            trial = Trial(cluster, seed)
            try:
                await polling(cluster)
                await trial.arrive(4)
                trial.two_phases.allowed = True
                trial.write(6)
                await trial.written(50)
                await trial.publish(*trial.rooms)
                await prepare(trial, "held")
                await trial.written(100)
                await trial.delivered(PROMPTLY_S)
                await asyncio.to_thread(cluster.relays[0].kill)
                await trial.written(50)
                await asyncio.to_thread(cluster.relays[0].restart)
                assert cluster.logged(POLLING, cluster.relays[1:]) == 1
                late = await prepare(trial, "late")
                await asyncio.to_thread(cluster.postgres.kill)
                await asyncio.to_thread(cluster.postgres.restart)
                await trial.written(100)
                await trial.delivered()
                await cluster.sql("ROLLBACK PREPARED 'held'")
                await cluster.sql("COMMIT PREPARED 'late'")
                trial.record(*late)
                await trial.written(50)
                await trial.must_be_good()
                assert trial.two_phases.prepared > 20
            finally:
                await trial.close()
        cluster.processes.check_logs()


async def polling(cluster: Cluster) -> None:
    """Waits until each relay has said so."""

    async def said() -> bool:
        return all(cluster.logged(POLLING, [relay]) for relay in cluster.relays)

    assert await within(60, said)


async def prepare(trial: Trial, name: str) -> tuple[str, list[tuple[Key, dict[str, str]]], float]:
    """A prepared transaction with a message, as ``record`` wants to know of it."""
    key, data, inserted_at = trial.rooms[0], {"id": name}, time.monotonic()
    async with await psycopg.AsyncConnection.connect(trial.cluster.dsn) as connection:
        tenant, room = key
        txid = await publish_async(connection, room, data, tenant=tenant)
        await connection.execute(f"PREPARE TRANSACTION '{name}'".encode())
    return txid, [(key, data)], inserted_at


PORTIONS = (10_000, 80_000, 10_000)
ENTRIES_MAX = 20
"""Of indexes, read per message. Each row is found by one, and one that is not committed yet by some
more looks. A relay that looks at dead rows again reads 90 in the first portion, 850 in the last."""
TRANSACTION = 250
STATISTICS_S = 1.2


@dataclass(frozen=True, slots=True)
class Read:
    """What Postgres has read of the outbox so far, by its own counters."""

    entries: int
    """Of indexes."""
    buffers: int
    """Pages of table and indexes, in memory or not."""


async def test_a_snapshot_held_while_100_000_messages_pass(
    migrated: str, redis_url: str, processes: Processes
) -> None:
    """The rows that a batch reads stay as few as they were, however many dead ones there are."""
    processes.start_relay("relay", TIDEGATE_POSTGRES_DSN=migrated, TIDEGATE_REDIS_URL=redis_url)
    portions: list[str] = []
    entries: list[float] = []
    async with (
        await psycopg.AsyncConnection.connect(migrated, autocommit=True) as writer,
        await psycopg.AsyncConnection.connect(migrated) as holder,
    ):

        async def number(statement: LiteralString) -> int:
            row = await (await writer.execute(statement)).fetchone()
            assert row is not None
            return int(row[0])

        async def read() -> Read:
            return Read(
                await number(
                    "SELECT sum(idx_tup_read)::bigint FROM pg_stat_all_indexes "
                    "WHERE relid = 'tidegate.outbox'::regclass"
                ),
                await number(
                    "SELECT heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit "
                    "FROM pg_statio_all_tables WHERE relid = 'tidegate.outbox'::regclass"
                ),
            )

        await holder.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        await holder.execute("SELECT FROM tidegate.meta")
        before, sent = Read(0, 0), 0
        for portion in PORTIONS:
            began = time.monotonic()
            for _ in range(portion // TRANSACTION):
                await writer.execute(
                    "SELECT count(tidegate.publish('acme', 'room-' || i %% 40, to_json(i))) "
                    "FROM generate_series(1, %s) i",
                    (TRANSACTION,),
                )
            sent += portion

            async def counted() -> bool:
                """Whether the statistics know of all that the relay did. Its server tells them at
                the end of a transaction, but no more often than once in a second."""
                nonlocal sent
                deadline = time.monotonic() + STATISTICS_S
                while time.monotonic() < deadline:
                    deleted = await number(
                        "SELECT n_tup_del FROM pg_stat_all_tables "
                        "WHERE relid = 'tidegate.outbox'::regclass"
                    )
                    if deleted == sent:
                        return True
                    await asyncio.sleep(0.05)
                await writer.execute("SELECT tidegate.publish('acme', 'room-0', '{}')")
                sent += 1
                return False

            assert await within(90, counted)
            now, took_s = await read(), time.monotonic() - began
            entries.append((now.entries - before.entries) / portion)
            portions.append(
                f"{portion:6} messages: {entries[-1]:.2f} index entries and "
                f"{(now.buffers - before.buffers) / portion:.1f} buffers per message, "
                f"{took_s * 1000 / portion:.2f} ms"
            )
            before = now
        await holder.rollback()
    print("\n".join(["of the outbox, while a snapshot is held:", *portions]))
    # Time is only shown: it is that of the machine.
    assert max(entries) < ENTRIES_MAX, portions


async def test_pgbouncer_between_publishers_and_postgres(
    cluster: Cluster, seed: int, require: Callable[[str], str]
) -> None:
    with pgbouncer(require("pgbouncer"), cluster.dsn) as pooled:
        trial = Trial(cluster, seed, dsn=pooled)
        try:
            await trial.arrive(4)
            trial.write(12, pause_s=0.2)
            await trial.written(300)
            await trial.delivered()
            await trial.must_be_good()
        finally:
            await trial.close()


@pytest_asyncio.fixture(loop_scope="session")
async def without_relays(cluster: Cluster) -> AsyncIterator[Cluster]:
    """The cluster, whose relays leave the database to others."""
    for relay in cluster.relays:
        await asyncio.to_thread(relay.stop)
    yield cluster
    for relay in cluster.relays:
        await asyncio.to_thread(relay.restart)


async def test_pgbouncer_between_all_processes_and_postgres(
    without_relays: Cluster, tmp_path: Path, seed: int, require: Callable[[str], str]
) -> None:
    """Relays poll, and say so once. Every other promise holds."""
    postgres, dsn = without_relays.postgres, without_relays.dsn
    with EmbeddedRedis() as redis, pgbouncer(require("pgbouncer"), dsn, servers=12) as pooled:
        async with Cluster(tmp_path / "processes", postgres, dsn, redis, through=pooled) as cluster:
            trial = Trial(cluster, seed)
            try:
                await polling(cluster)
                await trial.arrive(4)
                trial.write(4)
                await trial.written(100)
                await trial.delivered()
                await asyncio.to_thread(cluster.relays[0].kill)
                await trial.written(50)
                await trial.delivered()
                async with cluster.client() as client:
                    await client.flushall()
                await trial.written(50)
                await trial.must_be_good()
            finally:
                await trial.close()
            for relay in cluster.relays:
                assert cluster.logged(POLLING, [relay]) == 1
        cluster.processes.check_logs()
