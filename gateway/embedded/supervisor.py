"""Watches over child processes and servers: starts again what dies, unless it was killed."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gateway.embedded.process import EmbeddedServerError

WATCH_INTERVAL_S = 0.1
BACK_OFF_FIRST_S = 0.2
BACK_OFF_MAX_S = 10.0
STEADY_AFTER_S = 30.0
"""What lived so long is taken for healthy: its next back-off begins small again."""

GIVE_UP_STARTS = 4

Status = Literal["starting", "running", "killed", "dead"]


class UnknownProcess(EmbeddedServerError):
    """There is no process of that name."""


class NotReady(EmbeddedServerError):
    """A process does not stay up, or does not answer in time."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        """Of the process."""
        super().__init__(f"{name} {reason}")


class Restartable(Protocol):
    """What can be watched: a child process or an embedded server."""

    @property
    def pid(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    @property
    def returncode(self) -> int | None: ...
    def kill(self) -> None:
        """Ends it with SIGKILL."""

    def restart(self) -> None:
        """Starts it, and stops it first if it runs."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A watched process as it is now."""

    name: str
    kind: str
    port: int | None
    pid: int
    status: Status
    """``killed``: on purpose, stays down; ``dead``: by itself, will be started again."""
    starts: int
    """How often it has been started."""


@dataclass(slots=True)
class _Watched:
    name: str
    kind: str
    port: int | None
    target: Restartable
    ready: Callable[[], bool]
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while it is started or ended."""
    killed: bool = False
    answered: bool = False
    starts: int = 0
    started_at_s: float = 0.0
    failures: int = 0
    start_again_at_s: float | None = None

    @property
    def status(self) -> Status:
        if self.target.alive:
            return "running" if self.answered else "starting"
        return "killed" if self.killed else "dead"

    def start(self) -> None:
        self.answered = False
        self.start_again_at_s = None
        self.starts += 1
        self.started_at_s = time.monotonic()
        self.target.restart()
        self.killed = False


class Supervisor:
    """All watched processes by name, in the order in which they were added.

    Callable from any thread. A thread of its own looks at them ten times a second.
    """

    def __init__(self, progress: Callable[[str], None]) -> None:
        """``progress`` gets a line whenever a process has died."""
        self._progress = progress
        self._watched: dict[str, _Watched] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def states(self) -> tuple[ProcessState, ...]:
        """All processes as they are now."""
        return tuple(
            ProcessState(w.name, w.kind, w.port, w.target.pid, w.status, w.starts)
            for w in list(self._watched.values())
        )

    def add(
        self,
        name: str,
        kind: str,
        target: Restartable,
        *,
        port: int | None = None,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Watches ``target``, and starts it if it does not run. ``ready``: whether it serves."""
        watched = _Watched(name, kind, port, target, ready)
        if target.alive:
            watched.starts, watched.started_at_s = 1, time.monotonic()
        else:
            watched.start()
        self._watched[name] = watched
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
            self._thread.start()

    def kill(self, name: str) -> None:
        """Ends a process with SIGKILL; it stays down until :meth:`restart`."""
        watched = self._find(name)
        with watched.lock:
            watched.killed = True
            watched.target.kill()

    def crash(self, name: str) -> None:
        """Ends a process with SIGKILL as if by itself: it is started again after its back-off."""
        watched = self._find(name)
        with watched.lock:
            watched.target.kill()

    def restart(self, name: str) -> None:
        """Starts a process again; one that runs is asked to stop first, and may drain."""
        watched = self._find(name)
        with watched.lock:
            if not self._stopping.is_set():
                watched.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until all that are not killed on purpose are ready. Raises NotReady."""
        deadline = time.monotonic() + timeout_s
        while waiting := [s for s in self.states if s.status in ("starting", "dead")]:
            for state in waiting:
                if state.starts >= GIVE_UP_STARTS and state.status == "dead":
                    raise NotReady(state.name, f"ended {state.starts} times instead of serving")
                if time.monotonic() > deadline:
                    raise NotReady(state.name, f"was not ready within {timeout_s:g} s")
            self._stopping.wait(WATCH_INTERVAL_S / 2)

    def stop_watching(self) -> None:
        """From here on nothing is started again. The processes themselves are not touched."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _find(self, name: str) -> _Watched:
        try:
            return self._watched[name]
        except KeyError:
            names = ", ".join(self._watched)
            raise UnknownProcess(f"there is no process {name!r}: there are {names}") from None

    def _watch(self) -> None:
        while not self._stopping.wait(WATCH_INTERVAL_S):
            for watched in list(self._watched.values()):
                if watched.lock.acquire(blocking=False):
                    try:
                        self._look_after(watched)
                    finally:
                        watched.lock.release()

    def _look_after(self, watched: _Watched) -> None:
        now_s = time.monotonic()
        if watched.target.alive:
            watched.answered = watched.answered or watched.ready()
        elif watched.killed:
            return
        elif watched.start_again_at_s is None:
            steady = now_s - watched.started_at_s > STEADY_AFTER_S
            watched.failures = 0 if steady else watched.failures + 1
            pause_s = _back_off_s(watched.failures)
            watched.start_again_at_s = now_s + pause_s
            status = watched.target.returncode or 0
            ended = f"signal {-status}" if status < 0 else f"status {status}"
            self._progress(f"{watched.name} ended with {ended}; starts again in {pause_s:.1f} s")
        elif now_s >= watched.start_again_at_s:
            try:
                watched.start()
            except (EmbeddedServerError, OSError) as error:
                self._progress(f"{watched.name} cannot be started: {error}")


def _back_off_s(failures: int) -> float:
    longest_s: float = min(BACK_OFF_MAX_S, BACK_OFF_FIRST_S * 2.0 ** min(failures, 10))
    return longest_s * random.uniform(0.5, 1.0)
