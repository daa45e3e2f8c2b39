"""Processes as the kernel sees them: on which cores they run, what they used."""

import contextlib
import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

NS = 1e-9


@dataclass(frozen=True, slots=True)
class Cores:
    """Who runs where. With two cores, ``rest`` shares that of the load."""

    server: frozenset[int]
    load: frozenset[int]
    rest: frozenset[int]
    all: frozenset[int]


def cores() -> Cores:
    """The server gets the last core for itself, the load the one before it."""
    usable = sorted(os.sched_getaffinity(0))
    server, load = usable[-1], usable[-2] if len(usable) > 1 else usable[-1]
    rest = set(usable) - {server, load} or {load}
    return Cores(frozenset({server}), frozenset({load}), frozenset(rest), frozenset(usable))


def pin(pid: int, to: Iterable[int]) -> None:
    """Bind a process, all its threads and its children, to cores."""
    wanted = set(to)
    for process in (pid, *children(pid)):
        for thread in _threads(process):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, wanted)


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, user and system, of the threads that it has."""
    total = 0
    for thread in _threads(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
    return total * NS


def cpu_of_family_s(pid: int) -> float:
    """The same with all its children that live."""
    return sum(map(cpu_s, (pid, *children(pid))))


def rss_bytes(pid: int) -> int:
    """Memory of a process that is in RAM."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> Iterator[int]:
    """All descendants that live."""
    for thread in _threads(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                yield int(child)
                yield from children(int(child))


def allow_files() -> int:
    """Raise the soft limit of open files to the hard one; gives it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _threads(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []
