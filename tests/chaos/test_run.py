"""The short form of ``make chaos``: random faults, several at a time, by fixed seeds."""

from pathlib import Path

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.run import run
from tests.chaos.schedule import Fault, schedule

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

DURATION_S = 20.0


@pytest.mark.parametrize("seed", [11, 2026])
async def test_a_short_run(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    faults = schedule(seed, DURATION_S, len(cluster.relays), len(cluster.gateways))
    try:
        report = await run(cluster, faults, seed, DURATION_S, tmp_path, print, clients=8, writers=4)
    finally:
        cluster.heal()
    assert report.good, report.markdown()


SUCCESSION = (
    Fault(1.0, "prepare transactions", "writers", 12.0, 1),
    Fault(2.0, "fail-over", "postgres", 0.5, 2),
    Fault(3.0, "fail-over without the tail", "redis", 2.0, 3),
    Fault(6.0, "restart", "postgres", 0.0, 4),
    Fault(8.0, "fail-over", "postgres", 0.5, 5),
)
"""Both stores are succeeded by other servers, while transactions are prepared."""


async def test_both_stores_are_succeeded(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    postgres, redis = cluster.postgres, cluster.redis
    try:
        report = await run(
            cluster, SUCCESSION, seed, DURATION_S, tmp_path, print, clients=8, writers=6
        )
    finally:
        cluster.heal()
    assert report.good, report.markdown()
    assert report.prepared > 0
    assert cluster.postgres is not postgres
    assert not postgres.alive
    assert cluster.redis is not redis
