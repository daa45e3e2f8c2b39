"""A migration under traffic: what ran before goes on, and says so where it cannot."""

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from gateway.tokens import sign
from outbox.layout import SCHEMA_VERSION
from outbox.migrations import check, migrations
from tests.client import Client
from tests.operate.traffic import TENANT, Traffic, numbers_are_complete
from tests.probe import until
from tests.processes import Process, Processes

SECRET = "a secret of thirty-two bytes or more"
ROOMS = ("orders:1", "orders:2")
OLD = """
import sys
import outbox.layout
outbox.layout.SCHEMA_VERSION = {version}
from gateway.__main__ import main
sys.argv[0] = "tidegate"
main()
"""
"""This code as it was when the schema had that version, as far as versions go."""


def start_old(
    processes: Processes, name: str, version: int, *arguments: str, **env: str
) -> Process:
    return processes.start_python(name, "-c", OLD.format(version=version), *arguments, **env)


def old_gateway(processes: Processes, name: str, port: int, env: dict[str, str]) -> Process:
    process = start_old(processes, name, 1, "gateway", "--port", str(port), **env)
    process.port = port
    process.wait_ready()
    return process


@pytest.fixture
def first_version(database: str) -> str:
    """A database as version 1 made it."""
    with psycopg.connect(database) as connection:
        connection.execute(migrations()[0].statement(16, 4).encode())
    return database


@pytest.mark.timeout(180)
async def test_old_processes_go_on_during_and_after_a_migration(
    first_version: str, redis_url: str, processes: Processes, tmp_path: Path
) -> None:
    dsn = first_version
    env = {
        "TIDEGATE_POSTGRES_DSN": dsn,
        "TIDEGATE_REDIS_URL": redis_url,
        "TIDEGATE_TOKEN_HMAC_SECRET": SECRET,
        "TIDEGATE_LEASE_S": "1",
    }
    start_old(processes, "old-relay", 1, "relay", **env)
    old = await asyncio.to_thread(
        old_gateway, processes, "old-gateway", processes.reserve_port(), env
    )
    async with Client(old.websocket_url) as client, Traffic(dsn, *ROOMS) as traffic:
        await client.greet(sign(SECRET, TENANT, "ann", now=time.time()))
        for room in ROOMS:
            await client.subscribe(room, since=(0, ""))
        await traffic.some()

        migrating = processes.start("migrate", "migrate", **env)
        assert await asyncio.to_thread(migrating.wait, 60) == 0, migrating.text()
        for name in ("0002 redaction", "0003 cheap_insert"):
            assert f"applied {name}" in migrating.text()
        assert check(dsn) == []
        await traffic.some()

        # They look at the layout again whenever they connect; and old ones may start anew.
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            cursor = await connection.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name LIKE 'tidegate%'"
            )
            assert (await cursor.fetchone() or (0,))[0] >= 2
        again = await asyncio.to_thread(
            old_gateway, processes, "old-again", processes.reserve_port(), env
        )
        await traffic.some()

        # The new ones beside them, and what only they can do.
        processes.start_relay("new-relay", **env)
        new = await asyncio.to_thread(processes.start_gateway, "new-gateway", **env)
        await until(lambda: len(client.offsets(ROOMS[0])) > 30, "some messages have come")
        redacting = processes.start("redact", "redact", TENANT, ROOMS[0], "5", **env)
        assert await asyncio.to_thread(redacting.wait, 60) == 0, redacting.text()
        await traffic.some()
        await traffic.end()

        heads = {}
        async with await psycopg.AsyncConnection.connect(dsn) as connection:

            async def heads_now() -> bool:
                waiting = await (
                    await connection.execute("SELECT count(*) FROM tidegate.outbox")
                ).fetchone()
                return waiting == (0,)

            await until(heads_now, "the outbox is empty")
            cursor = await connection.execute(
                "SELECT name, max(head) FROM tidegate.room GROUP BY 1"
            )
            heads = dict(await cursor.fetchall())
        for room in ROOMS:
            await client.until_offset(room, heads[room])
            assert numbers_are_complete(client.data(room), traffic.committed[room])
        assert client.evicted == {}
        for gateway in (again, new):
            async with Client(gateway.websocket_url) as late:
                await late.greet(sign(SECRET, TENANT, "bea", now=time.time()))
                assert (await late.subscribe(ROOMS[0], since=(0, "")))["recovered"]
                await late.until_offset(ROOMS[0], heads[ROOMS[0]])
                assert late.data(ROOMS[0])[4] is None
    assert all(p.alive for p in processes.all.values() if "relay" in p.name or "gate" in p.name)


async def test_new_processes_work_before_the_migration(
    first_version: str, redis_url: str, processes: Processes
) -> None:
    env = {
        "TIDEGATE_POSTGRES_DSN": first_version,
        "TIDEGATE_REDIS_URL": redis_url,
        "TIDEGATE_TOKEN_HMAC_SECRET": SECRET,
    }
    processes.start_relay(**env)
    gateway = await asyncio.to_thread(processes.start_gateway, **env)
    async with Client(gateway.websocket_url) as client:
        await client.greet(sign(SECRET, TENANT, "ann", now=time.time()))
        await client.subscribe(ROOMS[0])
        async with Traffic(first_version, ROOMS[0]):
            await client.until(lambda: len(client.offsets(ROOMS[0])) > 10)
    redacting = processes.start("redact", "redact", TENANT, ROOMS[0], "1", **env)
    assert await asyncio.to_thread(redacting.wait, 60) == 1
    assert "the schema has version 1, needed is 2: run `tidegate migrate`" in redacting.text()
    checking = processes.start("check", "migrate", "--check", **env)
    assert await asyncio.to_thread(checking.wait, 60) == 1
    assert "run `tidegate migrate`" in checking.text()


async def test_a_schema_that_old_processes_cannot_use_refuses_them(
    migrated: str, redis_url: str, processes: Processes
) -> None:
    newer = SCHEMA_VERSION + 1
    async with await psycopg.AsyncConnection.connect(migrated) as connection:
        await connection.execute(
            cast(Any, f"UPDATE tidegate.meta SET schema_version = {newer}, oldest_reader = {newer}")
        )
    env = {
        "TIDEGATE_POSTGRES_DSN": migrated,
        "TIDEGATE_REDIS_URL": redis_url,
        "TIDEGATE_TOKEN_HMAC_SECRET": SECRET,
    }
    for name in ("relay", "gateway"):
        process = processes.start(name, name, **env, TIDEGATE_PORT="0")
        assert await asyncio.to_thread(process.wait, 30) == 1, process.text()
        assert "upgrade Tidegate" in process.text()
