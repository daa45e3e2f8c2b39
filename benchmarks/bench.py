"""One run of the benchmarks: how much is done, on which cores, with which servers."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.processor import Cores
from benchmarks.servers import Servers


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is done."""

    runs: int
    work: float
    """Factor on durations and on numbers of messages."""
    crowd: float = 1.0
    """Factor on numbers of clients and rooms."""


FULL = Extent(runs=3, work=1.0)
QUICK = Extent(runs=2, work=0.25)
SMOKE = Extent(runs=1, work=0.01, crowd=0.01)


@dataclass(frozen=True, slots=True)
class Bench:
    """What every scenario is given."""

    extent: Extent
    cores: Cores
    servers: Servers
    random: Random
    folder: Path
    say: Callable[[str], None]

    def runs(self) -> Iterator[int]:
        """The numbers of the runs, each told."""
        for run in range(1, self.extent.runs + 1):
            self.say(f"run {run} of {self.extent.runs}")
            yield run

    @contextmanager
    def spread(self) -> Iterator[None]:
        """Meanwhile servers and writer may use every core, also that of the gateway."""
        try:
            self._pin(self.cores.all)
            yield
        finally:
            self._pin(self.cores.rest)

    def _pin(self, cores: frozenset[int]) -> None:
        self.servers.pin(cores)
        # Not the children: each load and gateway keeps its core.
        os.sched_setaffinity(0, cores)

    def shuffled(self, *items: str) -> list[str]:
        """In an order of this run's own: what comes first is not always the same."""
        return self.random.sample(items, len(items))

    def crowd(self, count: int, least: int = 4) -> int:
        """So many clients or rooms."""
        return count if self.extent.crowd == 1 else max(least, round(count * self.extent.crowd))

    def work(self, count: int, least: int = 2) -> int:
        """So many messages or ticks."""
        return max(least, round(count * self.extent.work))

    def duration_s(self, seconds: float) -> float:
        """So long."""
        return max(0.3, seconds * self.extent.work)
