"""A peer's server: a program with a log and a port."""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.processor import pin
from benchmarks.servers import NotReady, wait_until
from gateway.embedded.process import LOOPBACK, ChildProcess, log_tail


def accepts(port: int) -> bool:
    """Whether someone listens there."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1):
            return True
    except OSError:
        return False


@contextmanager
def server(
    command: Sequence[str], cores: frozenset[int], log: Path, ready: Callable[[], bool]
) -> Iterator[ChildProcess]:
    """Run it on these cores; it is ready when the block begins. Raises NotReady."""
    # A Go program takes its number of threads from the cores that it has at the start.
    process = ChildProcess(command, {**os.environ, "GOMAXPROCS": str(len(cores))}, log)
    process.restart()
    try:
        pin(process.pid, cores)

        def up() -> bool:
            if not process.alive:
                raise NotReady(f"{Path(command[0]).name} has ended: {log_tail(log)}")
            return ready()

        wait_until(up, f"start of {Path(command[0]).name}")
        pin(process.pid, cores)  # threads that it has started meanwhile
        yield process
    finally:
        process.kill()
