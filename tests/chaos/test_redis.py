"""Redis stalls, refuses, forgets in whole or in part, and no client notices more than a delay."""

import asyncio
import os
import signal
from typing import Any, cast

import pytest

from gateway.embedded import EmbeddedRedis
from tests.chaos.cluster import Cluster, client_of, password_of
from tests.chaos.failover import become_primary, ends, replicate
from tests.chaos.faults import lag, rooms_of, shorten
from tests.chaos.proxy import Link
from tests.chaos.trial import Trial, within

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

IDLE_S = 12.0
"""Above the sum of all time-outs of a blocking read."""

FULL = "used memory > 'maxmemory'"
TIMEOUT = r"TimeoutError|[Tt]imeout reading|timed out"


async def test_nothing_happens(trial: Trial) -> None:
    """What the others are compared with."""
    await trial.arrive(4)
    trial.write()
    await trial.written(100)
    await trial.must_be_good()


async def test_a_stall_of_12_seconds(trial: Trial, cluster: Cluster) -> None:
    await trial.arrive(4)
    trial.write()
    await trial.written(50)
    os.kill(cluster.redis.pid, signal.SIGSTOP)
    try:
        # Longer than any time-out of a client, so that all of them give up and come again.
        await asyncio.sleep(12)
    finally:
        os.kill(cluster.redis.pid, signal.SIGCONT)
    await trial.written(50)
    await trial.delivered()
    await trial.must_be_good()


async def test_a_restart_without_persistence(trial: Trial, cluster: Cluster) -> None:
    await trial.arrive(4)
    trial.write()
    await trial.written(50)
    for _ in range(2):
        await asyncio.to_thread(cluster.redis.kill)
        await trial.written(30)
        await asyncio.to_thread(cluster.redis.restart)
        await trial.written(30)
        await trial.delivered()
    await trial.must_be_good()


async def test_flushall_again_and_again(trial: Trial, cluster: Cluster) -> None:
    await trial.arrive(4)
    trial.write()
    async with cluster.client() as client:
        for _ in range(10):
            await trial.written(10)
            await client.flushall()
    await trial.must_be_good()


async def test_flushall_and_then_silence(trial: Trial, cluster: Cluster) -> None:
    """Nothing is appended any more that could show the loss to relay, gateway or client."""
    await trial.arrive(2)
    await trial.publish(*trial.rooms * 3)
    await trial.delivered()
    buses = await cluster.buses()
    async with cluster.client() as client:
        await client.flushall()

        async def refilled() -> bool:
            return await client.exists(*buses) == len(buses)

        assert await within(20, refilled)
    # Those who come now are served from what was refilled.
    await trial.arrive(2, late=True)
    await trial.publish(trial.rooms[0])
    await trial.delivered()
    await trial.must_be_good()


async def test_single_keys_are_deleted(trial: Trial, cluster: Cluster) -> None:
    await trial.arrive(4)
    trial.write()
    async with cluster.client() as client:
        await trial.written(50)
        for _ in range(3):
            for key in [key async for key in client.scan_iter("tg:*:bus")]:
                await client.delete(key)
                await trial.written(3)
            for key in [key async for key in client.scan_iter("tg:*:room:*")]:
                await client.delete(key)
            await trial.written(5)
            await client.delete("tg:epoch")
    await trial.must_be_good()


async def test_groups_are_destroyed_under_blocked_readers(trial: Trial, cluster: Cluster) -> None:
    await trial.arrive(4)
    destroyed = 0
    async with cluster.client() as client:
        for _ in range(5):
            await trial.publish(*trial.rooms)
            await trial.delivered()
            # Nothing is under way: the readers wait.
            for bus in await cluster.buses():
                for group in await cast(Any, client).xinfo_groups(bus):
                    destroyed += int(await client.xgroup_destroy(bus, group["name"]))
            await trial.publish(*trial.rooms)
            await trial.delivered()
    assert destroyed >= 10
    await trial.must_be_good()


