"""A Postgres server of our own: made, started, watched, stopped."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from gateway.embedded.folder import Folder
from gateway.embedded.process import (
    LOOPBACK,
    EmbeddedServerError,
    free_port,
    log_tail,
    memory_file,
    start_child,
    stop_child,
    wait_until,
)
from gateway.embedded.programs import Programs, Source, find_programs
from gateway.embedded.seat import Seat, take_seat

USER = "postgres"
READY_TIMEOUT_S = 60.0
INITDB_TIMEOUT_S = 120.0
PORT_ATTEMPTS = 5
READY_STATES = ("ready", "standby")
"""As the postmaster writes them; the second is that of a standby that takes readers."""
STOP_SIGNALS = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0))
"""Fast shutdown, then immediate shutdown, each with the seconds that it may take."""

SETTINGS: dict[str, str] = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",
    "cluster_name": "tidegate",
    "max_connections": "200",
    "jit": "off",
    # The log must not show payloads: no statement, no parameters and no row of a failed check.
    "log_min_error_statement": "panic",
    "log_error_verbosity": "terse",
}
EPHEMERAL_SETTINGS: dict[str, str] = {"fsync": "off", "full_page_writes": "off"}


class EmbeddedPostgres:
    """A running Postgres server, stopped at the end of the ``with`` block.

    It listens on a free port of 127.0.0.1 and asks for a password (SCRAM), which is made at random
    and kept in the folder. Databases are UTF8 with locale C. The server does a clean shutdown when
    the process that started it is gone, however that ended.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        source: Source = "any",
        user_namespace: bool | None = None,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Prepares a server on ``folder``, which is kept; None: temporary, fast, not crash-safe.

        ``settings`` are added to Postgres' configuration. ``source`` says where to look for its
        programs. ``user_namespace`` says how to leave root if this process is root (None: a user
        namespace where the system allows one, else the user ``nobody``). ``progress`` is called
        with a line for a person before what takes long.
        """
        self._given = folder
        self._settings = dict(settings or {})
        self._source = source
        self._user_namespace = user_namespace
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._held: Folder | None = None
        self._password = ""
        self._seat: Seat | None = None
        self.port = 0

    @property
    def pid(self) -> int:
        """Process id of the postmaster."""
        return self._running().pid

    @property
    def _folder(self) -> Folder:
        if self._held is None:
            raise EmbeddedServerError("Postgres is not started: call start() first")
        return self._held

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self._folder.path / "log"

    @property
    def returncode(self) -> int | None:
        """Its exit status; None while it runs or before it was started."""
        return None if self._process is None else self._process.poll()

    @property
    def alive(self) -> bool:
        """Whether the postmaster runs."""
        return self._process is not None and self._process.poll() is None

    def dsn(self, dbname: str = "postgres") -> str:
        """Connection URL of a database, as the superuser ``postgres``."""
        return (
            f"postgresql://{USER}:{self._password}@{LOOPBACK}:{self.port}/{quote(dbname, safe='')}"
        )

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
        """Starts the server, making its database cluster if needed, and waits until it is ready.

        Raises EmbeddedServerError.
        """
        if self._held is not None:
            raise EmbeddedServerError(f"Postgres is started already in {self._held.path}")
        programs = find_programs(self._source)
        self._held = Folder(self._given, "Postgres")
        try:
            chosen = self._programs_for_cluster(programs)
            self._seat = take_seat(chosen, self._folder.path, self._user_namespace)
            self._password = self._read_password()
            if not self._cluster.exists():
                self._progress(f"making a Postgres {chosen.major} database in {self._folder.path}")
                self._init(self._seat)
            self._launch(self._seat, None)
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        """Ends the postmaster with SIGKILL, as a crash would; its processes notice and end too."""
        self._running().kill()
        self._running().wait()

    def restart(self) -> None:
        """Stops the server if it still runs, and starts it again on the same port and data."""
        stop_child(self._running(), STOP_SIGNALS)
        # After a crash its processes may still be ending: the lock is free when all are gone.
        self._folder.take_again()
        if self._seat is not None:
            self._launch(self._seat, self.port)

    def stop(self) -> None:
        """Stops the server (fast shutdown: open transactions are rolled back). May be repeated."""
        if self._process is not None:
            stop_child(self._process, STOP_SIGNALS)
            self._process = None
        if self._held is not None:
            self._held.release()
            self._held = None

    @property
    def _cluster(self) -> Path:
        return self._folder.path / "cluster"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise EmbeddedServerError("Postgres is not started: call start() first")
        return self._process

    def _programs_for_cluster(self, programs: list[Programs]) -> Programs:
        try:
            major = int((self._cluster / "PG_VERSION").read_text())
        except FileNotFoundError:
            return programs[0]
        for candidate in programs:
            if candidate.major == major:
                return candidate
        raise EmbeddedServerError(
            f"folder {self._cluster.parent} was made by Postgres {major}, but only "
            f"{', '.join(str(p.major) for p in programs)} is installed: install Postgres {major}, "
            "or give another folder, or delete this one with all its data"
        )

    def _read_password(self) -> str:
        path = self._folder.path / "password"
        if self._cluster.exists():
            try:
                return path.read_text()
            except OSError as error:
                raise EmbeddedServerError(
                    f"cannot read {path}, the password of this folder's server: {error.strerror}; "
                    "give another folder, or delete this one with all its data"
                ) from None
        password = secrets.token_urlsafe(24)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(password)
        return password

    def _init(self, seat: Seat) -> None:
        # Made under another name: if this is interrupted, the next start begins anew.
        unfinished = self._cluster.with_name("cluster.new")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        seat.hand_over(unfinished)
        command = [str(seat.bin / "initdb"), "--pgdata", str(unfinished), "--username", USER]
        command += ["--auth=scram-sha-256", "--pwfile=/dev/stdin", "--encoding=UTF8", "--locale=C"]
        if self._folder.ephemeral:
            command.append("--no-sync")
        with self.log.open("ab") as log, memory_file(self._password + "\n") as password:
            process = start_child(
                command,
                identity=seat.identity,
                env=_environment(),
                cwd=unfinished,
                stdin=password,
                output=log,
                pass_fds=[self._folder.lock_fd],
            )
        try:
            status = process.wait(INITDB_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise EmbeddedServerError(
                f"initdb took longer than {INITDB_TIMEOUT_S:g} s: {log_tail(self.log)}"
            ) from None
        finally:
            stop_child(process, [])
        if status != 0:
            raise EmbeddedServerError(f"initdb failed with status {status}: {log_tail(self.log)}")
        unfinished.rename(self._cluster)

    def _launch(self, seat: Seat, port: int | None) -> None:
        self._remove_pid_file()
        settings = (
            SETTINGS | (EPHEMERAL_SETTINGS if self._folder.ephemeral else {}) | self._settings
        )
        # Without a clean shutdown, which only serves the next start, a throw-away goes faster.
        death_signal = signal.SIGQUIT if self._folder.ephemeral else signal.SIGINT
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self.port = port or free_port()
            command = [str(seat.bin / "postgres"), "-D", str(self._cluster), "-p", str(self.port)]
            for name, value in settings.items():
                command += ["-c", f"{name}={value}"]
            log_start = self.log.stat().st_size if self.log.exists() else 0
            with self.log.open("ab") as log:
                self._process = start_child(
                    command,
                    death_signal=death_signal,
                    identity=seat.identity,
                    env=_environment(),
                    cwd=self._cluster,
                    output=log,
                    pass_fds=[self._folder.lock_fd],
                )
            try:
                wait_until(self._ready, self._process, self.log, "Postgres", READY_TIMEOUT_S)
                return
            except EmbeddedServerError:
                stop_child(self._process, [(signal.SIGQUIT, 5)])
                with self.log.open("rb") as log:
                    log.seek(log_start)
                    taken = b"Address already in use" in log.read()
                if not taken or attempt == PORT_ATTEMPTS:
                    raise

    def _remove_pid_file(self) -> None:
        """Removes what a killed server left.

        Holding the folder's lock proves that ours is gone. With the file in place, a process that
        has got the same number since, as happens in containers, would be taken for it.
        """
        path = self._cluster / "postmaster.pid"
        if not path.exists() or sys.platform != "linux":
            return
        pid = path.read_text().split("\n", 1)[0]
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cwd").samefile(self._cluster):
                raise EmbeddedServerError(
                    f"a Postgres that was started in another way runs on {self._cluster} (process "
                    f"{pid}): stop that one or give another folder"
                )
        path.unlink()

    def _ready(self) -> bool:
        """Reads line 8 of the pid file, where the postmaster writes its state, as pg_ctl does."""
        try:
            lines = (self._cluster / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() in READY_STATES


def _environment() -> dict[str, str]:
    """Little: PG* variables of the user must not reach the server."""
    kept = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "TZ")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"LC_ALL": "C"}
