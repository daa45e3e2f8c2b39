"""The system under test: real servers and processes, with a proxy on every link."""

import asyncio
import importlib
import json
import re
import secrets
import shutil
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from redis.asyncio import Redis

from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
from gateway.tokens import sign
from outbox import keys
from outbox.lease import read_leases
from tests.chaos.proxy import Link
from tests.processes import Process, Processes

# Small, so that every place where the past is kept overflows and every reply needs several pages.
SETTINGS: Mapping[str, str] = {
    "TIDEGATE_LEASE_S": "1.5",
    "TIDEGATE_ROOM_RING_MESSAGES": "6",
    "TIDEGATE_ROOM_STREAM_MESSAGES": "12",
    "TIDEGATE_ROOM_LINGER_S": "2",
    "TIDEGATE_REPLAY_PAGE_MESSAGES": "5",
    "TIDEGATE_BUS_MESSAGES": "100",
    "TIDEGATE_CLIENT_BUFFER_BYTES": "32768",
    "TIDEGATE_PING_INTERVAL_S": "2",
    "TIDEGATE_PONG_TIMEOUT_S": "1.9",
    "TIDEGATE_DRAIN_TIMEOUT_S": "5",
    "TIDEGATE_LOG_FORMAT": "json",
}

POSTGRES_SETTINGS: Mapping[str, str] = {"max_prepared_transactions": "40"}
"""Of the server of a cluster whose writers may prepare transactions."""

SHARDS = 16
SHARED_S = 30.0
POLL_S = 0.05
SUPERVISION_S = 0.5