async def test_streams_that_are_shorter_than_what_was_delivered(
    trial: Trial, cluster: Cluster
) -> None:
    """And no relay is there to mend them: who comes is served from elsewhere, or waits."""
    members = await trial.arrive(4)
    for _ in range(10):
        await trial.publish(*trial.rooms)
    await trial.delivered()
    for relay in cluster.relays:
        relay.signal(signal.SIGSTOP)
    async with cluster.client() as client:
        for bus in [key async for key in client.scan_iter("tg:*:bus")]:
            await lag(client, bus, 0.6)
    for member in members:
        trial.links[member.name].cut()
    await trial.arrive(4, late=True)
    await trial.delivered()
    await trial.publish(*trial.rooms)
    for relay in cluster.relays:
        relay.signal(signal.SIGCONT)
    await trial.delivered()
    await trial.must_be_good()


async def test_room_streams_that_lost_their_ends_alone(trial: Trial, cluster: Cluster) -> None:
    """The buses are whole, so no relay mends anything, and the gateway never saw the rooms."""
    await trial.arrive(2)
    for _ in range(8):
        await trial.publish(*trial.rooms)
    await trial.delivered()
    strangers = []
    try:
        async with cluster.client() as client:
            for bus in await cluster.buses():
                for stream in await rooms_of(client, bus.encode()):
                    count = await client.xlen(stream)
                    await shorten(client, stream, trial.random.randint(0, max(count - 1, 0)))
        # The first finds streams without their ends, the second some with holes inside.
        for turn in range(2):
            stranger = await cluster.start(f"stranger-{turn}", "gateway")
            strangers.append(stranger)
            await asyncio.to_thread(stranger.wait_ready)
            member = await trial.make()
            trial.links[member.name].lead_to(stranger.port)
            await member.arrive(late=True)
            await trial.delivered(20, member)
            await trial.publish(*trial.rooms)
            await trial.delivered(20)
        await trial.must_be_good()
    finally:
        for stranger in strangers:
            await asyncio.to_thread(stranger.stop)


