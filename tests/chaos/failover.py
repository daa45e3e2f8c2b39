"""Servers that are succeeded by another one: a standby of Postgres, a replica of Redis."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
from gateway.embedded.postgres import EPHEMERAL_SETTINGS
from tests.chaos.cluster import Cluster, client_of, password_of
from tests.chaos.proxy import Link
from tests.chaos.trial import within
from tests.operate import standby as standbys

IN_STEP_S = 60.0
READ_ONLY_S = (0.0, 0.5)
"""For so long a replica answers before it knows that it is the new primary."""


@asynccontextmanager
async def postgres_fails_over(cluster: Cluster, pick: random.Random) -> AsyncIterator[None]:
    """Entered, a synchronous standby is made and the primary killed; left, the standby is promoted.

    It is the cluster's Postgres from then on, and the next standby is a copy of it.
    """
    primary = cluster.postgres
    standby = await asyncio.to_thread(_synchronous_standby, cluster, primary)
    try:
        await asyncio.to_thread(standbys.fence, primary)
        yield
    finally:
        await asyncio.to_thread(standbys.promote, standby)
        await cluster.lead_to_postgres(standby)


def _synchronous_standby(cluster: Cluster, primary: EmbeddedPostgres) -> EmbeddedPostgres:
    settings = dict(primary._settings)
    if primary._folder.ephemeral:
        settings |= EPHEMERAL_SETTINGS
    number = sum(1 for _ in cluster.folder.glob("postgres-*")) + 2
    standby, name = standbys.standby_of(primary, cluster.folder / f"postgres-{number}", settings)
    try:
        standbys.make_synchronous(primary, standby, name)
    except BaseException:
        # Else every commit would wait for it.
        standbys.asynchronous_again(primary)
        standby.stop()
        raise
    return standby


@asynccontextmanager
async def redis_fails_over(cluster: Cluster, pick: random.Random) -> AsyncIterator[None]:
    """Entered, a replica follows the primary and stops to; left, it goes on as the primary without
    what came meanwhile, and the old one is stopped."""
    old, new = cluster.redis, EmbeddedRedis(password=password_of(cluster.redis))
    await asyncio.to_thread(new.start)
    cluster.owns(new)
    async with Link("replica to primary", old.port) as replication:
        await replicate(old, new, replication)
        replication.freeze()
        try:
            yield
        finally:
            cluster.lead_to_redis(new)
            # Read-only as yet, as after a fail-over that is not complete.
            await asyncio.sleep(pick.uniform(*READ_ONLY_S))
            await become_primary(cluster)
    await asyncio.to_thread(old.stop)


async def replicate(primary: EmbeddedRedis, replica: EmbeddedRedis, replication: Link) -> None:
    """Has the replica follow the primary over the link, and waits until it is in step."""
    async with client_of(primary) as client:
        await client.config_set("repl-diskless-sync-delay", 0)
    async with client_of(replica) as client:
        await client.config_set("masterauth", password_of(primary))
        # It does not give up the link by itself while it lags.
        await client.config_set("repl-timeout", 600)
        await client.replicaof("127.0.0.1", str(replication.port))

        async def in_step() -> bool:
            found = await client.info("replication")
            return found["master_link_status"] == "up" and not found["master_sync_in_progress"]

        assert await within(IN_STEP_S, in_step), "the replica does not follow its primary"


async def become_primary(cluster: Cluster) -> None:
    async with cluster.client() as client:
        await client.replicaof("NO", "ONE")


async def ends(cluster: Cluster, server: EmbeddedRedis) -> dict[int, int]:
    """Last seq of each bus that the server has."""
    found = {}
    async with client_of(server) as client:
        for bus in await cluster.buses():
            if await client.exists(bus):
                info = await client.xinfo_stream(bus)
                shard = int(bus.partition("}")[0].rpartition(":")[2])
                found[shard] = int(info["last-generated-id"].partition(b"-")[0])
    return found