class Cluster:
    """``async with Cluster(folder, postgres, dsn, redis) as cluster``: all are ready."""

    def __init__(
        self,
        folder: Path,
        postgres: EmbeddedPostgres,
        dsn: str,
        redis: EmbeddedRedis,
        *,
        relays: int = 2,
        gateways: int = 2,
        through: str = "",
        **settings: str,
    ) -> None:
        """``dsn``: a database of the server with the schema. ``through``: how the processes reach
        it, if not straight."""
        self.postgres = postgres
        self.dsn = dsn
        self.redis = redis
        self.folder = folder
        self.processes = Processes(folder)
        self.relays: list[Process] = []
        self.gateways: list[Process] = []
        self.down: set[str] = set()
        """Processes that are down on purpose."""
        self.restarts = 0
        """How often ``supervise`` has started a process that had ended by itself."""
        self.links: dict[str, Link] = {}
        """``relay-1 to postgres``, ``gateway-2 to redis`` …"""
        self._secret = secrets.token_hex(32)
        self._settings = {
            **SETTINGS,
            "TIDEGATE_TOKEN_HMAC_SECRET": self._secret,
            "TIDEGATE_NAMESPACES": json.dumps({}),
            **settings,
        }
        self._through = through
        self._relays = relays
        self._gateways = gateways
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            names = [f"relay-{i + 1}" for i in range(self._relays)]
            for name in names:
                self.relays.append(await self.start(name, "relay"))
            names = [f"gateway-{i + 1}" for i in range(self._gateways)]
            for name in names:
                self.gateways.append(await self.start(name, "gateway"))
            await asyncio.gather(*(asyncio.to_thread(g.wait_ready) for g in self.gateways))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.heal()
        await asyncio.to_thread(self.processes.stop)
        await self._stack.aclose()

    async def start(self, name: str, role: str, **settings: str) -> Process:
        """Starts a relay or a gateway with links of its own; does not wait until it is ready."""
        through = self._through or self.dsn
        port = int(conninfo_to_dict(through)["port"] or 0)
        to_postgres = await self._link(f"{name} to postgres", port)
        to_redis = await self._link(f"{name} to redis", self.redis.port)
        environment = {
            **self._settings,
            "TIDEGATE_POSTGRES_DSN": make_conninfo(through, port=to_postgres.port),
            "TIDEGATE_REDIS_URL": self.redis.url.replace(
                f":{self.redis.port}/", f":{to_redis.port}/"
            ),
            **settings,
        }
        arguments = [role]
        listen_port = self.processes.reserve_port()
        if role == "gateway":
            arguments += ["--port", str(listen_port)]
        process = self.processes.start(name, *arguments, **environment)
        if role == "gateway":
            process.port = listen_port
        return process

    async def _link(self, name: str, *targets: int, **options: Any) -> Link:
        self.links[name] = link = await self._stack.enter_async_context(
            Link(name, *targets, **options)
        )
        return link

    @property
    def ports(self) -> list[int]:
        """Where the gateways listen."""
        return [gateway.port for gateway in self.gateways]

    def token(self, tenant: str, user: str) -> str:
        return sign(self._secret, tenant, user, now=time.time())

    # Faults and their ends

    def heal(self) -> None:
        """Links pass on again and processes that were stopped continue."""
        for link in self.links.values():
            link.heal()
        for process in self.processes.all.values():
            if process.alive:
                process.signal(signal.SIGCONT)

    def to_redis(self, processes: Iterable[Process] | None = None) -> list[Link]:
        """The links of these processes, or of all."""
        chosen = [*self.relays, *self.gateways] if processes is None else processes
        return [self.links[f"{process.name} to redis"] for process in chosen]

    def to_postgres(self, processes: Iterable[Process] | None = None) -> list[Link]:
        chosen = [*self.relays, *self.gateways] if processes is None else processes
        return [self.links[f"{process.name} to postgres"] for process in chosen]

    async def lead_to_postgres(self, server: EmbeddedPostgres) -> None:
        """From now on this is the server of everybody, as after a change in DNS.

        The one before it is stopped, and its data are removed if this cluster has made it.
        """
        assert not self._through
        self._stack.callback(server.stop)
        before, self.postgres = self.postgres, server
        self.dsn = make_conninfo(self.dsn, port=server.port)
        for link in self.to_postgres():
            link.lead_to(server.port)
        await asyncio.to_thread(before.stop)
        if before._given is not None and before._given.is_relative_to(self.folder):
            data = before._given / "cluster"
            await asyncio.to_thread(shutil.rmtree, data, ignore_errors=True)

    def lead_to_redis(self, server: EmbeddedRedis) -> None:
        """The same for Redis; whether the one before it stops is up to the caller."""
        self.redis = server
        for link in self.to_redis():
            link.lead_to(server.port)

    def owns(self, server: EmbeddedRedis) -> None:
        """Stops the server at the end, if it runs till then."""
        self._stack.callback(server.stop)

    async def restart(self, process: Process) -> None:
        """SIGTERM if it runs, and a new start, ready."""
        await asyncio.to_thread(process.restart)
        if process.port:
            await asyncio.to_thread(process.wait_ready)

    async def supervise(self) -> None:
        """Starts again what has ended by itself, as a platform does; until cancelled."""
        while True:
            for process in (*self.relays, *self.gateways):
                if not process.alive and process.name not in self.down:
                    self.restarts += 1
                    await asyncio.to_thread(process.restart)
            await asyncio.sleep(SUPERVISION_S)

    async def sql(self, statement: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        """Runs a statement over a connection of its own, past all proxies."""
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
            cursor = await connection.execute(statement.encode(), parameters)
            return await cursor.fetchall() if cursor.description is not None else []

    async def terminate_backends(self, pattern: str = "tidegate%") -> int:
        """pg_terminate_backend for the connections of this database with such a name."""
        rows = await self.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE %s "
            "AND pid <> pg_backend_pid()",
            (pattern,),
        )
        return len(rows)

    def client(self) -> Redis:
        """A client past all proxies."""
        return client_of(self.redis)

    async def epoch(self) -> str:
        return str((await self.sql("SELECT epoch FROM tidegate.meta"))[0][0])

    async def heads(self) -> dict[int, int]:
        return dict(await self.sql("SELECT id, max(head) FROM tidegate.shard GROUP BY id"))

    async def holders(self) -> dict[int, Process]:
        """By which of the running relays each shard is leased."""
        async with self.client() as client:
            leased = (await read_leases(client, await self.epoch())).holders
        return {
            shard: relay
            for shard, name in leased.items()
            for relay in self.relays
            if relay.alive and f"-{relay.pid}-" in name
        }

    async def shared(self, relays: int = 2) -> dict[int, Process]:
        """Waits until every shard is leased to a running relay, and so many of them have some."""
        deadline = time.monotonic() + SHARED_S
        while True:
            holders = await self.holders()
            if len(holders) == SHARDS and len({relay.name for relay in holders.values()}) == relays:
                return holders
            assert time.monotonic() < deadline, f"shards are not leased to {relays} relays"
            await asyncio.sleep(POLL_S)

    async def asleep(self) -> None:
        """Waits until every shard's relay waits for the bell."""
        deadline = time.monotonic() + SHARED_S
        while (
            await self.sql(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted "
                "AND mode = 'ExclusiveLock'"
            )
        ) != [(SHARDS,)]:
            assert time.monotonic() < deadline, "relays do not fall asleep"
            await asyncio.sleep(POLL_S)

    async def buses(self) -> list[str]:
        """Names of the buses of the shards that have had a message."""
        epoch = await self.epoch()
        return [keys.bus(epoch, shard) for shard, head in (await self.heads()).items() if head]

    def logged(self, pattern: str, processes: Iterable[Process] | None = None) -> int:
        """How often the processes' logs have a match."""
        chosen = self.processes.all.values() if processes is None else processes
        return sum(len(re.findall(pattern, process.text())) for process in chosen)


def prepare_database(postgres: EmbeddedPostgres) -> None:
    """Makes the schema. The bell works, also on a server that allows to prepare transactions:
    who does so must turn it off first."""
    importlib.import_module("outbox.migrations").migrate(postgres.dsn())
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute("SELECT tidegate.set_doorbell(true)")


def could_not_start(process: Process) -> bool:
    """Whether its last words are the one line that tells an operator why it cannot start."""
    lines = process.text().splitlines()
    return bool(lines) and lines[-1].startswith("tidegate: ")


def client_of(server: EmbeddedRedis) -> Redis:
    """A client of one server."""
    return Redis.from_url(server.url, socket_timeout=30)


def password_of(redis: EmbeddedRedis) -> str:
    return urlsplit(redis.url).password or ""
