"""A link to Postgres that carries nothing any more."""

import asyncio
import time
from functools import partial

import psycopg
import pytest

from outbox import link
from outbox.database import connect
from outbox.link import Watch, is_working, touch
from tests.chaos.proxy import Link


def through(dsn: str, port: int) -> str:
    return psycopg.conninfo.make_conninfo(dsn, port=port)


def port_of(dsn: str) -> int:
    return int(psycopg.conninfo.conninfo_to_dict(dsn)["port"] or 0)


async def test_a_touch_is_no_statement_and_needs_an_answer(
    migrated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "ANSWER_S", 0.5)
    async with Link("to postgres", port_of(migrated)) as proxy:
        connection = await connect(through(migrated, proxy.port))
        await connection.execute("SELECT 1")
        for _ in range(3):
            await touch(connection)
        async with await connect(migrated) as other:
            cursor = await other.execute(
                "SELECT query, state FROM pg_stat_activity WHERE pid = %s",
                (connection.info.backend_pid,),
            )
            assert await cursor.fetchone() == ("SELECT 1", "idle")
        proxy.freeze()
        began = time.monotonic()
        with pytest.raises(psycopg.OperationalError):
            await touch(connection)
        assert 0.4 < time.monotonic() - began < 3
        await connection.close()


async def test_a_session_that_is_at_work_is_waited_for(
    migrated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "SUSPECT_AFTER_S", 0.1)
    async with await connect(migrated) as connection:
        looks = 0

        async def counted(pid: int) -> bool:
            nonlocal looks
            looks += 1
            return await is_working(migrated, pid)

        with Watch(connection, counted):
            await connection.execute("SELECT pg_sleep(1.5)")
        assert looks >= 2
        assert not await is_working(migrated, connection.info.backend_pid)
        assert not await is_working(migrated, 0)


async def test_who_waits_for_an_answer_that_was_lost_is_told(
    migrated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server did the work; its answer is in a proxy that hangs. New connections are well."""
    monkeypatch.setattr(link, "SUSPECT_AFTER_S", 0.2)
    async with Link("to postgres", port_of(migrated)) as proxy:
        connection = await connect(through(migrated, proxy.port))
        watch = Watch(connection, partial(is_working, migrated))
        asyncio.get_running_loop().call_later(0.1, proxy.freeze)
        began = time.monotonic()
        with pytest.raises(psycopg.OperationalError), watch:
            await connection.execute("SELECT pg_sleep(0.3)")
        assert time.monotonic() - began < 4
        await connection.close()


async def test_nobody_can_reach_the_server(migrated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "ANSWER_S", 0.3)
    async with Link("to postgres", port_of(migrated)) as proxy:
        proxy.freeze()
        began = time.monotonic()
        assert not await is_working(through(migrated, proxy.port), 1)
        assert time.monotonic() - began < 3
