"""Child processes that never outlive their parent, and what all embedded servers share."""

import contextlib
import fcntl
import os
import queue
import shutil
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
LOG_TAIL_BYTES = 4_096
LOCK_WAIT_S = 15.0
"""How long a server of a killed parent may take to go before its folder counts as in use."""

EPHEMERAL_PREFIX = "tidegate-"


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
        return answer.result()

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


class Folder:
    """A server's folder: given and kept, or temporary and removed.

    A lock on it is inherited by the server and all its processes, so it is held exactly as long as
    one of them lives, also when this process is killed.
    """

    def __init__(self, path: Path | None, name: str) -> None:
        """Takes the folder ``path``, or a new temporary one if it is None.

        ``name`` is the server's, for errors and file names. Raises EmbeddedServerError if another
        process uses the folder.
        """
        self.ephemeral = path is None
        if path is None:
            _remove_left_over(name)
            self.path, self.lock_fd = _temporary(name)
            return
        self.path = path.absolute()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.lock_fd = _open_lock(self.path)
        except OSError as error:
            raise EmbeddedServerError(
                f"cannot use folder {self.path} for {name}: {error.strerror}; give another folder"
            ) from None
        try:
            self._take_lock(name)
        except BaseException:
            os.close(self.lock_fd)
            raise

    def _take_lock(self, name: str) -> None:
        deadline = time.monotonic() + LOCK_WAIT_S
        while not _try_lock(self.lock_fd):
            text = os.pread(self.lock_fd, 32, 0).decode(errors="replace")
            owner = int(text) if text.isdigit() else 0
            if time.monotonic() > deadline or (owner and _alive(owner)):
                raise EmbeddedServerError(
                    f"folder {self.path} is in use: process {owner or 'unknown'} runs {name} in it;"
                    " stop that one or give another folder"
                )
            time.sleep(POLL_S)
        os.ftruncate(self.lock_fd, 0)
        os.pwrite(self.lock_fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Ends the use of the folder; removes it if it is temporary."""
        if self.ephemeral:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock_fd)


def _temporary(name: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{EPHEMERAL_PREFIX}{name.lower()}-"))
        with contextlib.suppress(FileNotFoundError):
            fd = _open_lock(path)
            # Another process may have taken the folder for a left-over before it was locked.
            if _try_lock(fd) and os.fstat(fd).st_nlink:
                return path, fd
            os.close(fd)


def _open_lock(folder: Path) -> int:
    return os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove_left_over(name: str) -> None:
    """Removes temporary folders of this user whose processes were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{EPHEMERAL_PREFIX}{name.lower()}-*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.geteuid():
                continue
            fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _try_lock(fd):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)
