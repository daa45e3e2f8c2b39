"""``python -m benchmarks [NAME …] [--quick] [--output DIR]``: run scenarios, write a report."""

import argparse
import importlib
import inspect
import os
import secrets
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from random import Random

from benchmarks import report
from benchmarks.bench import FULL, QUICK, SMOKE, Bench
from benchmarks.figures import Result
from benchmarks.machine import facts
from benchmarks.native import NoCompiler, compiled
from benchmarks.processor import allow_files, cores
from benchmarks.scenarios import PEERS, SCENARIOS
from benchmarks.servers import Servers


def main() -> int:
    given = _arguments()
    # Ends as from an exception: servers are stopped, folders removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for name in ("load", "floor"):
            compiled(name)
    except NoCompiler as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        return 2
    files = allow_files()
    seed: int = secrets.randbelow(2**32) if given.seed is None else given.seed
    extent = SMOKE if given.smoke else QUICK if given.quick else FULL
    if given.runs is not None:
        extent = replace(extent, runs=given.runs)
    started = time.monotonic()
    where = cores()
    os.sched_setaffinity(0, where.rest)

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:7.1f}] {line}", flush=True)

    results: list[Result] = []
    failed: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder,
        Servers(Path(folder), where.rest, fsync=given.fsync, source=given.servers) as servers,
    ):
        known = {
            **facts(servers.postgres.dsn(), servers.redis.url, len(where.all)),
            "open files": str(files),
            "seed": str(seed),
            "extent": f"{extent.runs} runs, work x {extent.work:g}, crowd x {extent.crowd:g}",
            "cores of": f"server {set(where.server)}, load {set(where.load)}, "
            f"rest {set(where.rest)}",
        }
        for name in given.names or SCENARIOS:
            say(name)
            scenario = importlib.import_module(f"benchmarks.scenarios.{name}")
            # Its choices do not depend on which scenarios came before.
            bench = Bench(extent, where, servers, Random(f"{seed} {name}"), Path(folder), say)
            result = Result(name, inspect.getdoc(scenario) or "", judged=not given.smoke)
            results.append(result)
            try:
                scenario.run(bench, result)
            except Exception as error:
                result.notes.append(f"Failed: {type(error).__name__}: {error}")
                say(f"failed: {type(error).__name__}: {error}")
                failed.append(name)
                if given.smoke:
                    raise
            page = report.write(given.output, known, results)
    print(f"report: {page}")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*SCENARIOS, *PEERS)))
    parser.add_argument("--quick", action="store_true", help="two runs of a quarter of the work")
    parser.add_argument("--smoke", action="store_true", help="tiny: shows only that it runs")
    parser.add_argument("--runs", type=int, help="so many runs of each")
    parser.add_argument("--fsync", action="store_true", help="let Postgres wait for the disk")
    parser.add_argument(
        "--servers",
        choices=("any", "machine", "wheel"),
        default="any",
        help="where Postgres and Redis come from",
    )
    parser.add_argument("--seed", type=int, help="repeats the choices of a run")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    given = parser.parse_args()
    for name in given.names:
        if name not in (*SCENARIOS, *PEERS):
            parser.error(f"there is no {name}: there are {', '.join((*SCENARIOS, *PEERS))}")
    return given


if __name__ == "__main__":
    sys.exit(main())
