"""Child processes that never outlive their parent."""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from gateway.embedded import child

LOOPBACK = "127.0.0.1"
POLL_S = 0.01
SPAWN_TIMEOUT_S = 30.0
LOG_TAIL_BYTES = 4_096


class EmbeddedServerError(Exception):
    """An embedded server cannot be found, started or reached. One line with the remedy."""


class _Spawner:
    """Starts all children from one thread that lives as long as this process.

    PR_SET_PDEATHSIG fires when the *thread* that forked the child ends, not the process: a child
    started from a thread of a pool would die with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None]] | None = None
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._jobs = None

    def popen(self, command: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        answer: Future[subprocess.Popen[bytes]] = Future()

        def job() -> None:
            try:
                answer.set_result(subprocess.Popen(command, **options))  # type: ignore[call-overload]  # noqa: S603
            except BaseException as error:
                answer.set_exception(error)

        with self._lock:
            if self._jobs is None:
                self._jobs = queue.SimpleQueue()
                threading.Thread(
                    target=self._work, args=(self._jobs,), name="spawner", daemon=True
                ).start()
            self._jobs.put(job)
        return answer.result(SPAWN_TIMEOUT_S)

    @staticmethod
    def _work(jobs: "queue.SimpleQueue[Callable[[], None]]") -> None:
        while True:
            jobs.get()()


_SPAWNER = _Spawner()


def start_child(
    command: Sequence[str],
    *,
    death_signal: signal.Signals = signal.SIGKILL,
    identity: str = "same",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    output: int | IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts ``command`` so that it gets ``death_signal`` when this process ends, however it ends.

    ``command[0]`` is an absolute path; ``identity`` is as in :mod:`gateway.embedded.child`. Output
    and errors both go to ``output`` (None: where this process' output goes). The child has a
    process group of its own: Ctrl-C on the terminal reaches only this process, which then stops
    its children in order. Callable from any thread.
    """
    launcher = [sys.executable, "-I", "-S", child.__file__]
    return _SPAWNER.popen(
        [*launcher, str(os.getpid()), str(int(death_signal)), identity, *command],
        env=None if env is None else dict(env),
        cwd=cwd,
        stdin=stdin,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        pass_fds=tuple(pass_fds),
        process_group=0,
    )


def stop_child(
    process: subprocess.Popen[bytes], signals: Sequence[tuple[signal.Signals, float]]
) -> None:
    """Sends each signal and waits up to its seconds for the end; then SIGKILL. Reaps the child."""
    for number, patience_s in signals:
        if process.poll() is not None:
            return
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return
    process.kill()
    process.wait()


def wait_until(
    ready: Callable[[], bool],
    process: subprocess.Popen[bytes],
    log: Path,
    name: str,
    timeout_s: float,
) -> None:
    """Polls ``ready`` until it is true.

    Raises EmbeddedServerError with the end of the log if the process exits before or
    ``timeout_s`` is over.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        status = process.poll()
        if status is not None:
            raise EmbeddedServerError(
                f"{name} exited with status {status} before it was ready: {log_tail(log)}"
            )
        if time.monotonic() > deadline:
            raise EmbeddedServerError(
                f"{name} was not ready within {timeout_s:g} s: {log_tail(log)}"
            )
        time.sleep(POLL_S)


def log_tail(log: Path) -> str:
    """The last lines of a server's log in one line, with the file's name."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    said = " | ".join(line.strip() for line in lines[-3:] if line.strip())
    return f"{said or 'it said nothing'} (log: {log})"


def free_port() -> int:
    """A TCP port of loopback that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def memory_file(text: str) -> Iterator[IO[bytes]]:
    """An open file without a name: what is passed so shows neither in a folder nor in ``ps``."""
    memory = hasattr(os, "memfd_create")
    with os.fdopen(os.memfd_create("input"), "w+b") if memory else tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        file.seek(0)
        yield file


class ChildProcess:
    """A command that may be started again, with its output in one place."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        """Prepares a command; ``log`` None: its output goes where this process' output goes."""
        self._command = list(command)
        self._env = env
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id; 0 before the first start."""
        return 0 if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status; None while it runs or before it was started."""
        return None if self._process is None else self._process.poll()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def restart(self) -> None:
        """Starts it; stops it first (see :meth:`stop`) if it runs."""
        self.stop()
        if self._log is None:
            self._process = start_child(self._command, env=self._env)
            return
        with self._log.open("ab") as log:
            self._process = start_child(self._command, env=self._env, output=log)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Ends it with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait(self, timeout_s: float) -> int | None:
        """The exit status; None if it was never started or runs on after ``timeout_s``."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout_s)
        return None

    def stop(self, patience_s: float = 10.0) -> None:
        """Ends it with SIGTERM, and with SIGKILL after ``patience_s``. Stopped ones wake first."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            stop_child(self._process, [(signal.SIGTERM, patience_s)])
