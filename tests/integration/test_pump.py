"""What one shard suffers stays with it: a message that Redis refuses, a node that hangs."""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from gateway.embedded import EmbeddedPostgres
from gateway.operate.status import read_status
from outbox import keys
from outbox.migrations import migrate
from outbox.reconcile import reconcile
from outbox.relay import Relay, RelayOptions
from tests.probe import Probe, offsets, until
from tests.redis_setups import Clustered

LIMIT_BYTES = 1_048_576
"""The lowest that Redis accepts as proto-max-bulk-len, and the most that a payload may have: with
what goes along it is too much."""
SHARDS = 16
OTHERS_WAIT_S = 1.0
"""How long messages to other nodes may take when one hangs, on a busy machine. A command has 5 s,
and the replica takes over after about as long."""


@asynccontextmanager
async def running(options: RelayOptions) -> AsyncIterator[Relay]:
    relay = Relay(options)
    stop = asyncio.Event()
    task = asyncio.create_task(relay.run(stop))
    try:
        yield relay
    finally:
        stop.set()
        await task


async def publish(probe: Probe, room: str, payload: str) -> None:
    await probe.connection.execute(
        "SELECT tidegate.publish('acme', %s, %s)", (room, f'"{payload}"')
    )


@pytest.fixture
async def probe(migrated: str, redis_url: str) -> AsyncIterator[Probe]:
    async with Probe(migrated, redis_url) as probe:
        yield probe


@pytest.mark.parametrize("remedy", ["limit", "redact"])
async def test_a_message_that_redis_refuses(
    probe: Probe, redis_url: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shard waits, whatever the room, since a bus has no holes; the others go on."""
    monkeypatch.setattr("outbox.pump.FAILING_RETRY_S", 0.3)
    client: Any = probe.client
    await client.config_set("proto-max-bulk-len", LIMIT_BYTES)
    other = probe.stranger("a")
    beside = probe.neighbour("a")
    options = RelayOptions(postgres_dsn=probe.dsn, redis_url=redis_url)
    async with running(options) as relay:
        await until(lambda: len(relay.health().shards) == probe.shards, "it serves all shards")
        await probe.publish("a", beside, other)
        await until(probe.drained, "all is well")
        await publish(probe, beside, "before")
        await publish(probe, "a", "x" * (LIMIT_BYTES - 2))
        await probe.publish(other)
        await publish(probe, beside, "after")
        await until(lambda: relay.health().failing, "the shard is known to fail")
        shard = probe.shard("a")
        assert list(relay.health().failing) == [shard]
        cause = relay.health().failing[shard]
        assert "offset 2 of room a of tenant acme (1048576 bytes" in cause
        assert "`tidegate redact acme a 2`" in cause
        for number in range(2, 30):
            await probe.publish(other)
            await until(
                lambda n=number: on_bus(probe, other, n + 1), "other shards go on", OTHERS_WAIT_S
            )
        assert relay.health().redis is None
        # What came before it in its shard is there, what follows waits.
        assert offsets(await probe.in_room("a")) == [1]
        assert offsets(await probe.in_room(beside)) == [1, 2]
        found = await read_status(probe.dsn, redis_url)
        assert found.problems == (f"shard {shard}: {cause}",)
        if remedy == "limit":
            await client.config_set("proto-max-bulk-len", LIMIT_BYTES * 2)
        else:
            await probe.connection.execute("SELECT tidegate.redact('acme', 'a', 2)")
        await until(probe.drained, "the shard goes on")
        assert offsets(await probe.in_room(beside))[-1] == 3
        await until(lambda: not relay.health().failing, "nothing fails any more")
        assert (await read_status(probe.dsn, redis_url)).problems == ()
        await probe.publish("a", beside)
        await until(probe.drained, "and on")


async def test_all_shards_are_lost_while_their_buses_are_filled(
    probe: Probe, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To another relay or, with Redis, to nobody: it goes on when it has some again."""
    lost = asyncio.Event()
    async with running(RelayOptions(postgres_dsn=probe.dsn, redis_url=redis_url)) as relay:
        await until(lambda: len(relay.health().shards) == probe.shards, "it serves all shards")
        await probe.publish("a")
        await until(probe.drained, "all is well")

        async def losing(*arguments: Any) -> Any:
            filled = await reconcile(*arguments)
            relay._standing.held = frozenset()
            lost.set()
            return filled

        monkeypatch.setattr("outbox.pump.reconcile", losing)
        await probe.client.flushall()
        await asyncio.wait_for(lost.wait(), 30)
        monkeypatch.setattr("outbox.pump.reconcile", reconcile)
        await probe.publish("a")
        await until(probe.drained, "it goes on")


async def on_bus(probe: Probe, room: str, count: int) -> bool:
    return len(await probe.in_room(room)) >= count


@pytest.fixture(scope="module")
def cluster() -> Iterator[Clustered]:
    with Clustered() as cluster:
        yield cluster


@pytest.fixture
def spread(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database in which one tenant has all shards."""
    name = f"spread_{secrets.token_hex(6)}"
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    migrate(postgres.dsn(name), shards=SHARDS, spread=SHARDS)
    yield postgres.dsn(name)
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


async def test_a_node_that_hangs_holds_up_nobody_else(cluster: Clustered, spread: str) -> None:
    async with Probe(spread, cluster.url) as probe:
        rooms = [f"orders:{number}" for number in range(48)]
        async with running(RelayOptions(postgres_dsn=spread, redis_url=cluster.url)) as relay:
            await until(lambda: len(relay.health().shards) == SHARDS, "it serves all shards")
            await probe.publish(*rooms)
            await until(probe.drained, "all is well")
            owners = {
                room: cluster.owner(keys.bus(probe.epoch, probe.shard(room))) for room in rooms
            }
            victim = owners[rooms[0]]
            stuck = [room for room in rooms if owners[room] is victim]
            others = [room for room in rooms if owners[room] is not victim]
            successor = cluster.replica_of(victim)
            latencies_s: list[float] = []
            os.kill(victim.pid, signal.SIGSTOP)
            try:
                # Until the replica takes over: all that others could be held up by has happened.
                ends_at_s = time.monotonic() + 3.0
                while time.monotonic() < ends_at_s:
                    heads = await there(probe, others[:1])
                    # Both in one batch of the relay, and both nodes' other shards with them.
                    await probe.publish(*stuck[:3], *others)
                    began_s = time.monotonic()
                    await until(
                        lambda h=heads: grown(probe, others, h), "on the buses", OTHERS_WAIT_S
                    )
                    latencies_s.append(time.monotonic() - began_s)
            finally:
                os.kill(victim.pid, signal.SIGCONT)
            print(f"{len(latencies_s)} rounds, at most {max(latencies_s):.3f} s")
            assert successor is not victim
            assert relay.health().redis is None
            await until(probe.drained, "everything is on the buses", 30)
            assert await probe.differences() == []
    await asyncio.to_thread(cluster.until_healthy)


async def there(probe: Probe, rooms: list[str]) -> int:
    """The offset up to which the first of the rooms is in its stream."""
    return len(await probe.in_room(rooms[0]))


async def grown(probe: Probe, rooms: list[str], before: int) -> bool:
    """Whether each of the rooms has one more than the first of them had."""
    for room in rooms:
        if len(await probe.in_room(room)) < before + 1:
            return False
    return True
