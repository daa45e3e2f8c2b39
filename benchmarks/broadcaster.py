"""Drives ``starlette_app``."""

import os
import sys
from pathlib import Path
from typing import Self

from benchmarks.program import Program

ROOT = Path(__file__).parents[1]


class Broadcaster:
    """A Starlette application that sends each text of its source to all its clients."""

    def __init__(self, cores: frozenset[int], source: str = "stdin", address: str = "") -> None:
        self._program = Program(
            "starlette_app",
            [sys.executable, "-m", "benchmarks.starlette_app", source],
            cores,
            env={**os.environ, "PYTHONPATH": str(ROOT), "BENCHMARK_ADDRESS": address},
        )
        self.port: int = self._program.answer()["port"]
        self._program.answer()  # it listens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.stop()

    @property
    def pid(self) -> int:
        return self._program.pid

    def send(self, texts: list[bytes]) -> None:
        """Send these texts, each to every client."""
        self._program.tell(b"".join(b"send %d\n%b" % (len(text), text) for text in texts))
