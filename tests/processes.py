"""Processes of Tidegate under test: started, awaited, killed, and their logs looked through."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from gateway.embedded.process import ChildProcess, free_port

READY_TIMEOUT_S = 60.0
STOP_PATIENCE_S = 20.0
POLL_S = 0.02


def wait_until(ready: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Polls until ``ready``; fails when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(POLL_S)


def is_gone(pid: int) -> bool:
    """Whether the process has ended; a zombie has, too, until its new parent notices."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal; true also where that cannot be told."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    mask = re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)
    return mask is None or bool(int(mask[1], 16) >> (number - 1) & 1)


class Process(ChildProcess):
    """One started process with its log."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path) -> None:
        super().__init__(command, env, log)
        self.name = name
        self.log = log
        self.port = 0
        self.tracebacks_allowed = False
        """Set it in a test that provokes one on purpose."""
        self.restart()

    @property
    def url(self) -> str:
        """``http://…`` of a gateway."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def websocket_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/connection/websocket"

    def text(self) -> str:
        """All that it has written so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, ready: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Polls until ``ready``; fails if the process ends before or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self.returncode is not None:
                raise AssertionError(
                    f"{self.name} ended ({self.returncode}) before {what}:\n{self.text()[-3000:]}"
                )
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{self.name}: no {what} within {timeout_s} s:\n{self.text()[-3000:]}"
                )
            time.sleep(POLL_S)

    def wait_log(self, pattern: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Waits until the log has a match of the regular expression."""
        self.wait_for(
            lambda: re.search(pattern, self.text()) is not None, timeout_s, f"log of {pattern!r}"
        )

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Waits until a gateway's ``/readyz`` answers 200."""
        self.wait_for(lambda: _status(f"{self.url}/readyz") == 200, timeout_s, "200 from /readyz")


class Processes:
    """All processes that one test started, by name."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._reserved: list[socket.socket] = []
        self.all: dict[str, Process] = {}

    def start(self, name: str, *arguments: str, **settings: str) -> Process:
        """Starts ``python -m gateway ARGUMENT…`` with settings as environment variables.

        ``start("relay-1", "relay", TIDEGATE_POSTGRES_DSN=migrated, TIDEGATE_REDIS_URL=redis_url)``
        """
        return self.start_python(name, "-m", "gateway", *arguments, **settings)

    def start_python(self, name: str, *arguments: str, **settings: str) -> Process:
        """The same for any other ``python ARGUMENT…``."""
        assert name not in self.all, f"a process {name} exists"
        env = dict(os.environ, PYTHONUNBUFFERED="1", PYTHONFAULTHANDLER="1", **settings)
        process = Process(
            name, [sys.executable, *arguments], env, self._folder / f"{len(self.all)}-{name}.log"
        )
        self.all[name] = process
        return process

    def reserve_port(self) -> int:
        """A free port of loopback that nobody else is given while these processes are there.

        A socket is bound to it and does not listen: so Linux lets another one that asks for this
        very port listen at it, now and after each new start, but picks it for nobody.
        """
        if sys.platform != "linux":
            return free_port()
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        self._reserved.append(held)
        port: int = held.getsockname()[1]
        return port

    def start_relay(self, name: str = "relay", **settings: str) -> Process:
        return self.start(name, "relay", **settings)

    def start_gateway(self, name: str = "gateway", *arguments: str, **settings: str) -> Process:
        """Starts a gateway on a free port and waits until it is ready."""
        port = self.reserve_port()
        process = self.start(name, "gateway", "--port", str(port), *arguments, **settings)
        process.port = port
        process.wait_ready()
        return process

    def stop(self) -> None:
        for process in self.all.values():
            process.stop(STOP_PATIENCE_S)
        for held in self._reserved:
            held.close()
        self._reserved.clear()

    def check_logs(self) -> None:
        """Fails if one of them has written a traceback that the test did not announce."""
        for process in self.all.values():
            if not process.tracebacks_allowed and "Traceback" in process.text():
                raise AssertionError(f"{process.name} wrote a traceback:\n{process.text()[-8000:]}")


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


SERVERS_PARENT = """
import signal, sys
from pathlib import Path
from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
with EmbeddedPostgres(folder) as postgres, EmbeddedRedis() as redis:
    print(postgres.pid, redis.pid, postgres.dsn(), flush=True)
    signal.pause()
"""
"""Runs both servers (Postgres in the given folder); prints their process ids and the DSN."""


def start_parent(program: str, *arguments: str) -> tuple[subprocess.Popen[str], list[str]]:
    """A Python program in a process of its own, and the words of its first line of output."""
    parent = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    return parent, parent.stdout.readline().split()
