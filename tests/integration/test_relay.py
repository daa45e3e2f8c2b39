"""The relay against real servers: complete, in order and equal to the log, whatever is lost."""

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from time import monotonic
from typing import Any

import psycopg
import pytest
import structlog
from psycopg import sql

from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
from outbox import keys
from outbox.errors import SchemaMismatch, UnsupportedServer
from outbox.lease import Leases, read_leases
from outbox.migrations import migrate
from outbox.relay import Relay, RelayOptions
from outbox.standing import Pace
from tests.probe import Probe, offsets, seqs, until
from tests.processes import Processes

NEVER_S = 3600.0
ROOMS = [f"room-{number}" for number in range(20)]

Start = Callable[..., Awaitable[Relay]]


@pytest.fixture
async def probe(migrated: str, redis_url: str) -> AsyncIterator[Probe]:
    async with Probe(migrated, redis_url) as probe:
        yield probe


@pytest.fixture
def options(migrated: str, redis_url: str) -> RelayOptions:
    """No poll, so that what is delivered was delivered because of a bell."""
    return RelayOptions(postgres_dsn=migrated, redis_url=redis_url, pace=Pace(bell_poll_s=NEVER_S))


@asynccontextmanager
async def running(options: RelayOptions) -> AsyncIterator[Relay]:
    """A relay in this process; it must end without an error."""
    relay = Relay(options)
    stop = asyncio.Event()
    task = asyncio.create_task(relay.run(stop))
    try:
        yield relay
    finally:
        stop.set()
        await task


async def serves_all(relay: Relay, probe: Probe) -> None:
    await until(lambda: len(relay.health().shards) == probe.shards, "the relay serves all shards")


async def settled(probe: Probe) -> None:
    await until(probe.drained, "everything is on the buses")
    assert await probe.differences() == []


async def published(probe: Probe) -> None:
    """The heartbeat puts the epoch back within about a second after a loss."""

    async def repaired() -> bool:
        return await probe.streams.epoch() == probe.epoch

    await until(repaired, "Redis has the epoch")


async def advisory_locks(probe: Probe) -> int:
    """Held by relays that sleep, one for each shard."""
    cursor = await probe.connection.execute(
        "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database "
        "WHERE locktype = 'advisory' AND granted AND datname = current_database()"
    )
    row = await cursor.fetchone()
    return -1 if row is None else int(row[0])


async def write(dsn: str, transactions: int, pause_s: float = 0.005) -> int:
    """A writer: transactions of random length, one in ten rolled back; how many were committed."""
    committed = 0
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        for _ in range(transactions):
            for _ in range(random.randint(1, 3)):
                await connection.execute(
                    "SELECT tidegate.publish('acme', %s, '{}')", (random.choice(ROOMS),)
                )
                await asyncio.sleep(random.uniform(0, pause_s))
            if random.random() < 0.1:
                await connection.rollback()
            else:
                await connection.commit()
                committed += 1
    return committed


async def test_what_waited_and_what_comes_is_delivered(options: RelayOptions, probe: Probe) -> None:
    await probe.publish(*ROOMS)
    async with running(options) as relay:
        await settled(probe)
        await probe.publish(*ROOMS)
        await settled(probe)
        health = relay.health()
    assert health.sequenced == 40
    assert (health.postgres, health.redis, health.doorbell) == (None, None, None)
    assert health.epoch == probe.epoch == await probe.streams.epoch()
    assert len(health.shards) == probe.shards
    assert offsets(await probe.in_room(ROOMS[0])) == [1, 2]


async def test_the_bell_wakes_it_every_time(options: RelayOptions, probe: Probe) -> None:
    """It never polls, so one bell that is missed would leave a message in the outbox."""
    async with running(options) as relay:
        await serves_all(relay, probe)
        for number in range(30):
            await probe.publish(ROOMS[number % 20])
            await until(probe.drained, f"message {number} is on its bus")
        await asyncio.gather(*(write(probe.dsn, 30) for _ in range(8)))
        await settled(probe)


