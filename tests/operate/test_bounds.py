"""The stated bounds (docs/guarantees.md), each with slack for a busy machine."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
from outbox.migrations import migrate
from outbox.sharding import shard_of
from tests.chaos.cluster import SHARDS, Cluster
from tests.client import Client
from tests.operate.traffic import TENANT, Traffic, numbers_are_complete
from tests.processes import Process

ROOM = "orders:1"
LEASE_S = 1.5
PATIENT = {"TIDEGATE_PING_INTERVAL_S": "25", "TIDEGATE_PONG_TIMEOUT_S": "20"}
"""The client of these tests does not come back if it was too slow to answer a ping."""
SLACK_S = 2.0
"""For a machine that does much else: the bounds are much wider apart than it from what they
exclude."""


@pytest.fixture
async def cluster(redis: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Cluster]:
    """Two relays and a gateway behind proxies, on servers that may be broken."""
    with EmbeddedPostgres() as postgres:
        migrate(postgres.dsn())
        async with Cluster(
            tmp_path / "cluster", postgres, postgres.dsn(), redis, gateways=1, **PATIENT
        ) as cluster:
            yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with Client(cluster.gateways[0].websocket_url) as client:
        await client.greet(cluster.token(TENANT, "ann"))
        await client.subscribe(ROOM, since=(0, ""))
        publish(cluster, 0)
        await client.until_offset(ROOM, 1)
        # From here on shards stay where they are.
        await cluster.shared()
        yield client


def publish(cluster: Cluster, number: int) -> float:
    """The time at which it was committed."""
    with psycopg.connect(cluster.postgres.dsn()) as connection:
        connection.execute("SELECT tidegate.publish(%s, %s, %s)", (TENANT, ROOM, str(number)))
    return time.monotonic()


async def holder(cluster: Cluster) -> Process:
    """The relay that serves the room's shard."""
    return (await cluster.shared())[shard_of(TENANT, ROOM, SHARDS, 4)]


async def logged(process: Process, pattern: str, since: int, timeout_s: float) -> None:
    """Waits for a line in what the process writes from ``since`` (characters) on."""
    deadline = time.monotonic() + timeout_s
    while not re.search(pattern, process.text()[since:]):
        assert time.monotonic() < deadline, process.text()[since:][-3000:]
        await asyncio.sleep(0.05)


async def test_a_dead_relays_shards_are_taken_over(cluster: Cluster, client: Client) -> None:
    dead = await holder(cluster)
    dead.kill()
    committed = publish(cluster, 1)
    await client.until_offset(ROOM, 2)
    assert time.monotonic() - committed <= LEASE_S + 1 + SLACK_S


async def test_redis_is_back(cluster: Cluster, client: Client) -> None:
    cluster.redis.kill()
    publish(cluster, 1)
    for process in (*cluster.relays, *cluster.gateways):
        await logged(process, "redis: trouble|bus read failed", 0, 15)
    # Away for long enough that every pause between attempts is at its longest.
    await asyncio.sleep(4)
    await asyncio.to_thread(cluster.redis.restart)
    back = time.monotonic()
    await client.until_offset(ROOM, 2)
    assert time.monotonic() - back <= 2 + SLACK_S


async def test_postgres_is_back(cluster: Cluster, client: Client) -> None:
    cluster.postgres.kill()
    for relay in cluster.relays:
        await logged(relay, "postgres: trouble", 0, 15)
    await asyncio.sleep(4)
    await asyncio.to_thread(cluster.postgres.restart)
    back = publish(cluster, 1)
    await client.until_offset(ROOM, 2)
    assert time.monotonic() - back <= 2 + SLACK_S
    # Who comes now needs the log.
    async with Client(cluster.gateways[0].websocket_url) as late:
        await late.greet(cluster.token(TENANT, "bea"))
        assert (await late.subscribe("orders:other", since=(0, "")))["recovered"]


@pytest.mark.parametrize("store", ["redis", "postgres"])
async def test_a_frozen_link_of_a_relay_is_detected(
    cluster: Cluster, client: Client, store: str
) -> None:
    """Bytes are acknowledged and go nowhere. The relay had been asleep: nothing was under way."""
    relay = await holder(cluster)
    await cluster.asleep()
    since = len(relay.text())
    cluster.links[f"{relay.name} to {store}"].freeze()
    frozen = time.monotonic()
    committed = publish(cluster, 1)
    await logged(relay, f"{store}: trouble", since, 10 + SLACK_S)
    assert time.monotonic() - frozen <= 10 + SLACK_S
    # The other one takes over when the lease has run out.
    await client.until_offset(ROOM, 2)
    assert time.monotonic() - committed <= 10 + LEASE_S + 1 + SLACK_S


