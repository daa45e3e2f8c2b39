"""Postgres lost commits: clients are told, and positions of two histories never meet."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis as redis_client
from psycopg import sql

from gateway.embedded import EmbeddedPostgres
from gateway.tokens import sign
from outbox import keys
from tests.client import Client
from tests.operate.traffic import TENANT
from tests.probe import until
from tests.processes import Process, Processes

SECRET = "a secret of thirty-two bytes or more"
ROOM = "orders:1"
RESUBSCRIBE = 2500


class Site:
    """A relay and a gateway on one database, which can be put back to an earlier state."""

    def __init__(
        self, processes: Processes, postgres: EmbeddedPostgres, dsn: str, redis_url: str
    ) -> None:
        self.processes = processes
        self.postgres = postgres
        self.dsn = dsn
        self.redis_url = redis_url
        self.name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
        self.env = {
            "TIDEGATE_POSTGRES_DSN": dsn,
            "TIDEGATE_REDIS_URL": redis_url,
            "TIDEGATE_TOKEN_HMAC_SECRET": SECRET,
            "TIDEGATE_LEASE_S": "1",
        }

    def start(self, number: int = 1) -> Process:
        self.processes.start_relay(f"relay-{number}", **self.env)
        return self.processes.start_gateway(f"gateway-{number}", **self.env)

    def publish(self, *payloads: int) -> None:
        with psycopg.connect(self.dsn) as connection:
            for payload in payloads:
                connection.execute(
                    "SELECT tidegate.publish(%s, %s, %s)", (TENANT, ROOM, str(payload))
                )

    def epoch(self) -> str:
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute("SELECT epoch FROM tidegate.meta").fetchone()
        assert row is not None
        return str(row[0])

    def command(self, name: str, *arguments: str) -> Process:
        return self.processes.start(name, *arguments, **self.env)

    def copy(self, source: str, target: str) -> None:
        """Replaces the database ``target`` by a copy of ``source``, with all sessions ended."""
        with psycopg.connect(self.postgres.dsn(), autocommit=True) as connection:
            for statement in (
                "DROP DATABASE IF EXISTS {target} WITH (FORCE)",
                "CREATE DATABASE {target} TEMPLATE {source}",
            ):
                for _ in range(200):
                    try:
                        connection.execute(
                            sql.SQL(statement).format(
                                target=sql.Identifier(target), source=sql.Identifier(source)
                            )
                        )
                        break
                    except psycopg.errors.ObjectInUse:
                        connection.execute(
                            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                            "WHERE datname = %s",
                            (source,),
                        )
                else:
                    raise AssertionError(f"{source} is always in use")


async def greeted(client: Client) -> None:
    await client.greet(sign(SECRET, TENANT, "ann", now=time.time()))


@pytest.fixture
def site(processes: Processes, postgres: EmbeddedPostgres, migrated: str, redis_url: str) -> Site:
    return Site(processes, postgres, migrated, redis_url)


async def told(client: Client, site: Site, old: tuple[int, str]) -> dict[str, Any]:
    """The client is sent away and subscribes again from what it has, as SDKs do."""
    await client.until(lambda: client.evicted.get(ROOM) == RESUBSCRIBE, 30)
    reply = await client.subscribe(ROOM, since=old)
    assert not reply["recovered"]
    assert reply.get("publications", []) == []
    assert reply["epoch"] == site.epoch() != old[1]
    return reply


@pytest.mark.parametrize("running", [True, False], ids=["gateway-runs", "all-stopped"])
async def test_an_older_backup_is_restored(
    site: Site, running: bool, require: Callable[[str], str], tmp_path: Path
) -> None:
    """With pg_dump and pg_restore, while relays are stopped; gateways may run on."""
    gateway = await asyncio.to_thread(site.start)
    backup = tmp_path / "backup"
    environment = {"PATH": "/usr/bin:/bin"}

    async def tool(name: str, *arguments: str) -> None:
        process = await asyncio.create_subprocess_exec(
            require(name), *arguments, env=environment, stderr=asyncio.subprocess.PIPE
        )
        _, error = await process.communicate()
        assert process.returncode == 0, error.decode()

    async with Client(gateway.websocket_url) as client:
        await greeted(client)
        await client.subscribe(ROOM, since=(0, ""))
        site.publish(1, 2, 3)
        await client.until_offset(ROOM, 3)
        await tool("pg_dump", "--format=custom", f"--file={backup}", f"--dbname={site.dsn}")
        site.publish(4, 5)
        await client.until_offset(ROOM, 5)
        old = client.positions[ROOM]

        for process in site.processes.all.values():
            if process is not gateway or not running:
                await asyncio.to_thread(process.stop)
        with psycopg.connect(site.postgres.dsn(), autocommit=True) as connection:
            name = sql.Identifier(site.name)
            for statement in ("DROP DATABASE {} WITH (FORCE)", "CREATE DATABASE {}"):
                connection.execute(sql.SQL(statement).format(name))
        await tool("pg_restore", "--exit-on-error", f"--dbname={site.dsn}", str(backup))
        await asyncio.to_thread(site.processes.all["relay-1"].restart)
        if running:
            reply = await told(client, site, old)
            assert reply["offset"] == 3
            site.publish(44)
            await client.until_offset(ROOM, 4)
            assert client.data(ROOM)[-1] == 44
    if not running:
        await asyncio.to_thread(gateway.restart)
        await asyncio.to_thread(gateway.wait_ready)
        await until(lambda: site.epoch() != old[1], "the relay has found the loss")
        site.publish(44)
    async with Client(gateway.websocket_url) as late:
        await greeted(late)
        with redis_client.Redis.from_url(site.redis_url) as server:
            await until(lambda: server.get(keys.EPOCH) == site.epoch().encode(), "Redis is told")

        async def fresh() -> bool:
            """The gateway follows within about two seconds; till then it may refuse."""
            reply = await late.ask(
                {"subscribe": {"channel": ROOM, "recover": True, "offset": 5, "epoch": old[1]}}
            )
            if "error" in reply:
                assert reply["error"].get("temporary"), reply
                return False
            assert not reply["subscribe"].get("recovered")
            return bool(reply["subscribe"]["epoch"] == site.epoch())

        await until(fresh, "it is told honestly")
        await late.call("unsubscribe", channel=ROOM)
        assert (await late.subscribe(ROOM, since=(0, "")))["recovered"]
        await late.until_offset(ROOM, 4)
        assert late.data(ROOM) == [1, 2, 3, 44]
    checking = site.command("verify", "verify")
    assert await asyncio.to_thread(checking.wait, 60) == 0, checking.text()


async def test_a_gateway_is_the_only_witness(site: Site) -> None:
    """Redis was emptied as well: what a gateway has delivered proves that commits are lost."""
    gateway = await asyncio.to_thread(site.start)
    site.publish(1)
    async with Client(gateway.websocket_url) as client:
        await greeted(client)
        await client.subscribe(ROOM, since=(0, ""))
        await client.until_offset(ROOM, 1)
        relay = site.processes.all["relay-1"]
        await asyncio.to_thread(relay.stop)
        site.copy(site.name, f"{site.name}_backup")
        try:
            await asyncio.to_thread(relay.restart)
            site.publish(2, 3)
            await client.until_offset(ROOM, 3)
            await asyncio.to_thread(relay.stop)
            site.copy(f"{site.name}_backup", site.name)
            with redis_client.Redis.from_url(site.redis_url) as server:
                server.flushall()
            await asyncio.to_thread(relay.restart)
            assert (await told(client, site, client.positions[ROOM]))["offset"] == 1
            site.publish(22)
            await client.until_offset(ROOM, 2)
            assert client.data(ROOM) == [1, 2, 3, 22]
        finally:
            with psycopg.connect(site.postgres.dsn(), autocommit=True) as connection:
                connection.execute(f"DROP DATABASE IF EXISTS {site.name}_backup WITH (FORCE)")


async def test_without_a_witness_an_operator_begins_a_new_history(site: Site) -> None:
    """Redis is new, gateways were restarted: only the operator knows that commits are lost."""
    gateway = await asyncio.to_thread(site.start)
    site.copy(site.name, f"{site.name}_backup")
    try:
        async with Client(gateway.websocket_url) as client:
            await greeted(client)
            await client.subscribe(ROOM, since=(0, ""))
            site.publish(1, 2)
            await client.until_offset(ROOM, 2)
            old = client.positions[ROOM]
        for process in site.processes.all.values():
            await asyncio.to_thread(process.stop)
        with redis_client.Redis.from_url(site.redis_url) as server:
            server.flushall()
        site.copy(f"{site.name}_backup", site.name)
        site.publish(11, 12, 13)
        for process in site.processes.all.values():
            await asyncio.to_thread(process.restart)
        await asyncio.to_thread(gateway.wait_ready)

        refused = site.command("refused", "epoch", "new")
        assert await asyncio.to_thread(refused.wait, 60) == 2
        assert "tells every client that continuity was lost" in refused.text()
        assert site.epoch() == old[1]

        async with Client(gateway.websocket_url) as client:
            await greeted(client)
            await client.subscribe(ROOM, since=(0, ""))
            await client.until_offset(ROOM, 3)
            before = client.positions[ROOM]
            done = site.command("done", "epoch", "new", "--yes")
            assert await asyncio.to_thread(done.wait, 60) == 0, done.text()
            assert f"epoch {old[1]} ended, {site.epoch()} begins" in done.text()
            reply = await told(client, site, before)
            assert reply["offset"] == 3
            site.publish(14)
            await client.until_offset(ROOM, 4)
        async with Client(gateway.websocket_url) as stale:
            await greeted(stale)
            assert not (await stale.subscribe(ROOM, since=old))["recovered"]
    finally:
        with psycopg.connect(site.postgres.dsn(), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {site.name}_backup WITH (FORCE)")


async def test_a_new_epoch_without_redis_says_what_is_outstanding(site: Site, redis: Any) -> None:
    before = site.epoch()
    redis.kill()
    done = site.command("epoch", "epoch", "new", "--yes")
    assert await asyncio.to_thread(done.wait, 60) == 1
    assert "Redis cannot be told" in done.text()
    assert site.epoch() != before
