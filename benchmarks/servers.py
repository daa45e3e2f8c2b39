"""What is measured: real servers, relays and gateways, as processes of their own."""

import json
import os
import secrets
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self

import psycopg
import redis
from psycopg import sql

from benchmarks.processor import pin
from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
from gateway.embedded.process import LOOPBACK, ChildProcess, free_port, log_tail
from gateway.embedded.programs import Source
from gateway.tokens import sign
from outbox import keys
from outbox.migrations import migrate

ROOT = Path(__file__).parents[1]
READY_TIMEOUT_S = 60.0
POLL_S = 0.01
TENANT = "default"
"""That of clients without a token."""
POSTGRES_SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "1h"}
"""No checkpoint falls into a measurement."""
GATEWAY_SETTINGS = {
    "TIDEGATE_ALLOW_ANONYMOUS": "true",
    # Pings have a cost of their own, which is not that of a delivery.
    "TIDEGATE_PING_INTERVAL_S": "3600",
    "TIDEGATE_LOG_LEVEL": "warning",
}


class NotReady(Exception):
    """A process does not come up, or a state is not reached in time."""


def wait_until(ready: Callable[[], bool], what: str, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Poll until ``ready``. Raises NotReady."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise NotReady(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)


@dataclass(slots=True)
class Gateway:
    """A gateway process with its port."""

    process: ChildProcess
    port: int
    probe_file: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def probe(self) -> dict[str, float]:
        """Have it collect garbage and tell; see ``host``."""
        self.probe_file.unlink(missing_ok=True)
        self.process.signal(signal.SIGUSR2)
        wait_until(self.probe_file.exists, "answer of the gateway to SIGUSR2")
        figures: dict[str, float] = json.loads(self.probe_file.read_text())
        return figures


class Servers:
    """A Postgres and a Redis of the benchmark's own, bound to ``cores``."""

    def __init__(
        self, folder: Path, cores: frozenset[int], *, fsync: bool, source: Source = "any"
    ) -> None:
        self._folder = folder
        self._cores = cores
        settings = {**POSTGRES_SETTINGS, "max_connections": "300"}
        if not fsync:
            settings |= {"fsync": "off", "full_page_writes": "off"}
        self.postgres = EmbeddedPostgres(folder / "postgres", settings=settings, source=source)
        self.redis = EmbeddedRedis(settings={"maxmemory": "4gb"}, source=source)

    def __enter__(self) -> Self:
        self.postgres.start()
        try:
            self.redis.start()
        except BaseException:
            self.postgres.stop()
            raise
        self.pin(self._cores)
        return self

    def __exit__(self, *_: object) -> None:
        self.redis.stop()
        self.postgres.stop()

    def pin(self, cores: frozenset[int]) -> None:
        """Bind both to cores, and what they start from now on."""
        pin(self.postgres.pid, cores)
        pin(self.redis.pid, cores)

    @contextmanager
    def installation(self) -> Iterator["Installation"]:
        """A fresh database with the schema, and an empty Redis; its processes end with it."""
        name = f"bench_{secrets.token_hex(4)}"
        with psycopg.connect(self.postgres.dsn(), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        with redis.Redis.from_url(self.redis.url) as client:
            client.flushall()
        installed = Installation(self.postgres.dsn(name), self.redis.url, self._folder / name)
        installed.folder.mkdir()
        migrate(installed.dsn)
        try:
            yield installed
        finally:
            installed.stop()
            with psycopg.connect(self.postgres.dsn(), autocommit=True) as connection:
                connection.execute(
                    sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name))
                )


@dataclass(slots=True)
class Installation:
    """One database with its relays and gateways."""

    dsn: str
    redis_url: str
    folder: Path
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    _processes: list[ChildProcess] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def token(self, user: str) -> str:
        """A client's token for the tenant of the benchmark."""
        return sign(self.secret, TENANT, user, now=time.time(), ttl_s=86_400)

    def relay(self, cores: frozenset[int], **settings: str) -> ChildProcess:
        """Start a relay; it has the leases when this returns."""
        process, _ = self._start(["gateway", "relay"], cores, settings)
        shards = self.query("SELECT shards FROM tidegate.meta")
        leases = keys.leases(self.query("SELECT epoch FROM tidegate.meta"))
        with redis.Redis.from_url(self.redis_url) as client:
            wait_until(lambda: bool(client.hlen(leases) == shards), "start of the relay")
        return process

    def gateway(self, cores: frozenset[int], port: int = 0, **settings: str) -> Gateway:
        """Start a gateway on a free port; it is ready when this returns."""
        port = port or free_port()
        process, log = self._start(
            ["benchmarks.host", "gateway", "--port", str(port)], cores, settings
        )

        def ready() -> bool:
            if not process.alive:
                raise NotReady(f"the gateway has ended: {log_tail(log)}")
            try:
                url = f"http://{LOOPBACK}:{port}/readyz"
                with urllib.request.urlopen(url, timeout=2) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        wait_until(ready, "start of the gateway")
        pin(process.pid, cores)  # threads that it has started meanwhile
        return Gateway(process, port, log.with_suffix(".probe"))

    def _start(
        self, module: list[str], cores: frozenset[int], settings: dict[str, str]
    ) -> tuple[ChildProcess, Path]:
        log = self.folder / f"{next(self._numbers)}-{module[-1 if len(module) == 2 else 1]}.log"
        own = {n: v for n, v in os.environ.items() if not n.startswith("TIDEGATE_")}
        env = {
            **own,
            **GATEWAY_SETTINGS,
            "PYTHONPATH": str(ROOT),
            "BENCHMARK_PROBE": str(log.with_suffix(".probe")),
            "TIDEGATE_POSTGRES_DSN": self.dsn,
            "TIDEGATE_REDIS_URL": self.redis_url,
            "TIDEGATE_TOKEN_HMAC_SECRET": self.secret,
            **settings,
        }
        process = ChildProcess([sys.executable, "-m", *module], env, log)
        self._processes.append(process)
        process.restart()
        pin(process.pid, cores)
        return process, log

    def query(self, statement: str) -> Any:
        """The one value that a query gives."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            row = connection.execute(statement.encode()).fetchone()
        assert row is not None
        return row[0]

    def stop(self) -> None:
        """End its processes at once: nothing here is to be drained."""
        for process in self._processes:
            process.kill()