async def test_a_frozen_link_to_postgres_is_detected_under_traffic(
    cluster: Cluster, client: Client
) -> None:
    async with Traffic(cluster.postgres.dsn(), ROOM) as traffic:
        await traffic.some()
        relay = await holder(cluster)
        since = len(relay.text())
        cluster.links[f"{relay.name} to postgres"].freeze()
        await logged(relay, "postgres: trouble", since, 10 + SLACK_S)
        await traffic.some()
    await client.until(lambda: traffic.committed[ROOM] in client.data(ROOM))


async def test_a_frozen_link_of_a_gateway_is_detected(cluster: Cluster, client: Client) -> None:
    gateway = cluster.gateways[0]
    link = cluster.links[f"{gateway.name} to redis"]
    since = len(gateway.text())
    link.freeze()
    await logged(gateway, "bus read failed", since, 10 + SLACK_S)
    publish(cluster, 1)
    link.heal()
    healed = time.monotonic()
    await client.until_offset(ROOM, 2)
    assert time.monotonic() - healed <= 2 + SLACK_S


async def test_nothing_is_lost_when_postgres_restarts_or_ends_sessions(
    cluster: Cluster, client: Client
) -> None:
    """Under traffic: again and again, with an orderly stop, a crash, and sessions ended."""
    epoch = client.positions[ROOM][1]

    async def ended() -> None:
        async with await psycopg.AsyncConnection.connect(
            cluster.postgres.dsn(), autocommit=True
        ) as connection:
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )

    async with Traffic(cluster.postgres.dsn(), ROOM) as traffic:
        await traffic.some()
        for _ in range(3):
            await ended()
            await traffic.some(10)
        await asyncio.to_thread(cluster.postgres.restart)
        await traffic.some()
        await ended()
        cluster.postgres.kill()
        await asyncio.to_thread(cluster.postgres.restart)
        await traffic.some()
    assert traffic.breaks >= 4
    await client.until(lambda: traffic.committed[ROOM] in client.data(ROOM)[1:], 30)
    assert numbers_are_complete(client.data(ROOM)[1:], traffic.committed[ROOM])
    assert client.evicted == {}
    assert client.positions[ROOM][1] == epoch


STATEMENTS_LOGGED = {"log_statement": "all", "log_line_prefix": "%m [%p] %a "}


def statements(postgres: EmbeddedPostgres, since: int) -> list[str]:
    """What relays and gateways have sent, from the server's log after so many characters."""
    text = postgres.log.read_text(errors="replace")[since:]
    found = re.findall(r"^\S+ \S+ \S+ \[\d+\] (tidegate\S*) (LOG:.*)$", text, re.MULTILINE)
    return [f"{name} {line}" for name, line in found if "statement:" in line or "execute" in line]


@pytest.mark.parametrize("bell", [True, False])
async def test_an_idle_cluster_leaves_postgres_alone(
    redis: EmbeddedRedis, tmp_path: Path, bell: bool
) -> None:
    """With the bell nobody sends a statement; without it a few a second."""
    with EmbeddedPostgres(settings=STATEMENTS_LOGGED) as postgres:
        migrate(postgres.dsn())
        with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
            connection.execute("SELECT tidegate.set_doorbell(%s)", (bell,))
        async with (
            Cluster(
                tmp_path / "cluster", postgres, postgres.dsn(), redis, gateways=1, **PATIENT
            ) as cluster,
            Client(cluster.gateways[0].websocket_url) as client,
        ):
            await client.greet(cluster.token(TENANT, "ann"))
            await client.subscribe(ROOM, since=(0, ""))
            publish(cluster, 0)
            await client.until_offset(ROOM, 1)
            quiet_at, seen = time.monotonic(), 0
            window_s = 8.0
            while bell and time.monotonic() - quiet_at < 2:
                await asyncio.sleep(0.2)
                if (now := len(statements(postgres, 0))) != seen:
                    quiet_at, seen = time.monotonic(), now
            start = len(postgres.log.read_text(errors="replace"))
            await asyncio.sleep(window_s)
            sent = statements(postgres, start)
            if bell:
                # The slow look of each process comes once in two minutes.
                assert len(sent) <= 2, sent
            else:
                per_relay = len(sent) / window_s / len(cluster.relays)
                # One look is a transaction of several statements.
                assert 1 <= per_relay <= 60, sent[:10]
            publish(cluster, 1)
            await client.until_offset(ROOM, 2)