async def test_a_long_transaction_delays_nobody_else(options: RelayOptions, probe: Probe) -> None:
    async with running(options) as relay:
        await serves_all(relay, probe)
        async with await psycopg.AsyncConnection.connect(probe.dsn) as slow:
            await slow.execute("SELECT tidegate.publish('acme', 'room-0', '{}')")
            await probe.publish(*ROOMS)
            await settled(probe)
            assert offsets(await probe.in_room("room-0")) == [1]
            await slow.commit()
        await until(lambda: relay.health().sequenced == 21, "the long transaction is sequenced")
        await settled(probe)


async def test_an_idle_relay_leaves_the_database_alone(options: RelayOptions, probe: Probe) -> None:
    async def last_statements() -> list[Any]:
        cursor = await probe.connection.execute(
            "SELECT pid, state_change FROM pg_stat_activity "
            "WHERE datname = current_database() "
            "AND application_name IN ('tidegate-relay', 'tidegate-relay-log') ORDER BY pid"
        )
        return await cursor.fetchall()

    async with running(options) as relay:
        await serves_all(relay, probe)
        await probe.publish("a")
        await settled(probe)

        async def asleep() -> bool:
            return await advisory_locks(probe) == probe.shards

        await until(asleep, "the relay sleeps")
        before = await last_statements()
        assert before
        # Several heartbeats, which are for Redis only.
        await asyncio.sleep(3)
        assert await last_statements() == before


async def test_it_polls_where_the_bell_is_off(options: RelayOptions, probe: Probe) -> None:
    await probe.connection.execute("SELECT tidegate.set_doorbell(false)")
    with structlog.testing.capture_logs() as logs:
        async with running(options) as relay:
            for _ in range(3):
                await probe.publish(*ROOMS)
                await settled(probe)
            assert "set_doorbell" in str(relay.health().doorbell)
    assert [entry["event"] for entry in logs].count("doorbell is off: polling") == 1


async def test_a_bell_that_is_switched_on_and_off_is_noticed(
    options: RelayOptions, probe: Probe
) -> None:
    await probe.connection.execute("SELECT tidegate.set_doorbell(false)")
    async with running(options) as relay:
        await serves_all(relay, probe)
        await probe.connection.execute("SELECT tidegate.set_doorbell(true)")
        await until(lambda: relay.health().doorbell is None, "it knows that the bell works")
        await probe.publish(*ROOMS)
        await settled(probe)
        await probe.connection.execute("SELECT tidegate.set_doorbell(false)")
        await probe.publish(*ROOMS)
        await settled(probe)
        await until(lambda: relay.health().doorbell, "it knows that the bell is off")


class Greedy(Leases):
    """A relay that believes that it holds everything, whatever the leases say."""

    async def renew(self) -> frozenset[int]:
        await super().renew()
        self.held = frozenset(range(self.shards))
        return self.held


