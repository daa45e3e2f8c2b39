"""Leases of shards: fair, healing, given back at once."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from gateway.embedded import EmbeddedRedis
from outbox import keys
from outbox.lease import Leases, read_leases
from outbox.redis import connect as redis_connect

EPOCH = "e1"


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    client = redis_connect.connect(redis_url)
    yield client
    await client.aclose()
    await client.connection_pool.disconnect()


def relays(client: Redis, *names: str, shards: int = 16, ttl_s: float = 60) -> list[Leases]:
    return [Leases(client, name, shards, EPOCH, ttl_s) for name in names]


async def settle(*leases: Leases) -> list[int]:
    """Two rounds of renewals: one gives back, one takes. How many each holds then."""
    for _ in range(2):
        for lease in leases:
            await lease.renew()
    assert sum(len(lease.held) for lease in leases) == len(
        frozenset().union(*(lease.held for lease in leases))
    )
    return [len(lease.held) for lease in leases]


async def test_one_relay_takes_everything(client: Redis) -> None:
    (a,) = relays(client, "a")
    assert await a.renew() == frozenset(range(16))
    assert a.relays == 1
    assert not a.expired


@pytest.mark.parametrize(
    ("shards", "count", "shares"),
    [(16, 2, [8, 8]), (16, 3, [6, 5, 5]), (4, 3, [2, 1, 1]), (2, 3, [1, 1, 0]), (16, 1, [16])],
)
async def test_every_relay_gets_its_share(
    client: Redis, shards: int, count: int, shares: list[int]
) -> None:
    everybody = relays(client, *"abc"[:count], shards=shards)
    assert await settle(*everybody) == shares
    before = [lease.held for lease in everybody]
    await settle(*everybody)
    assert [lease.held for lease in everybody] == before


async def test_a_newcomer_moves_no_more_than_its_share(client: Redis) -> None:
    a, b, c = relays(client, "b", "c", "a")
    await settle(a, b)
    before = a.held, b.held
    assert sorted(await settle(a, b, c)) == [5, 5, 6]
    assert a.held < before[0]
    assert b.held < before[1]


async def test_what_is_released_is_free_at_once(client: Redis) -> None:
    a, b = relays(client, "a", "b")
    await settle(a, b)
    await a.release()
    assert a.held == frozenset()
    assert a.expired
    assert await b.renew() == frozenset(range(16))


async def test_a_dead_relay_loses_its_leases(client: Redis) -> None:
    (a,) = relays(client, "a", ttl_s=0.3)
    (b,) = relays(client, "b")
    await settle(a, b)
    assert len(a.held) == 8
    async with asyncio.timeout(10):
        while len(await b.renew()) < 16:
            await asyncio.sleep(0.05)
    assert a.expired
    table = await read_leases(client, EPOCH)
    assert table.relays == ("b",)
    assert table.holders == dict.fromkeys(range(16), "b")
    # It was only paused: it comes back as a newcomer does.
    assert await settle(*relays(client, "a"), b) == [8, 8]


async def test_nobody_takes_a_lease_before_it_has_expired(client: Redis) -> None:
    """Not even one whose own leases last much longer, nor one to whom a share is due."""
    (a,) = relays(client, "a", ttl_s=20)
    b, c = relays(client, "b", "c")
    await settle(a, b)
    assert await c.renew() == frozenset()
    assert not a.held & await b.renew()
    table = await read_leases(client, EPOCH)
    assert {shard for shard, holder in table.holders.items() if holder == "a"} == a.held


async def test_a_flush_heals(client: Redis) -> None:
    a, b = relays(client, "a", "b")
    await settle(a, b)
    await client.flushall()
    assert await settle(a, b) == [8, 8]


async def test_junk_is_cleared_away(client: Redis) -> None:
    await client.hset(keys.leases(EPOCH), mapping={"99": "a 99999999999999", "0": "junk", "x": "y"})
    (a,) = relays(client, "a")
    assert await a.renew() == frozenset(range(16))
    assert await client.hlen(keys.leases(EPOCH)) == 16


async def test_a_clock_that_was_set_back_leaves_no_shard_alone(client: Redis) -> None:
    """What a relay wrote before that, and it has died since, seems to be valid for an hour."""
    seconds, _ = await client.time()
    hour_ms = (seconds + 3_600) * 1_000
    await client.hset(keys.relays(EPOCH), "dead", str(hour_ms))
    await client.hset(
        keys.leases(EPOCH), mapping=dict.fromkeys(map(str, range(16)), f"dead {hour_ms}")
    )
    (a,) = relays(client, "a")
    await a.release()
    assert await a.renew() == frozenset(range(16))
    assert (await read_leases(client, EPOCH)).relays == ("a",)


async def test_nothing_stays_for_ever(client: Redis) -> None:
    (a,) = relays(client, "a", ttl_s=3)
    await a.renew()
    assert 0 < await client.pttl(keys.leases(EPOCH)) <= 30_000
    assert 0 < await client.pttl(keys.relays(EPOCH)) <= 30_000


async def test_relays_of_two_histories_do_not_share(client: Redis) -> None:
    a, b = relays(client, "a", "b")
    other = Leases(client, "other", 4, "e2", 60)
    assert await settle(a, b) == [8, 8]
    assert await other.renew() == frozenset(range(4))
    assert other.relays == 1
    assert await settle(a, b) == [8, 8]
    assert (await read_leases(client, "e2")).relays == ("other",)
    assert (await read_leases(client, EPOCH)).relays == ("a", "b")


async def test_a_relay_moves_to_another_history(client: Redis) -> None:
    a, b = relays(client, "a", "b")
    assert await settle(a, b) == [8, 8]
    await a.move("e2")
    assert (await read_leases(client, EPOCH)).relays == ("b",)
    assert await a.renew() == frozenset(range(16))
    assert await b.renew() == frozenset(range(16))
    await b.move("e2")
    assert await settle(a, b) == [8, 8]
    assert (await read_leases(client, EPOCH)).holders == {}
    await a.move("e2")
    await b.release()
    assert (await read_leases(client, "e2")).relays == ("a",)


async def test_leases_that_cannot_be_given_back_hold_no_relay_up(
    client: Redis, redis: EmbeddedRedis
) -> None:
    (a,) = relays(client, "a")
    await a.renew()
    redis.kill()
    await a.move("e2")
    redis.restart()
    assert await a.renew() == frozenset(range(16))
    assert (await read_leases(client, "e2")).relays == ("a",)