async def test_every_stream_loses_another_end(trial: Trial, cluster: Cluster) -> None:
    """Again and again, while messages flow and clients come."""
    await trial.arrive(4)
    trial.write()
    await trial.written(50)
    async with cluster.client() as client:
        for _ in range(6):
            for bus in [key async for key in client.scan_iter("tg:*:bus")]:
                for stream in [bus, *await rooms_of(client, bus)]:
                    count = await client.xlen(stream)
                    await shorten(client, stream, trial.random.randint(count // 2, count))
            trial.random.choice(list(trial.links.values())).cut()
            await trial.arrive(1, late=True)
            await trial.written(20)
    await trial.delivered()
    await trial.must_be_good()


async def test_a_full_redis(trial: Trial, cluster: Cluster) -> None:
    await trial.arrive(4)
    await trial.publish(*trial.rooms)
    await trial.delivered()
    async with cluster.client() as client:
        for _ in range(2):
            before = cluster.logged(FULL, cluster.relays)
            await client.config_set("maxmemory", "1")
            try:
                await trial.publish(*trial.rooms)

                async def noticed(before: int = before) -> bool:
                    return cluster.logged(FULL, cluster.relays) > before

                assert await within(20, noticed)
                await trial.publish(*trial.rooms)

                async def pending() -> bool:
                    return await cluster.sql("SELECT FROM tidegate.outbox") != []

                assert await within(20, pending)
            finally:
                await client.config_set("maxmemory", "0")
            await trial.delivered()
    await trial.must_be_good()


async def test_streams_are_evicted(trial: Trial, cluster: Cluster) -> None:
    """What a wrong maxmemory-policy does, again and again."""
    await trial.arrive(4)
    trial.write()
    await trial.written(50)
    async with cluster.client() as client:
        evicted = (await client.info("stats"))["evicted_keys"]
        await client.config_set("maxmemory-policy", "allkeys-random")
        try:
            for _ in range(10):
                used = (await client.info("memory"))["used_memory"]
                await client.config_set("maxmemory", max(1, used - 20_000))
                await trial.written(10)
        finally:
            await client.config_set("maxmemory", "0")
            await client.config_set("maxmemory-policy", "noeviction")
        assert (await client.info("stats"))["evicted_keys"] > evicted
    await trial.delivered()
    await trial.must_be_good()


async def test_nothing_times_out_while_nothing_happens(trial: Trial, cluster: Cluster) -> None:
    """A read that waits longer than the socket may is an error when idle, or a stall afterwards."""
    await trial.arrive(2)
    await trial.publish(*trial.rooms)
    await trial.delivered()
    timeouts = cluster.logged(TIMEOUT)
    await asyncio.sleep(IDLE_S)
    await trial.publish(*trial.rooms)
    await trial.delivered(5)
    assert cluster.logged(TIMEOUT) == timeouts
    await trial.must_be_good()


async def test_connections_are_killed_in_a_loop(trial: Trial, cluster: Cluster) -> None:
    await trial.arrive(4)
    trial.write()
    async with cluster.client() as client:
        for _ in range(60):
            await trial.written(2)
            await client.client_kill_filter(_type="normal", skipme=True)
    await trial.delivered()
    await trial.must_be_good()


async def test_links_are_reset_in_a_loop(trial: Trial, cluster: Cluster) -> None:
    await trial.arrive(4)
    trial.write()
    for _ in range(60):
        await trial.written(2)
        trial.random.choice(cluster.to_redis()).cut()
    await trial.delivered()
    await trial.must_be_good()


async def test_a_replica_without_the_tail_is_promoted(trial: Trial, cluster: Cluster) -> None:
    """Partial loss: the streams go back by many entries, and on from there."""
    await trial.arrive(4)
    trial.write()
    await trial.written(50)
    first, second = cluster.redis, EmbeddedRedis(password=password_of(cluster.redis))
    async with Link("replica to primary", first.port) as replication:
        await asyncio.to_thread(second.start)
        try:
            for primary, replica in ((first, second), (second, first)):
                await fail_over(trial, cluster, primary, replica, replication)
                await trial.written(50)
                await trial.delivered()
            await trial.must_be_good()
        finally:
            if cluster.redis is not first:
                cluster.lead_to_redis(first)
            await asyncio.to_thread(second.stop)


async def fail_over(
    trial: Trial,
    cluster: Cluster,
    primary: EmbeddedRedis,
    replica: EmbeddedRedis,
    replication: Link,
) -> None:
    """Replicates, stops to replicate, and has the replica go on when it lacks many entries."""
    replication.heal()
    replication.lead_to(primary.port)
    await replicate(primary, replica, replication)
    await trial.written(30)
    replication.freeze()
    await trial.written(60)
    await trial.delivered()
    # Read-only as yet, as after a fail-over that is not complete.
    async with client_of(replica) as client:
        await client.config_resetstat()
    cluster.lead_to_redis(replica)

    async with cluster.client() as client:

        async def refused() -> bool:
            return "errorstat_READONLY" in await client.info("errorstats")

        assert await within(20, refused)
    lagging = await ends(cluster, replica)
    heads = await cluster.heads()
    # The first counts as many as are missing; those committed since only add to it.
    assert sum(heads[shard] - last for shard, last in lagging.items()) >= 30
    await become_primary(cluster)


async def test_the_bus_is_trimmed_under_a_stopped_gateway(trial: Trial, cluster: Cluster) -> None:
    await trial.arrive(4)
    await trial.publish(*trial.rooms)
    await trial.delivered()
    gateway = cluster.gateways[0]
    filled = cluster.logged("hole in a bus", [gateway])
    gateway.signal(signal.SIGSTOP)
    try:
        for _ in range(6):
            await trial.publish(*trial.rooms * 30)

        async def appended() -> bool:
            # In this order: heads read while rows still wait would be passed, and not met.
            waiting = await cluster.sql("SELECT 1 FROM tidegate.outbox LIMIT 1")
            heads = await cluster.heads()
            return not waiting and await ends(cluster, cluster.redis) == {
                shard: head for shard, head in heads.items() if head
            }

        assert await within(30, appended)
        async with cluster.client() as client:
            for bus in await cluster.buses():
                assert await client.xlen(bus) < 300
    finally:
        gateway.signal(signal.SIGCONT)

    async def noticed() -> bool:
        """Its clients may have moved on meanwhile: others can deliver before it looks."""
        return cluster.logged("hole in a bus", [gateway]) > filled

    assert await within(30, noticed)
    await trial.delivered()
    await trial.must_be_good()
