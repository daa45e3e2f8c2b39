"""Everything at once on one machine: servers, relays and gateways as child processes.

``tidegate dev`` calls :func:`run`. An application that wants the whole in one piece (the demo, a
test) uses :class:`Stack`::

    with Stack(StackOptions(folder=None, gateways=2)) as stack:
        stack.postgres_dsn            # 'postgresql://postgres:…@127.0.0.1:54321/postgres'
        stack.redis_url               # 'redis://:…@127.0.0.1:43210/0'
        stack.environment             # TIDEGATE_* of all children, secrets included
        stack.gateway_urls            # ('http://127.0.0.1:8000', 'http://127.0.0.1:8001')
        stack.processes               # (ProcessState(name='relay-1', status='running', …), …)
        stack.kill("gateway-1")       # SIGKILL; stays down …
        stack.restart("gateway-1")    # … until this (which also stops one that runs)
        stack.crash("relay-1")        # SIGKILL; supervision starts it again by itself

Children are named ``relay-1`` …, ``gateway-1`` …, and, if they are embedded, ``postgres`` and
``redis``. ``Stack`` is synchronous and may be called from any thread; its methods wait for
processes to end and servers to start (a second at most, ``start`` longer), so asynchronous code
calls them by ``asyncio.to_thread``.
"""

import contextlib
import os
import queue
import secrets
import shlex
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from gateway.embedded import EmbeddedPostgres, EmbeddedRedis, EmbeddedServerError
from gateway.embedded.folder import Folder
from gateway.embedded.process import LOOPBACK, ChildProcess, log_tail
from gateway.embedded.supervisor import NotReady, ProcessState, Supervisor
from gateway.stores import POSTGRES_DSN, REDIS_URL, postgres_of, redis_of, try_redis
from outbox.migrations import migrate

READY_TIMEOUT_S = 60.0
STOP_PATIENCE_S = 10.0
PROBE_TIMEOUT_S = 1.0
LOOK_S = 0.1  # how often a stop looks whether it is to hurry

TOKEN_HMAC_SECRET = "TIDEGATE_TOKEN_HMAC_SECRET"  # noqa: S105 - a setting's name
API_KEY = "TIDEGATE_API_KEY"


class StackError(Exception):
    """The stack cannot be started. One line with the remedy."""


def write_line(line: str) -> None:
    """Progress for a person, on standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What to start."""

    folder: Path | None = Path(".tidegate")
    """Where data, secrets and logs are kept between runs; None: nothing is kept (ephemeral)."""
    port: int = 8000
    """Port of the first gateway; the others take the next ones. 0: free ones."""
    gateways: int = 1
    relays: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment (``TIDEGATE_…``) for all children, above this process' own."""
    logs_to_files: bool = True
    """Logs of the children: ``logs/<name>.log`` in the folder, or this process' own output."""


