"""A child process that is told lines and answers with lines of JSON."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.processor import pin
from gateway.embedded.process import start_child, stop_child

ANSWER_TIMEOUT_S = 60.0


class ProgramFailed(Exception):
    """A program ended, or did not answer in time."""


class Program:
    """One running program, bound to ``cores``. It ends with this process."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        cores: frozenset[int],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._process = start_child(command, stdin=subprocess.PIPE, output=subprocess.PIPE, env=env)
        pin(self._process.pid, cores)
        self._held = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, line: str, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Tell it a line and wait for its answer. Raises ProgramFailed."""
        self.tell(f"{line}\n".encode())
        return self.answer(timeout_s)

    def tell(self, data: bytes) -> None:
        """Write to its standard input."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ProgramFailed(f"{self.name} has ended: {self._last_words()}") from None

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """The next line that it says. Raises ProgramFailed."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._held:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                raise ProgramFailed(f"{self.name} did not answer within {timeout_s:g} s")
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                raise ProgramFailed(f"{self.name} has ended: {self._last_words()}")
            self._held += part
        line, _, self._held = self._held.partition(b"\n")
        try:
            said: dict[str, Any] = json.loads(line)
        except ValueError:
            raise ProgramFailed(f"{self.name}: {line.decode(errors='replace')}") from None
        return said

    def stop(self) -> None:
        """End it. May be repeated."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        stop_child(self._process, [(signal.SIGTERM, 5.0)])
        self._process.stdout.close()

    def _last_words(self) -> str:
        return self._held.decode(errors="replace").strip()[-500:] or "it said nothing"
