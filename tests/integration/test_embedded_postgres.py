"""Embedded Postgres: from the machine and from the wheel, as root and not, killed and restarted."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from gateway.embedded import EmbeddedPostgres, EmbeddedServerError
from gateway.embedded.process import start_child
from gateway.embedded.programs import Source, find_programs
from gateway.embedded.seat import reachable
from tests.processes import SERVERS_PARENT, is_gone, start_parent, wait_until

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root has this problem")


def value(dsn: str, query: str) -> object:
    with psycopg.connect(dsn) as connection:
        row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return row[0]


def has(source: Source) -> bool:
    try:
        find_programs(source)
    except EmbeddedServerError:
        return False
    return True


SOURCES = [
    pytest.param(
        source, marks=pytest.mark.skipif(not has(source), reason=f"no Postgres from the {source}")
    )
    for source in ("machine", "wheel")
]


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own is not when it runs as root."""
    with tempfile.TemporaryDirectory(prefix="test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("source", SOURCES)
def test_serves_utf8_on_loopback_with_a_password(source: Source) -> None:
    with EmbeddedPostgres(source=source) as server:
        assert value(server.dsn(), "SHOW server_encoding") == "UTF8"
        assert value(server.dsn(), "SHOW listen_addresses") == "127.0.0.1"
        assert value(server.dsn(), "SELECT datcollate FROM pg_database LIMIT 1") == "C"
        wrong = server.dsn().replace("@", "x@", 1)
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(wrong)
        folder = server.log.parent
    assert not folder.exists()


@pytest.mark.parametrize("source", SOURCES)
def test_data_is_kept_between_runs(source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there yet"
    lines: list[str] = []
    for _ in range(2):
        with EmbeddedPostgres(folder, source=source, progress=lines.append) as server:
            with psycopg.connect(server.dsn()) as connection:
                connection.execute("CREATE TABLE IF NOT EXISTS kept (n int)")
                connection.execute("INSERT INTO kept VALUES (1)")
            count = value(server.dsn(), "SELECT count(*) FROM kept")
            assert value(server.dsn(), "SHOW fsync") == "on"
    assert count == 2
    assert len(lines) == 1, "only the first start makes the database"
    assert (folder / "password").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


@AS_ROOT
@pytest.mark.parametrize("source", SOURCES)
def test_as_root_below_a_closed_folder(source: Source, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    before = [(p, p.stat().st_mode, p.stat().st_uid) for p in (closed, *closed.parents)]
    with EmbeddedPostgres(closed / "data", source=source) as server:
        assert value(server.dsn(), "SELECT 1") == 1
        owners = {p.stat().st_uid for p in (closed / "data").rglob("*")}
    assert owners == {0}, "a user namespace needs no other owner"
    assert [(p, p.stat().st_mode, p.stat().st_uid) for p, _, _ in before] == before


@AS_ROOT
@pytest.mark.parametrize("source", SOURCES)
def test_as_root_without_user_namespaces(source: Source, home: Path) -> None:
    for _ in range(2):
        with EmbeddedPostgres(home / "data", source=source, user_namespace=False) as server:
            assert value(server.dsn(), "SELECT 1") == 1
            process = Path(f"/proc/{server.pid}").stat()
            assert process.st_uid == pwd.getpwnam("nobody").pw_uid
    assert home.stat().st_uid == 0
    assert home.stat().st_mode & 0o777 == 0o755


@AS_ROOT
def test_as_root_from_a_wheel_that_others_cannot_reach(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = find_programs("wheel")[0].bin.parents[1]
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for folder in (wheel, wheel.with_name(f"{wheel.name}.libs")):
        shutil.copytree(folder, closed / folder.name, symlinks=True)
    (closed / wheel.name / "__init__.py").write_text("raise AssertionError('not to be imported')")
    monkeypatch.syspath_prepend(closed)
    with EmbeddedPostgres(home / "data", source="wheel", user_namespace=False) as server:
        assert value(server.dsn(), "SELECT 1") == 1
        program = Path(f"/proc/{server.pid}/exe").readlink()
    assert program.is_relative_to(home / "data")


@AS_ROOT
def test_as_root_where_nothing_helps(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedServerError, match="give a folder that everybody may enter") as info:
        EmbeddedPostgres(closed / "data", user_namespace=False).start()
    assert str(closed / "data") in str(info.value)
    assert "\n" not in str(info.value)


@AS_ROOT
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_as_root_of_a_container_that_has_no_other_users() -> None:
    program = "from gateway.embedded import EmbeddedPostgres; EmbeddedPostgres().start()"
    shell = f'echo 0 > /proc/sys/user/max_user_namespaces; "{sys.executable}" -c "{program}"'
    answer = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-ec", shell],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    if "EmbeddedServerError" not in answer.stderr and "ermitted" in answer.stderr:
        pytest.skip("user namespaces are forbidden here")
    assert "EmbeddedServerError: Postgres refuses to run as root" in answer.stderr
    assert "or run as an ordinary user, or set TIDEGATE_POSTGRES_DSN" in answer.stderr


@AS_ROOT
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
@pytest.mark.parametrize("user", ["daemon", "one who is not listed"])
def test_as_another_user(home: Path, user: str) -> None:
    uid = pwd.getpwnam(user).pw_uid if user == "daemon" else 12345
    python = next(
        (p for p in (sys.executable, "/usr/bin/python3") if reachable(Path(p).resolve().parent)), ""
    )
    if not python:
        pytest.skip("no Python that another user can reach")
    program = (
        "from pathlib import Path; from gateway.embedded import EmbeddedPostgres\n"
        f"with EmbeddedPostgres(Path({str(home / 'data')!r}) / 'x') as p: print(p.dsn())"
    )
    (home / "data").mkdir()
    os.chown(home / "data", uid, uid)
    setpriv = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    answer = subprocess.run(
        [*setpriv, python, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        cwd=home,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert answer.stdout.startswith("postgresql://"), answer.stderr
    assert {p.stat().st_uid for p in (home / "data").rglob("*")} == {uid}


def test_second_server_on_the_same_folder(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "data") as server:
        with pytest.raises(EmbeddedServerError, match="is in use: process") as info:
            EmbeddedPostgres(tmp_path / "data").start()
        assert str(os.getpid()) in str(info.value)
        assert value(server.dsn(), "SELECT 1") == 1


def test_server_that_was_started_in_another_way(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "data") as server:
        cluster = Path(f"/proc/{server.pid}/cwd").readlink()
    other = start_child([sys.executable, "-c", "import signal; signal.pause()"], cwd=cluster)
    (cluster / "postmaster.pid").write_text(f"{other.pid}\n{cluster}\n")
    try:
        with pytest.raises(EmbeddedServerError, match="started in another way") as info:
            EmbeddedPostgres(tmp_path / "data").start()
        assert str(other.pid) in str(info.value)
    finally:
        other.kill()
        other.wait()


def test_number_of_a_killed_server_that_another_process_has_now(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "data") as server:
        cluster = Path(f"/proc/{server.pid}/cwd").readlink()
    (cluster / "postmaster.pid").write_text(f"{os.getpid()}\n{cluster}\n")
    with EmbeddedPostgres(tmp_path / "data") as server:
        assert value(server.dsn(), "SELECT 1") == 1


def test_folder_of_another_major_version(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "data") as server:
        major = str(value(server.dsn(), "SHOW server_version")).split(".")[0]
    (tmp_path / "data" / "cluster" / "PG_VERSION").write_text("11\n")
    with pytest.raises(EmbeddedServerError, match="was made by Postgres 11, but only") as info:
        EmbeddedPostgres(tmp_path / "data").start()
    assert "install Postgres 11, or give another folder, or delete this one" in str(info.value)
    assert major in str(info.value)


def test_folder_keeps_its_version_when_a_newer_one_is_installed(tmp_path: Path) -> None:
    versions = [programs.major for programs in find_programs()]
    if len(set(versions)) < 2:
        pytest.skip("only one version of Postgres is here")
    with EmbeddedPostgres(tmp_path / "data", source="wheel") as server:
        assert str(value(server.dsn(), "SHOW server_version")).startswith("18.")
    with EmbeddedPostgres(tmp_path / "data") as server:
        assert str(value(server.dsn(), "SHOW server_version")).startswith("18.")


def test_restart_after_a_crash_keeps_port_and_commits(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "data") as server:
        with psycopg.connect(server.dsn()) as connection:
            connection.execute("CREATE TABLE kept (n int)")
        dsn, pid = server.dsn(), server.pid
        server.kill()
        assert (server.alive, server.returncode) == (False, -signal.SIGKILL)
        server.restart()
        assert server.dsn() == dsn
        assert server.pid != pid
        assert value(dsn, "SELECT count(*) FROM kept") == 0


@pytest.mark.parametrize("victim", ["parent", "postmaster"])
def test_data_survives_sigkill(tmp_path: Path, victim: str) -> None:
    folder = tmp_path / "data"
    parent, (pid, _, dsn) = start_parent(SERVERS_PARENT, str(folder))
    with parent:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE kept AS SELECT generate_series(1, 1000) AS n")
            backend = connection.info.backend_pid
            if victim == "postmaster":
                os.kill(int(pid), signal.SIGKILL)
            else:
                parent.kill()
            wait_until(lambda: is_gone(backend) and is_gone(int(pid)))
        parent.kill()
    with EmbeddedPostgres(folder) as server:
        assert value(server.dsn(), "SELECT count(*) FROM kept") == 1000


def test_start_waits_for_the_server_of_a_killed_parent(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    parent, (_, _, dsn) = start_parent(SERVERS_PARENT, str(folder))
    with parent, psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept (n int)")
        parent.kill()
        parent.wait()
        with EmbeddedPostgres(folder) as server:
            assert value(server.dsn(), "SELECT count(*) FROM kept") == 0


def test_interrupted_making_begins_anew(tmp_path: Path) -> None:
    half = tmp_path / "data" / "cluster.new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("15")
    with EmbeddedPostgres(tmp_path / "data") as server:
        assert value(server.dsn(), "SELECT 1") == 1


def test_wrong_setting_fails_at_once_with_the_servers_words() -> None:
    server = EmbeddedPostgres(settings={"max_connections": "many"})
    with pytest.raises(EmbeddedServerError, match="exited with status 1 before") as info:
        server.start()
    assert 'invalid value for parameter "max_connections"' in str(info.value)
    assert "\n" not in str(info.value)
    server.stop()


def test_left_over_of_a_killed_process_is_removed() -> None:
    parent, (pid, _, _) = start_parent(SERVERS_PARENT)
    folder = Path(f"/proc/{pid}/cwd").readlink().parent
    with parent:
        parent.kill()
    wait_until(lambda: is_gone(int(pid)))
    assert folder.exists()

    def removed() -> bool:
        with EmbeddedPostgres() as server:
            assert server.log.exists()
        return not folder.exists()

    wait_until(removed)


def test_log_shows_no_values() -> None:
    with EmbeddedPostgres() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("CREATE TABLE t (v text CHECK (v <> 'hush-hush'))")
            with pytest.raises(psycopg.errors.CheckViolation):
                connection.execute("INSERT INTO t VALUES (%s)", ["hush-hush"])
            with pytest.raises(psycopg.errors.UndefinedColumn):
                connection.execute("SELECT v, hush FROM t WHERE v = 'hush-hush'")
        log = server.log.read_text()
    assert "violates check constraint" in log
    assert "hush-hush" not in log