class Stack:
    """Postgres, Redis, relays and gateways, started in order, watched, and stopped in order.

    Servers that TIDEGATE_POSTGRES_DSN and TIDEGATE_REDIS_URL name (in ``options.settings`` or the
    environment) are used as they are; the others are embedded. A child that dies is started again
    after a jittered back-off, unless it was killed by :meth:`kill`. All children die with this
    process.
    """

    def __init__(self, options: StackOptions, progress: Callable[[str], None] = write_line) -> None:
        """Prepares a stack; ``progress`` gets lines for a person, also from other threads."""
        self._options = options
        self._progress = progress
        self._environment: dict[str, str] = {}
        self._folder: Folder | None = None
        self._servers: list[EmbeddedPostgres | EmbeddedRedis] = []
        self._children: dict[str, ChildProcess] = {}
        self._ports: list[int] = []
        self._supervisor = Supervisor(progress)
        self._interrupts = 0
        self._interruptible = False

    @property
    def environment(self) -> Mapping[str, str]:
        """The TIDEGATE_* settings that children get."""
        return self._environment

    @property
    def postgres_dsn(self) -> str:
        """Connection string of the database with the outbox."""
        return self._environment[POSTGRES_DSN]

    @property
    def redis_url(self) -> str:
        """URL of Redis."""
        return self._environment[REDIS_URL]

    @property
    def token_hmac_secret(self) -> str:
        """Secret with which client tokens are signed."""
        return self._environment[TOKEN_HMAC_SECRET]

    @property
    def api_key(self) -> str:
        """Key of ``POST /api/publish``."""
        return self._environment[API_KEY]

    @property
    def folder(self) -> Path:
        """Where data and logs are."""
        if self._folder is None:
            raise StackError("the stack is not started: call start() first")
        return self._folder.path

    @property
    def gateway_urls(self) -> tuple[str, ...]:
        """``http://127.0.0.1:PORT`` of each gateway, in order."""
        return tuple(f"http://{LOOPBACK}:{port}" for port in self._ports)

    @property
    def processes(self) -> tuple[ProcessState, ...]:
        """All children as they are now: servers, relays, gateways."""
        return self._supervisor.states

    def log(self, name: str) -> Path:
        """The log file of a relay or a gateway (if ``logs_to_files``)."""
        return self.folder / "logs" / f"{name}.log"

    def kill(self, name: str) -> None:
        """Ends a child with SIGKILL; it stays down until :meth:`restart`. Raises UnknownProcess."""
        self._supervisor.kill(name)

    def crash(self, name: str) -> None:
        """Ends a child with SIGKILL as if by itself: it is started again after its back-off."""
        self._supervisor.crash(name)

    def restart(self, name: str) -> None:
        """Starts a child again; one that runs gets SIGTERM first, and drains."""
        self._supervisor.restart(name)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Waits until all children that are not killed on purpose run, and gateways are ready.

        Raises NotReady.
        """
        self._supervisor.wait_ready(timeout_s)

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
        """Starts everything and waits until it is ready.

        Raises StackError, EmbeddedServerError, or what the first use of a given store raises.
        """
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        self._ports = _free_ports(self._options)
        self._folder = Folder(self._options.folder, "Tidegate")
        given = {n: v for n, v in os.environ.items() if n.startswith("TIDEGATE_")}
        given |= self._options.settings
        given[POSTGRES_DSN] = given.get(POSTGRES_DSN) or self._embed_postgres()
        given[REDIS_URL] = given.get(REDIS_URL) or self._embed_redis()
        self._tell_stores(given)
        if self._ports:
            # Where the commands of another shell find the first gateway; each is told its own.
            given["TIDEGATE_PORT"] = str(self._ports[0])
        for name in (TOKEN_HMAC_SECRET, API_KEY):
            given[name] = given.get(name) or self._secret(name)
        self._environment = given
        self._write_environment()
        with self._interruptions():
            try_redis(self.redis_url)
            migrate(self.postgres_dsn)
        for number in range(1, self._options.relays + 1):
            self._add(f"relay-{number}", "relay", None)
        for number, port in enumerate(self._ports, 1):
            self._add(f"gateway-{number}", "gateway", port)
        try:
            with self._interruptions():
                self.wait_ready()
        except NotReady as error:
            raise StackError(f"{error}: {self._last_words(error.name)}") from None

    def interrupt(self) -> None:
        """For handlers of signals, in the thread that called :meth:`start` or :meth:`stop`.

        Ends ``start`` with KeyboardInterrupt as soon as nothing gets lost by it. From the second
        time on ``stop`` does not wait for connections to be drained; it is never cut short.
        """
        self._interrupts += 1
        if self._interruptible:
            self._interruptible = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def _interruptions(self) -> Iterator[None]:
        """Around what may be left at any point."""
        self._interruptible = True
        try:
            if self._interrupts:
                raise KeyboardInterrupt
            yield
        finally:
            self._interruptible = False

    def _embed_postgres(self) -> str:
        folder = None if self._options.folder is None else self.folder / "postgres"
        server = EmbeddedPostgres(folder, progress=self._progress)
        self._servers.append(server)
        server.start()
        self._supervisor.add("postgres", "postgres", server, port=server.port)
        return server.dsn()

    def _embed_redis(self) -> str:
        folder = None if self._options.folder is None else self.folder / "redis"
        server = EmbeddedRedis(folder)
        self._servers.append(server)
        server.start()
        self._supervisor.add("redis", "redis", server, port=server.port)
        return server.url

    def _tell_stores(self, given: Mapping[str, str]) -> None:
        embedded = {state.name: f"embedded, port {state.port}" for state in self.processes}
        try:
            postgres = embedded.get("postgres") or postgres_of(given[POSTGRES_DSN])
            redis = embedded.get("redis") or redis_of(given[REDIS_URL])
        except ValueError as error:
            raise StackError(str(error)) from None
        self._progress(f"postgres  {postgres}")
        self._progress(f"redis     {redis}")

    def _secret(self, name: str) -> str:
        """Made once and kept in the folder, so that tokens outlive a restart."""
        path = self.folder / name.removeprefix("TIDEGATE_").lower()
        if not path.exists():
            _write_private(path, secrets.token_urlsafe(32))
        return path.read_text()

    def _write_environment(self) -> None:
        """For commands in another shell: ``set -a; . .tidegate/environment; set +a``."""
        lines = [f"{n}={shlex.quote(v)}\n" for n, v in sorted(self._environment.items())]
        _write_private(self.folder / "environment", "".join(lines))

    def _add(self, name: str, kind: str, port: int | None) -> None:
        command = [sys.executable, "-m", "gateway", kind]
        if port is not None:
            command += ["--port", str(port)]
        log = self.log(name) if self._options.logs_to_files else None
        if log is not None:
            log.parent.mkdir(exist_ok=True)
            log.unlink(missing_ok=True)
        child = ChildProcess(command, os.environ | self._environment, log)
        self._children[name] = child
        self._supervisor.add(name, kind, child, port=port, ready=lambda: _is_ready(port))

    def _last_words(self, name: str) -> str:
        if not self._options.logs_to_files or name not in self._children:
            return "see its log above"
        return log_tail(self.log(name))

    def stop(self) -> None:
        """Stops all children, gateways first; removes what is not to be kept. May be repeated."""
        self._supervisor.stop_watching()
        # All are told at once, and share the time that they may take.
        deadline = time.monotonic() + STOP_PATIENCE_S
        for child in reversed(self._children.values()):
            child.signal(signal.SIGCONT)
            child.signal(signal.SIGTERM)
        for child in self._children.values():
            while child.wait(LOOK_S) is None and child.alive:
                if self._interrupts > 1 or time.monotonic() > deadline:
                    child.kill()
        for server in reversed(self._servers):
            server.stop()
        if self._folder is not None:
            self._folder.release()
            self._folder = None


def run(options: StackOptions, progress: Callable[[str], None] = write_line) -> None:
    """``tidegate dev``: a stack until SIGINT or SIGTERM. Call it from the main thread.

    More signals hasten the end; whatever comes, a temporary folder is removed.

    Raises StackError, EmbeddedServerError, or what the first use of a given store raises.
    """
    # Unlike an event, it may be told something while it is asked.
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    stack = Stack(options, progress)

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.put(number)
        stack.interrupt()

    # For good: what comes while this process ends is not to interrupt it either.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    try:
        stack.start()
        _tell(stack, progress)
        signals.get()
        progress("stopping")
    except KeyboardInterrupt:
        progress("stopped before all was started")
    finally:
        stack.stop()


def _tell(stack: Stack, progress: Callable[[str], None]) -> None:
    """What one needs to use it."""
    urls = [f"{url.replace('http', 'ws', 1)}/connection/websocket" for url in stack.gateway_urls]
    for url in urls:
        progress(f"gateway   {url}")
    progress(f"settings  set -a; . {shlex.quote(str(stack.folder / 'environment'))}; set +a")
    progress(f"then      tidegate tail acme orders:42{f' --url {urls[0]}' if urls else ''}")
    progress("Ctrl-C stops everything.")


def _free_ports(options: StackOptions) -> list[int]:
    """The gateways' ports, each proved to be free. Raises StackError."""
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for number in range(options.gateways):
            wanted = options.port + number if options.port else 0
            probe = held.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, wanted))
            except (OSError, OverflowError) as error:
                raise StackError(
                    f"cannot listen on port {wanted} ({error}): give another one with --port"
                ) from None
            ports.append(probe.getsockname()[1])
    return ports


def _is_ready(port: int | None) -> bool:
    """Whether a gateway answers 200 to ``/readyz``; a relay (no port) is ready when it runs."""
    if port is None:
        return True
    try:
        url = f"http://{LOOPBACK}:{port}/readyz"
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S) as answer:
            ready: bool = answer.status == 200
            return ready
    except OSError:
        return False


def _write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner may read, in one piece."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.unlink(missing_ok=True)
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    unfinished.rename(path)


__all__ = ["EmbeddedServerError", "ProcessState", "Stack", "StackError", "StackOptions", "run"]