async def test_relays_that_ignore_leases_do_no_harm(
    options: RelayOptions, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay.Leases", Greedy)
    eager = replace(options, batch_messages=7, pace=Pace(bell_poll_s=0.02))
    async with running(eager), running(eager), running(eager):
        await asyncio.gather(*(write(probe.dsn, 60) for _ in range(6)))
        await settled(probe)
    shards = {shard: seqs(await probe.on_bus(shard)) for shard in range(probe.shards)}
    logged = await probe.logged()
    assert {shard: found for shard, found in shards.items() if found} == {
        shard: list(range(1, len(messages) + 1)) for shard, messages in logged.items()
    }


async def test_everything_is_lost_in_the_middle(options: RelayOptions, probe: Probe) -> None:
    async with running(options), running(options):
        writers = [asyncio.create_task(write(probe.dsn, 100)) for _ in range(6)]
        for _ in range(3):
            await asyncio.sleep(0.3)
            await probe.client.flushall()
        await asyncio.gather(*writers)
        await settled(probe)
        await published(probe)


async def test_everything_at_once(
    options: RelayOptions, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three relays on every shard; Redis and connections are lost again and again meanwhile."""
    monkeypatch.setattr("outbox.relay.Leases", Greedy)

    async def lose(done: asyncio.Event) -> None:
        while not done.is_set():
            await asyncio.sleep(random.uniform(0.05, 0.4))
            shard = random.randrange(probe.shards)
            match random.randrange(4):
                case 0:
                    await probe.client.flushall()
                case 1:
                    await probe.client.delete(keys.bus(probe.epoch, shard))
                case 2:
                    await probe.client.script_flush()
                case 3:
                    await probe.connection.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE datname = current_database() "
                        "AND application_name LIKE 'tidegate-relay%%' "
                        "ORDER BY random() LIMIT 1"
                    )

    done = asyncio.Event()
    eager = replace(options, batch_messages=5)
    async with running(eager), running(eager), running(eager):
        loser = asyncio.create_task(lose(done))
        await asyncio.gather(*(write(probe.dsn, 80, 0.02) for _ in range(6)))
        done.set()
        await loser
        await settled(probe)
        await published(probe)
    # One epoch from the beginning to the end: nothing of this is a loss of Postgres.
    assert probe.epoch_at_start == probe.epoch


async def test_a_loss_on_a_quiet_shard_is_noticed(options: RelayOptions, probe: Probe) -> None:
    async with running(options) as relay:
        await serves_all(relay, probe)
        await probe.publish(*ROOMS)
        await settled(probe)
        await probe.client.delete(keys.bus(probe.epoch, probe.shard(ROOMS[0])))
        await settled(probe)
        await probe.client.flushall()
        await settled(probe)
        await until(lambda: len(relay.health().shards) == probe.shards, "it serves all again")


async def test_a_replica_that_lagged_takes_over(options: RelayOptions, probe: Probe) -> None:
    async with running(options) as relay:
        await serves_all(relay, probe)
        await probe.publish(*["a"] * 30)
        await settled(probe)
        shard = probe.shard("a")
        kept = (await probe.on_bus(shard))[:11]
        await probe.client.delete(
            keys.bus(probe.epoch, shard),
            keys.room(probe.epoch, shard, "acme", "a"),
            keys.top(probe.epoch, shard, "acme", "a"),
        )
        await probe.streams.append(probe.epoch, shard, kept, start=True)
        await settled(probe)
        assert offsets(await probe.in_room("a")) == list(range(1, 31))
        await probe.publish("a")
        await settled(probe)


async def test_a_lost_room_stream_begins_anew(options: RelayOptions, probe: Probe) -> None:
    async with running(options) as relay:
        await serves_all(relay, probe)
        await probe.publish("a", "a")
        await settled(probe)
        await probe.client.delete(keys.room(probe.epoch, probe.shard("a"), "acme", "a"))
        await probe.publish("a")
        await settled(probe)
        assert offsets(await probe.in_room("a")) == [3]


async def test_relays_share_and_inherit(options: RelayOptions, probe: Probe) -> None:
    async with running(options) as first:
        await serves_all(first, probe)
        async with running(options) as second:
            await until(
                lambda: len(first.health().shards) == len(second.health().shards) == 8,
                "each serves half",
            )
            table = await read_leases(probe.client, probe.epoch)
            assert set(table.relays) == {first.id, second.id}
            assert len(table.holders) == 16
            await probe.publish(*ROOMS)
            await settled(probe)
            assert first.health().sequenced
            assert second.health().sequenced
        assert (await read_leases(probe.client, probe.epoch)).relays == (first.id,)
        await serves_all(first, probe)
        await probe.publish(*ROOMS)
        await settled(probe)
    assert (await read_leases(probe.client, probe.epoch)).holders == {}


async def test_rows_wait_while_redis_is_down(
    options: RelayOptions, probe: Probe, redis: EmbeddedRedis
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with running(options) as relay:
            await serves_all(relay, probe)
            await probe.publish(*ROOMS)
            await settled(probe)
            redis.kill()
            await until(lambda: relay.health().redis is not None, "the loss is noticed")
            for _ in range(3):
                await probe.publish(*ROOMS)
            await asyncio.sleep(0.5)
            assert await probe.waiting() == 60
            redis.restart()
            await settled(probe)
            assert relay.health().redis is None
    events = [entry["event"] for entry in logs]
    assert events.count("redis: well again") == 1
    causes = [entry["cause"] for entry in logs if entry["event"] == "redis: trouble"]
    assert all(one != following for one, following in pairwise(causes))


async def test_a_stalled_redis_makes_no_message_two(
    options: RelayOptions, probe: Probe, redis: EmbeddedRedis
) -> None:
    async with running(replace(options, redis_timeout_s=0.3)) as relay:
        await serves_all(relay, probe)
        await probe.publish("a")
        await settled(probe)
        os.kill(redis.pid, signal.SIGSTOP)
        try:
            # Appended when the server wakes, though the relay has long given up.
            await probe.publish("a")
            await until(probe.sequenced, "the message is sequenced")
            await until(lambda: relay.health().redis, "the stall is noticed")
            await probe.publish("a")
        finally:
            os.kill(redis.pid, signal.SIGCONT)
        await settled(probe)
        assert seqs(await probe.on_bus(probe.shard("a"))) == [1, 2, 3]


@pytest.mark.parametrize("trouble", ["read-only", "full"])
async def test_a_redis_that_refuses_writes_is_waited_out(
    options: RelayOptions, probe: Probe, trouble: str
) -> None:
    async with running(options) as relay:
        await serves_all(relay, probe)
        await probe.publish(*ROOMS)
        await settled(probe)
        if trouble == "full":
            await probe.client.config_set("maxmemory", "1")
        else:
            await probe.client.replicaof("127.0.0.1", "1")
        await until(lambda: relay.health().redis, "the refusal is noticed")
        await probe.publish(*ROOMS)
        await asyncio.sleep(0.3)
        assert await probe.waiting() == 20
        if trouble == "full":
            await probe.client.config_set("maxmemory", "0")
        else:
            await probe.client.replicaof("NO", "ONE")
        await settled(probe)
        assert relay.health().redis is None


async def test_writers_do_not_ring_for_a_relay_that_cannot_deliver(
    options: RelayOptions, probe: Probe, redis: EmbeddedRedis
) -> None:
    async with running(options) as relay:
        await serves_all(relay, probe)
        redis.kill()
        await until(lambda: relay.health().redis is not None, "the loss is noticed")

        async def unlocked() -> bool:
            return await advisory_locks(probe) == 0

        await until(unlocked, "the locks are given back")
        redis.restart()
        await serves_all(relay, probe)


async def test_a_restart_of_postgres_is_waited_out(redis_url: str) -> None:
    with EmbeddedPostgres() as server:
        migrate(server.dsn())
        relay_options = RelayOptions(
            postgres_dsn=server.dsn(), redis_url=redis_url, pace=Pace(bell_poll_s=NEVER_S)
        )
        async with AsyncExitStack() as stack:
            async with Probe(server.dsn(), redis_url) as probe:
                relay = await stack.enter_async_context(running(relay_options))
                await serves_all(relay, probe)
                await probe.publish(*ROOMS)
                await settled(probe)
            server.kill()
            await until(lambda: relay.health().postgres is not None, "the loss is noticed")
            server.restart()
            async with Probe(server.dsn(), redis_url) as probe:
                await probe.publish(*ROOMS)
                await settled(probe)
                assert relay.health().postgres is None
                assert relay.health().doorbell is None


async def test_without_postgres_others_get_the_leases(options: RelayOptions, probe: Probe) -> None:
    async with running(options) as relay:
        await serves_all(relay, probe)
        dbname = probe.connection.info.dbname
        async with await psycopg.AsyncConnection.connect(
            probe.dsn.replace(dbname, "postgres"), autocommit=True
        ) as admin:
            name = sql.Identifier(dbname)
            await admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
            try:
                await admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = %s AND application_name LIKE 'tidegate-relay%%'",
                    (dbname,),
                )

                async def nobody() -> bool:
                    return (await read_leases(probe.client, probe.epoch)).relays == ()

                await until(nobody, "the leases are given back")
            finally:
                await admin.execute(
                    sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name)
                )
        await serves_all(relay, probe)


async def test_lost_commits_end_the_epoch(options: RelayOptions, probe: Probe) -> None:
    async with running(options) as relay, running(options):
        await until(lambda: relay.health().shards, "it serves")
        await probe.publish(*ROOMS)
        await settled(probe)
        before = probe.epoch
        # A backup without the newest commits: heads are lower and the connections are gone.
        await probe.connection.execute("UPDATE tidegate.shard SET head = head - 1 WHERE head > 0")
        await probe.connection.execute(
            "DELETE FROM tidegate.message m USING tidegate.shard s "
            "WHERE s.id = m.shard AND m.seq > s.head"
        )
        await probe.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'tidegate-relay%%'"
        )

        async def replaced() -> bool:
            return await probe.streams.epoch() not in (None, before)

        await until(replaced, "the epoch is replaced")
        await settled(probe)
        await published(probe)
        await until(lambda: relay.health().epoch == probe.epoch, "both relays follow")
        assert 0 < await probe.client.ttl(keys.bus(before, probe.shard(ROOMS[0]))) <= 3600


async def test_a_fork_ends_the_epoch(options: RelayOptions, probe: Probe) -> None:
    async with running(options) as relay:
        await serves_all(relay, probe)
        await probe.publish(*["a"] * 5)
        await settled(probe)
        before = probe.epoch
        # Nobody noticed that commits were lost until the same positions were given again.
        await probe.connection.execute("TRUNCATE tidegate.room, tidegate.message")
        await probe.connection.execute("UPDATE tidegate.shard SET head = 0")
        await probe.publish("a", "a")

        async def replaced() -> bool:
            return await probe.streams.epoch() not in (None, before)

        await until(replaced, "the epoch is replaced")
        await settled(probe)
        assert offsets(await probe.in_room("a")) == [1, 2]


async def test_a_gateway_that_is_ahead_of_the_log_ends_the_epoch(
    options: RelayOptions, probe: Probe
) -> None:
    """Redis was emptied when the backup was restored: only a worker's position is left."""
    async with running(options) as relay:
        await serves_all(relay, probe)
        await probe.publish("a", "a")
        await settled(probe)
        before, shard = probe.epoch, probe.shard("a")

        async def tell(epoch: str, position: int) -> None:
            line = {"epoch": epoch, "positions": {str(shard): position}}
            await probe.client.hset(keys.GATEWAYS, "worker", json.dumps(line))

        await tell("of another history", 99)
        await tell(before, 2)
        await probe.publish("a")
        await settled(probe)
        assert await probe.streams.epoch() == before
        await tell(before, 4)

        async def replaced() -> bool:
            return await probe.streams.epoch() not in (None, before)

        await until(replaced, "the epoch is replaced")
        await probe.publish("a")
        await settled(probe)
        await published(probe)


async def test_an_epoch_replaced_by_hand_is_followed(options: RelayOptions, probe: Probe) -> None:
    async with running(options) as relay:
        await serves_all(relay, probe)
        await probe.publish("a")
        await settled(probe)
        probe.epoch = await probe.sequencer.new_epoch()
        await probe.publish("a")
        await published(probe)
        await settled(probe)
        assert offsets(await probe.in_room("a")) == [1, 2]


@pytest.mark.parametrize("found", [None, "0123456789abcdef"])
async def test_the_epoch_in_redis_is_repaired(
    options: RelayOptions, probe: Probe, found: str | None
) -> None:
    async with running(options) as relay:
        await serves_all(relay, probe)
        await (probe.client.set(keys.EPOCH, found) if found else probe.client.delete(keys.EPOCH))
        await published(probe)


async def test_a_shard_that_cannot_be_sequenced_stops_no_other(
    options: RelayOptions, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.pump.FAILING_RETRY_S", 0.3)
    broken, whole = probe.shard("a"), probe.stranger("a")
    async with running(options) as relay:
        await serves_all(relay, probe)
        await probe.publish("a", whole)
        await settled(probe)
        # Somebody has lowered the head by hand, so that positions come twice in the log.
        await probe.connection.execute(
            "UPDATE tidegate.shard SET head = head - 1 WHERE id = %s", (broken,)
        )
        await probe.publish("a", whole)
        await until(lambda: relay.health().failing, "the shard is known to fail")
        assert list(relay.health().failing) == [broken]
        await probe.publish(whole, whole)
        await until(lambda: relay.health().sequenced == 5, "other rooms go on")
        assert await probe.waiting() == 1
        await probe.connection.execute(
            "UPDATE tidegate.shard SET head = head + 1 WHERE id = %s", (broken,)
        )
        await settled(probe)
        await probe.publish("a")
        await settled(probe)
        assert not relay.health().failing
        assert offsets(await probe.in_room("a")) == [1, 2, 3]


async def test_locks_that_somebody_holds_stop_no_other_shard(
    options: RelayOptions, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "outbox.sequence._SETTINGS",
        {"lock_timeout": "100ms", "statement_timeout": "5s", "idle_timeout": "5s"},
    )
    monkeypatch.setattr("outbox.pump.FAILING_RETRY_S", 0.3)
    whole = probe.stranger("a")
    async with running(options) as relay:
        await serves_all(relay, probe)
        async with await psycopg.AsyncConnection.connect(probe.dsn) as stopped:
            await stopped.execute(
                "SELECT FROM tidegate.shard WHERE id = %s FOR UPDATE", (probe.shard("a"),)
            )
            await probe.publish("a", whole)
            await until(lambda: relay.health().sequenced == 1, "other rooms go on")
            assert list(relay.health().failing) == [probe.shard("a")]
            async with running(options) as other:
                # The second relay waits for the same lock before it may use its shards.
                await until(lambda: len(other.health().shards) >= 7, "it serves its share")
                await probe.publish(*ROOMS)
                await until(
                    lambda: len(other.health().shards) + len(relay.health().shards) >= 15,
                    "all other shards are served",
                )
        await settled(probe)


async def test_a_lock_that_somebody_holds_is_waited_for_once(
    options: RelayOptions, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shard is tried again and again, without the others waiting for it each time; also by a
    relay that comes meanwhile, which needs the same lock before it may use the shard."""
    monkeypatch.setattr(
        "outbox.sequence._SETTINGS",
        {"lock_timeout": "2s", "statement_timeout": "5s", "idle_timeout": "5s"},
    )
    monkeypatch.setattr("outbox.pump.FAILING_RETRY_S", 0.5)
    locked, whole = probe.shard("a"), probe.stranger("a")

    async def worst(relay: Relay) -> float:
        waits = []
        for _ in range(12):
            before = relay.health().sequenced
            began = monotonic()
            await probe.publish(whole)
            await until(lambda before=before: relay.health().sequenced > before, "it is delivered")
            waits.append(monotonic() - began)
            await asyncio.sleep(0.2)
        return max(waits)

    async with await psycopg.AsyncConnection.connect(probe.dsn) as held:
        async with running(options) as relay:
            await serves_all(relay, probe)
            await held.execute("SELECT FROM tidegate.shard WHERE id = %s FOR UPDATE", (locked,))
            await probe.publish("a", whole)
            await until(lambda: relay.health().failing, "the shard is known to fail")
            assert await worst(relay) < 1.5
        async with running(options) as other:
            await until(lambda: len(other.health().shards) == 15, "it serves all others")
            await until(lambda: list(other.health().failing) == [locked], "it knows")
            assert await worst(other) < 1.5
            assert other.health().postgres is None
            await held.rollback()
            await settled(probe)


async def test_a_missing_schema_is_waited_for(database: str, redis_url: str) -> None:
    async with running(RelayOptions(postgres_dsn=database, redis_url=redis_url)) as relay:
        await until(
            lambda: "run `tidegate migrate`" in str(relay.health().postgres), "it says what to do"
        )
        await asyncio.to_thread(migrate, database)
        async with Probe(database, redis_url) as probe:
            await serves_all(relay, probe)
            await probe.publish("a")
            await settled(probe)


async def test_a_schema_of_a_newer_version_ends_it(options: RelayOptions) -> None:
    async with await psycopg.AsyncConnection.connect(options.postgres_dsn) as connection:
        await connection.execute("UPDATE tidegate.meta SET schema_version = 99, oldest_reader = 99")
    with pytest.raises(SchemaMismatch, match="upgrade Tidegate"):
        await Relay(options).run(asyncio.Event())


async def test_a_wrong_encoding_ends_it(postgres: EmbeddedPostgres, redis_url: str) -> None:
    async with await psycopg.AsyncConnection.connect(postgres.dsn(), autocommit=True) as admin:
        await admin.execute(
            "CREATE DATABASE ascii ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0"
        )
        try:
            relay = Relay(RelayOptions(postgres_dsn=postgres.dsn("ascii"), redis_url=redis_url))
            with pytest.raises(UnsupportedServer, match="UTF8"):
                await relay.run(asyncio.Event())
        finally:
            await admin.execute("DROP DATABASE ascii WITH (FORCE)")


async def test_a_loop_that_dies_ends_it(
    options: RelayOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(self: Leases) -> frozenset[int]:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(Leases, "renew", die)
    with pytest.raises(RuntimeError, match="a mistake"):
        await Relay(options).run(asyncio.Event())


async def test_it_stops_while_nothing_can_be_reached(options: RelayOptions) -> None:
    nowhere = replace(
        options,
        postgres_dsn="postgresql://nobody@127.0.0.1:1/none",
        redis_url="redis://127.0.0.1:1",
    )
    async with running(nowhere) as relay:
        await until(
            lambda: relay.health().postgres and relay.health().redis, "both losses are noticed"
        )
        assert relay.health().shards == ()


def settings(probe: Probe, redis_url: str) -> dict[str, str]:
    return {"TIDEGATE_POSTGRES_DSN": probe.dsn, "TIDEGATE_REDIS_URL": redis_url}


async def test_killed_between_sequencing_and_appending(
    probe: Probe, redis_url: str, processes: Processes
) -> None:
    victim = processes.start_relay("victim", **settings(probe, redis_url))
    await probe.publish(*ROOMS)
    await until(probe.drained, "the relay works")
    await probe.client.client_pause(60_000, all=False)
    await probe.publish(*ROOMS, *ROOMS)

    await until(probe.sequenced, "the messages are sequenced")
    victim.kill()
    await probe.client.client_unpause()
    assert not await probe.drained()
    processes.start_relay("heir", **settings(probe, redis_url))
    await settled(probe)
    assert offsets(await probe.in_room(ROOMS[0])) == [1, 2, 3]


async def test_stopped_past_its_lease_and_woken(
    probe: Probe, redis_url: str, processes: Processes
) -> None:
    sleeper = processes.start_relay("sleeper", **settings(probe, redis_url))
    await probe.publish(*ROOMS)
    await until(probe.drained, "the relay works")
    # It is stopped with appends on their way, and wakes when another has gone on.
    await probe.client.client_pause(60_000, all=False)
    await probe.publish(*ROOMS)
    await until(probe.sequenced, "the messages are sequenced")
    sleeper.signal(signal.SIGSTOP)
    await probe.client.client_unpause()
    processes.start_relay("heir", **settings(probe, redis_url))
    await probe.publish(*ROOMS)
    await settled(probe)
    writers = [asyncio.create_task(write(probe.dsn, 50)) for _ in range(4)]
    await asyncio.sleep(0.1)
    sleeper.signal(signal.SIGCONT)
    await asyncio.gather(*writers)
    await settled(probe)

    async def shared() -> bool:
        holders = (await read_leases(probe.client, probe.epoch)).holders
        return sorted(map(list(holders.values()).count, set(holders.values()))) == [8, 8]

    await until(shared, "both have their share")
    await probe.publish(*ROOMS)
    await settled(probe)
