"""Standbys of Postgres on loopback: servers of our own, made with pg_basebackup, and promoted."""

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

from gateway.embedded import EmbeddedPostgres
from gateway.embedded.process import start_child, stop_child
from gateway.embedded.seat import Seat
from tests.processes import wait_until

PATIENCE_S = 120.0
POLL_S = 0.01
COMMIT = "SELECT pg_logical_emit_message(true, 'probe', '')"
"""In a transaction of its own: it writes something, and so its commit waits for the standby."""


def standby_of(
    primary: EmbeddedPostgres, folder: Path, settings: Mapping[str, str]
) -> tuple[EmbeddedPostgres, str]:
    """A running copy that follows the server, and its name for ``synchronous_standby_names``.

    ``settings`` must allow for as many connections and prepared transactions as the primary's.
    """
    seat = primary._seat
    assert seat is not None
    name = f"standby_{secrets.token_hex(3)}"
    folder.mkdir(parents=True)
    passwords = os.open(folder / "password", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(passwords, "w") as file:
        file.write(primary._password)
    target = folder / "cluster"
    target.mkdir(mode=0o700)
    seat.hand_over(target)
    conninfo = (
        f"host=127.0.0.1 port={primary.port} user=postgres password={primary._password} "
        f"application_name={name}"
    )
    _base_backup(seat, target, conninfo, folder / "basebackup.log")
    standby = EmbeddedPostgres(folder, settings=settings)
    standby.start()
    try:
        with psycopg.connect(primary.dsn(), autocommit=True) as connection:
            wait_until(
                lambda: (
                    connection.execute(
                        "SELECT state FROM pg_stat_replication WHERE application_name = %s", (name,)
                    ).fetchall()
                    == [("streaming",)]
                )
            )
    except BaseException:
        standby.stop()
        raise
    return standby, name


def _base_backup(seat: Seat, target: Path, conninfo: str, log: Path) -> None:
    with log.open("wb") as output:
        process = start_child(
            [
                str(seat.bin / "pg_basebackup"),
                *("-D", str(target), "-d", conninfo, "-R", "-X", "stream", "-c", "fast"),
                "--no-sync",
            ],
            identity=seat.identity,
            output=output,
            cwd=target,
        )
        try:
            status = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            stop_child(process, [])
            raise
    assert status == 0, log.read_text()


def make_synchronous(primary: EmbeddedPostgres, standby: EmbeddedPostgres, name: str) -> None:
    """Afterwards the standby has all that was committed, and no commit is answered before it has.

    ``sync_state`` does not prove that: it tells what the sender has read of the configuration, and
    commits wait from when the checkpointer has read it. So one is seen to wait, while the standby
    takes in nothing. Others may have passed it unnoticed, but not the next one: when that is
    answered the standby has all that came before.
    """
    with (
        psycopg.connect(primary.dsn(), autocommit=True) as connection,
        psycopg.connect(primary.dsn(), autocommit=True) as probe,
        psycopg.connect(standby.dsn(), autocommit=True) as reader,
    ):
        connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'".encode())
        connection.execute("SELECT pg_reload_conf()")
        row = reader.execute("SELECT pid FROM pg_stat_wal_receiver").fetchone()
        assert row is not None, "the standby does not follow its primary"
        os.kill(row[0], signal.SIGSTOP)
        try:
            _see_a_commit_wait(connection, probe)
        finally:
            os.kill(row[0], signal.SIGCONT)
        while probe.pgconn.get_result() is not None:
            continue
        probe.execute(COMMIT)


def _see_a_commit_wait(connection: psycopg.Connection[Any], probe: psycopg.Connection[Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S / 2
    while True:
        probe.pgconn.send_query(COMMIT.encode())
        while True:
            (event,) = connection.execute(
                "SELECT wait_event FROM pg_stat_activity WHERE pid = %s",
                (probe.info.backend_pid,),
            ).fetchone() or (None,)
            if event == "SyncRep":
                return
            probe.pgconn.consume_input()
            if not probe.pgconn.is_busy():
                break
            assert time.monotonic() < deadline, "a commit neither waits nor is answered"
            time.sleep(POLL_S)
        while probe.pgconn.get_result() is not None:
            continue
        assert time.monotonic() < deadline, "commits do not wait for the standby"


def asynchronous_again(primary: EmbeddedPostgres) -> None:
    """Commits wait for nobody."""
    with psycopg.connect(primary.dsn(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
        connection.execute("SELECT pg_reload_conf()")


def fence(primary: EmbeddedPostgres) -> None:
    """Kills it, and waits until also its last process is gone: nobody is served by it any more."""
    primary.kill()
    primary._folder.take_again()


def promote(standby: EmbeddedPostgres) -> None:
    """Makes it a primary, which waits for no standby."""
    asynchronous = "ALTER SYSTEM RESET synchronous_standby_names"
    with psycopg.connect(standby.dsn(), autocommit=True) as connection:
        connection.execute(asynchronous)
        connection.execute("SELECT pg_promote(true, 60)")
        row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    assert row == (False,)


class Pair:
    """``with Pair(folder, synchronous=…) as pair``: a primary with the database, and its standby.

    ``dsn`` names both, with ``target_session_attrs=read-write``: connections go to whichever is the
    primary.
    """

    def __init__(self, folder: Path, *, synchronous: bool) -> None:
        self._synchronous = synchronous
        self._settings = {"wal_level": "replica", "max_wal_senders": "4", "hot_standby": "on"}
        self._standby_folder = folder / "standby"
        self.primary = EmbeddedPostgres(folder / "primary", settings=self._settings)
        self.standby: EmbeddedPostgres

    def __enter__(self) -> Self:
        self.primary.start()
        try:
            self.standby, name = standby_of(self.primary, self._standby_folder, self._settings)
            try:
                if self._synchronous:
                    make_synchronous(self.primary, self.standby, name)
            except BaseException:
                self.standby.stop()
                raise
        except BaseException:
            self.primary.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.standby.stop()
        self.primary.stop()

    @property
    def dsn(self) -> str:
        ports = f"{self.primary.port},{self.standby.port}"
        return (
            f"host=127.0.0.1,127.0.0.1 port={ports} user=postgres "
            f"password={self.primary._password} dbname=postgres target_session_attrs=read-write"
        )

    def promote(self) -> None:
        """Kills the primary and makes the standby the new one."""
        fence(self.primary)
        promote(self.standby)

    def pause(self) -> None:
        """The standby replays nothing from now on, and takes in nothing more."""
        with psycopg.connect(self.standby.dsn(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET primary_conninfo = ''")
            connection.execute("SELECT pg_reload_conf()")
        with psycopg.connect(self.primary.dsn(), autocommit=True) as connection:
            wait_until(
                lambda: (
                    connection.execute("SELECT count(*) FROM pg_stat_replication").fetchone()
                    == (0,)
                )
            )
