"""``python -m tests.chaos --minutes 30 --seed 7``: a long run with a report.

Exits with 1 after a violation. The report is ``report.md`` in a folder of the run's own, by default
below ``.tidegate/chaos``; logs are there, too, and after a violation records and data.
"""

import argparse
import asyncio
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
from tests.chaos.cluster import POSTGRES_SETTINGS, Cluster, prepare_database
from tests.chaos.report import Report
from tests.chaos.run import run
from tests.chaos.schedule import Fault, load, schedule

RELAYS = 2
GATEWAYS = 3
FOLDER = Path(".tidegate/chaos")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="repeats the schedule of a run")
    parser.add_argument("--schedule", type=Path, help="a schedule.jsonl in place of a random one")
    parser.add_argument("--folder", type=Path, help="where report and logs go")
    given = parser.parse_args()
    seed = secrets.randbelow(2**32) if given.seed is None else given.seed
    folder: Path = given.folder or FOLDER / f"{time.strftime('%Y%m%d-%H%M%S')}-seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    duration_s = given.minutes * 60
    faults = (
        load(given.schedule.read_text())
        if given.schedule
        else schedule(seed, duration_s, RELAYS, GATEWAYS)
    )
    report = asyncio.run(chaos(faults, seed, duration_s, folder))
    (folder / "report.md").write_text(report.markdown())
    (folder / "report.json").write_text(report.json())
    if report.good:
        for data in folder.glob("**/cluster"):
            shutil.rmtree(data)
    print(report.markdown().partition("## Schedule")[0])
    print(f"report: {folder / 'report.md'} (logs beside it)")
    return 0 if report.good else 1


async def chaos(faults: Sequence[Fault], seed: int, duration_s: float, folder: Path) -> Report:
    """Starts everything and runs the schedule."""
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:7.1f}] {line}", flush=True)

    with (
        EmbeddedPostgres(folder / "postgres", settings=POSTGRES_SETTINGS) as postgres,
        EmbeddedRedis() as redis,
    ):
        prepare_database(postgres)
        cluster = Cluster(
            folder / "processes",
            postgres,
            postgres.dsn(),
            redis,
            relays=RELAYS,
            gateways=GATEWAYS,
        )
        async with cluster:
            return await run(cluster, faults, seed, duration_s, folder, say)


if __name__ == "__main__":
    sys.exit(main())
