"""A primary and a standby on loopback: servers of our own, made with pg_basebackup."""

import os
import secrets
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg

from gateway.embedded import EmbeddedPostgres
from gateway.embedded.process import start_child, stop_child
from tests.processes import wait_until

PATIENCE_S = 120.0


class Pair:
    """``with Pair(folder, synchronous=…) as pair``: a primary with the database, and its standby.

    ``dsn`` names both, with ``target_session_attrs=read-write``: connections go to whichever is the
    primary.
    """

    def __init__(self, folder: Path, *, synchronous: bool) -> None:
        self._synchronous = synchronous
        self._primary_folder = folder / "primary"
        self._standby_folder = folder / "standby"
        settings = {"wal_level": "replica", "max_wal_senders": "4", "hot_standby": "on"}
        # The copy gets no cluster of its own: it is made by pg_basebackup before it starts.
        self.primary = EmbeddedPostgres(self._primary_folder, settings=settings)
        self.standby = EmbeddedPostgres(self._standby_folder, settings=settings)

    def __enter__(self) -> Self:
        try:
            self.primary.start()
            self._copy()
            self.standby.start()
            self._wait_streaming()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self.standby.stop()
        self.primary.stop()

    @property
    def dsn(self) -> str:
        password = (self._primary_folder / "password").read_text()
        ports = f"{self.primary.port},{self.standby.port}"
        return (
            f"host=127.0.0.1,127.0.0.1 port={ports} user=postgres password={password} "
            "dbname=postgres target_session_attrs=read-write"
        )

    def promote(self) -> None:
        """Kills the primary and makes the standby the new one."""
        self.primary.kill()
        with psycopg.connect(self.standby.dsn(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_promote(true, 60)")
            row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
        assert row == (False,)

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

    def _copy(self) -> None:
        seat = self.primary._seat
        assert seat is not None
        self._standby_folder.mkdir(parents=True)
        target = self._standby_folder / "cluster"
        target.mkdir(mode=0o700)
        seat.hand_over(target)
        password = (self._primary_folder / "password").read_text()
        passwords = os.open(
            self._standby_folder / "password", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
        )
        with os.fdopen(passwords, "w") as file:
            file.write(password)
        name = f"standby_{secrets.token_hex(3)}"
        conninfo = (
            f"host=127.0.0.1 port={self.primary.port} user=postgres password={password} "
            f"application_name={name}"
        )
        log = self._standby_folder / "basebackup.log"
        with log.open("wb") as output:
            process = start_child(
                [
                    str(seat.bin / "pg_basebackup"),
                    *("-D", str(target), "-d", conninfo, "-R", "-X", "stream", "-c", "fast"),
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
        if self._synchronous:
            with psycopg.connect(self.primary.dsn(), autocommit=True) as connection:
                connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
                connection.execute("SELECT pg_reload_conf()")

    def _wait_streaming(self) -> None:
        state = "sync" if self._synchronous else "async"
        with psycopg.connect(self.primary.dsn(), autocommit=True) as connection:
            wait_until(
                lambda: (
                    connection.execute(
                        "SELECT count(*) FROM pg_stat_replication "
                        "WHERE state = 'streaming' AND sync_state = %s",
                        (state,),
                    ).fetchone()
                    == (1,)
                )
            )
