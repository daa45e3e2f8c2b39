"""A server's folder: given and kept, or temporary and removed; used by one at a time."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from gateway.embedded.process import POLL_S, EmbeddedServerError

LOCK_WAIT_S = 15.0
"""How long a server of a killed parent may take to go before its folder counts as in use."""

EPHEMERAL_PREFIX = "tidegate-"


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
        self._name = name
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
            self._take_lock()
        except BaseException:
            os.close(self.lock_fd)
            raise

    def take_again(self) -> None:
        """Waits until the processes of a killed server are gone.

        Raises EmbeddedServerError if they do not go.
        """
        os.ftruncate(self.lock_fd, 0)
        os.close(self.lock_fd)
        self.lock_fd = _open_lock(self.path)
        self._take_lock()

    def _take_lock(self) -> None:
        deadline = time.monotonic() + LOCK_WAIT_S
        while not _try_lock(self.lock_fd):
            text = os.pread(self.lock_fd, 32, 0).decode(errors="replace")
            owner = int(text) if text.isdigit() else 0
            if time.monotonic() > deadline or (owner and _alive(owner)):
                raise EmbeddedServerError(
                    f"folder {self.path} is in use: process {owner or '?'} runs {self._name} in "
                    "it; stop that one or give another folder"
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
