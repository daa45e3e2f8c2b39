"""The short form of ``make chaos``: random faults, several at a time, by fixed seeds."""

from pathlib import Path

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.run import run
from tests.chaos.schedule import schedule

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
