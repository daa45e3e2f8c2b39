"""Relays are killed, stopped, cut off and outvoted: each message is delivered, and once."""

import asyncio
import signal
from collections.abc import Callable

import pytest

from outbox import keys
from outbox.sharding import shard_of
from tests.chaos.cluster import SHARDS, Cluster
from tests.chaos.proxy import Link
from tests.chaos.trial import Trial, within
from tests.processes import Process

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

Fault = Callable[[Link], None]


async def holder(trial: Trial, cluster: Cluster) -> Process:
    """The relay that has the shard of the trial's first room, when both have their share."""
    return (await cluster.shared())[shard_of(*trial.rooms[0], SHARDS, 4)]


async def test_killed_again_and_again(trial: Trial, cluster: Cluster) -> None:
    await trial.arrive(4)
    trial.write()
    for _ in range(2):
        relay = await holder(trial, cluster)
        await trial.written(20)
        await asyncio.to_thread(relay.kill)
        await trial.written(20)
        # The other one has taken over.
        await trial.delivered()
        await asyncio.to_thread(relay.restart)
    await trial.must_be_good()


async def test_both_killed_at_once(trial: Trial, cluster: Cluster) -> None:
    await trial.arrive(4)
    trial.write()
    for _ in range(2):
        await trial.written(30)
        for relay in cluster.relays:
            await asyncio.to_thread(relay.kill)
        await trial.written(30)
        for relay in cluster.relays:
            await asyncio.to_thread(relay.restart)
    await trial.must_be_good()


async def test_stopped_past_the_lease_and_continued(trial: Trial, cluster: Cluster) -> None:
    await trial.arrive(4)
    trial.write()
    for _ in range(2):
        relay = await holder(trial, cluster)
        await trial.written(20)
        relay.signal(signal.SIGSTOP)
        await cluster.shared(1)
        await trial.written(20)
        await trial.delivered()
        relay.signal(signal.SIGCONT)
    await trial.must_be_good()


@pytest.mark.parametrize("fault", [Link.freeze, Link.black_hole, Link.refuse, Link.half_open])
async def test_cut_from_redis(trial: Trial, cluster: Cluster, fault: Fault) -> None:
    await trial.arrive(2)
    trial.write()
    relay = await holder(trial, cluster)
    (link,) = cluster.to_redis([relay])
    await trial.written(20)
    fault(link)
    await trial.written(20)
    # The other one has its shards when the leases are over, or it has made new connections.
    await trial.delivered()
    link.heal()
    await cluster.shared()
    await trial.written(20)
    await trial.must_be_good()


@pytest.mark.parametrize("fault", [Link.freeze, Link.black_hole, Link.refuse, Link.half_open])
async def test_cut_from_postgres(trial: Trial, cluster: Cluster, fault: Fault) -> None:
    await trial.arrive(2)
    trial.write()
    relay = await holder(trial, cluster)
    (link,) = cluster.to_postgres([relay])
    await trial.written(20)
    fault(link)
    await trial.written(20)
    await trial.delivered()
    link.heal()
    await cluster.shared()
    await trial.written(20)
    await trial.must_be_good()


@pytest.mark.parametrize("fault", [Link.freeze, Link.black_hole, Link.refuse, Link.half_open])
async def test_cut_from_postgres_while_asleep(trial: Trial, cluster: Cluster, fault: Fault) -> None:
    """The bell cannot be heard over a dead link."""
    await trial.arrive(2)
    relay = await holder(trial, cluster)
    await trial.publish(*trial.rooms)
    await trial.delivered()
    (link,) = cluster.to_postgres([relay])
    await cluster.asleep()
    fault(link)
    await trial.publish(*trial.rooms)
    await trial.delivered()
    link.heal()
    await cluster.shared()
    await trial.must_be_good()


async def test_backends_are_terminated_in_a_loop(trial: Trial, cluster: Cluster) -> None:
    await trial.arrive(4)
    trial.write()
    terminated = 0
    while terminated < 40:
        await trial.written(3)
        terminated += await cluster.terminate_backends()
    await trial.delivered()
    await trial.must_be_good()


async def test_postgres_restarts(trial: Trial, cluster: Cluster) -> None:
    await trial.arrive(4)
    trial.write()
    await trial.written(50)
    await asyncio.to_thread(cluster.postgres.restart)
    await trial.written(50)
    await trial.delivered()
    await asyncio.to_thread(cluster.postgres.kill)
    await asyncio.to_thread(cluster.postgres.restart)
    await trial.written(50)
    await trial.must_be_good()


async def test_leases_that_contradict_each_other(trial: Trial, cluster: Cluster) -> None:
    """Both relays believe to have the shards: one is stopped in the middle, again and again, and
    goes on with what it had in its hands while the other works."""
    await trial.arrive(4)
    trial.write(4, pause_s=0.01)
    epoch = await cluster.epoch()
    async with cluster.client() as client:
        for _ in range(10):
            await trial.written(8)
            first, second = trial.random.sample(cluster.relays, 2)
            first.signal(signal.SIGSTOP)
            await client.delete(keys.leases(epoch), keys.relays(epoch))
            await trial.written(8)
            second.signal(signal.SIGSTOP)
            first.signal(signal.SIGCONT)
            await client.delete(keys.leases(epoch), keys.relays(epoch))
            await trial.written(8)
            second.signal(signal.SIGCONT)
    await trial.must_be_good()


async def test_writers_need_no_relay(trial: Trial, cluster: Cluster) -> None:
    """Stopped in their sleep, relays are rung for by every commit; dead, by none."""
    await trial.arrive(2)
    await cluster.shared()
    await trial.publish(*trial.rooms)
    await trial.delivered()
    for relay in cluster.relays:
        relay.signal(signal.SIGSTOP)
    trial.write(8, pause_s=0.01)
    await trial.written(500)
    ((usage,),) = await cluster.sql("SELECT pg_notification_queue_usage()")
    assert usage < 0.01
    for relay in cluster.relays:
        await asyncio.to_thread(relay.kill)
    await trial.written(500)

    async def empty() -> bool:
        """The servers of dead relays may still have to notice, and nobody rings meanwhile."""
        return await cluster.sql("SELECT pg_notification_queue_usage()") == [(0.0,)]

    assert await within(20, empty)
    for relay in cluster.relays:
        await asyncio.to_thread(relay.restart)
    await trial.delivered()
    await trial.must_be_good()
