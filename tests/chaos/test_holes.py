"""Holes in one shard's bus while Postgres is away: clients of other shards notice nothing."""

import asyncio
import signal
import time
from typing import Any

import pytest

from outbox import keys
from outbox.sharding import shard_of
from tests.chaos.cluster import Cluster
from tests.chaos.trial import Trial, within
from tests.oracle import Key
from tests.processes import Process
from tests.system.crowd import Member

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

SOON_S = 4.0
"""Above any latency on a busy machine, below what a read of the log waits for a silent Postgres."""


async def shard(cluster: Cluster, key: Key) -> int:
    ((shards, spread),) = await cluster.sql("SELECT shards, spread FROM tidegate.meta")
    return shard_of(*key, shards, spread)


async def parted(trial: Trial, cluster: Cluster) -> tuple[list[Key], list[Key]]:
    """The rooms of one shard, and those of the others."""
    shards = {key: await shard(cluster, key) for key in trial.rooms}
    chosen = shards[trial.rooms[0]]
    first = [key for key in trial.rooms if shards[key] == chosen]
    return first, [key for key in trial.rooms if key not in first]


async def make_holes(trial: Trial, cluster: Cluster, gateway: Process, rooms: list[Key]) -> int:
    """Entries vanish from the rooms' bus before the gateway reads it; gives how many."""
    bus = keys.bus(await cluster.epoch(), await shard(cluster, rooms[0]))
    gateway.signal(signal.SIGSTOP)
    try:
        # The answer to the read that waits; what comes later stays in Redis.
        await appended(trial, cluster, bus, rooms)
        last, end = await appended(trial, cluster, bus, rooms * 20)
        lost = [f"{seq}-0" for seq in range(last + 2, end, 3)]
        async with cluster.client() as client:
            removed = int(await client.xdel(bus, *lost))
        assert removed == len(lost)
        return removed
    finally:
        gateway.signal(signal.SIGCONT)


async def appended(trial: Trial, cluster: Cluster, bus: str, rooms: list[Key]) -> tuple[int, int]:
    """Publishes to rooms of one shard; gives the bus' last seq before, and with them."""
    async with cluster.client() as client:

        async def last() -> int:
            found: Any = await client.xinfo_stream(bus)
            return int(found["last-generated-id"].partition(b"-")[0])

        before = await last()
        await trial.publish(*rooms)

        async def there() -> bool:
            return await last() == before + len(rooms)

        assert await within(20, there)
        return before, before + len(rooms)


async def mend(cluster: Cluster) -> None:
    """The verdict is to find no holes but unintended ones: relays make the buses anew."""
    async with cluster.client() as client:
        await client.delete(*await cluster.buses())


async def behind(member: Member, rooms: list[Key], trial: Trial) -> bool:
    """Whether the client lacks something in these rooms."""
    heads = {room: sum(m.key == (t, room) for m in trial.committed) for t, room in rooms}
    return any(member.diary.last.get(room, 0) < head for room, head in heads.items())


async def test_a_hole_while_postgres_is_away(trial: Trial, cluster: Cluster) -> None:
    first, others = await parted(trial, cluster)
    members = await trial.arrive(4)
    await trial.publish(*trial.rooms * 2)
    await trial.delivered()
    gateway = cluster.gateways[0]
    (link,) = cluster.to_postgres([gateway])
    link.freeze()
    filled = cluster.logged("hole in a bus", [gateway])
    await make_holes(trial, cluster, gateway, first)

    async def noticed() -> bool:
        return cluster.logged("hole in a bus", [gateway]) > filled

    assert await within(20, noticed)
    watching = [trial.links[m.name] for m in members]
    affected = [
        m for m, link_ in zip(members, watching, strict=True) if link_.targets[0] == gateway.port
    ]
    assert affected
    counts = {m.name: dict(m.diary.last) for m in members}
    latencies_s = []
    for number in range(1, 31):
        began_s = time.monotonic()
        await trial.publish(*others)
        for member in affected:
            for _, room in others:
                goal = counts[member.name].get(room, 0) + number

                async def there(m: Member = member, r: str = room, g: int = goal) -> bool:
                    return m.diary.last.get(r, 0) >= g

                assert await within(SOON_S, there), f"{member.name} waits in {room}"
        latencies_s.append(time.monotonic() - began_s)
        await trial.publish(*first)
    print(f"other shards: at most {max(latencies_s):.3f} s")
    for member in affected:
        assert await behind(member, first, trial), "there was no hole"
    # More than a worker may hold: the shard is read again later.
    for _ in range(8):
        await trial.publish(*(first * 40)[:40], data={"text": "x" * 60_000})
    link.heal()
    await trial.delivered()
    await mend(cluster)
    await trial.must_be_good()


async def test_a_drain_while_a_hole_is_filled(trial: Trial, cluster: Cluster) -> None:
    first, _ = await parted(trial, cluster)
    gateway = cluster.gateways[0]
    (link,) = cluster.to_postgres([gateway])
    for fault in (link.freeze, link.black_hole):
        await trial.arrive(2, late=True)
        await trial.publish(*trial.rooms * 2)
        await trial.delivered()
        filled = cluster.logged("hole in a bus", [gateway])
        fault()
        await make_holes(trial, cluster, gateway, first)

        async def noticed(before: int = filled) -> bool:
            return cluster.logged("hole in a bus", [gateway]) > before

        assert await within(20, noticed)
        began_s = time.monotonic()
        gateway.signal(signal.SIGTERM)
        assert await asyncio.to_thread(gateway.wait, 30) == 0
        assert time.monotonic() - began_s < 5 + 5, "the drain time-out is 5 s"
        link.heal()
        await trial.delivered()
        await cluster.restart(gateway)
    await mend(cluster)
    await trial.must_be_good()
