"""Connections to Postgres: what they are set to, and what they notice."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from outbox.database import Connection, connect, open_pool, server_problem
from outbox.log import Log
from outbox.sequence import Sequencer
from tests.pgbouncer import pgbouncer


@pytest.fixture
def through_pooler(migrated: str, require: Callable[[str], str]) -> Iterator[str]:
    with pgbouncer(require("pgbouncer"), migrated) as conninfo:
        yield conninfo


async def test_settings_of_a_connection(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    async with await connect(database, application_name="tidegate-test") as connection:
        parameters = connection.info.get_parameters()
        assert parameters["application_name"] == "tidegate-test"
        assert parameters["tcp_user_timeout"] == "9000"
        assert parameters["connect_timeout"] == "5"
        assert connection.info.encoding == "utf-8"
        assert connection.autocommit
        assert not connection.pooled


async def test_the_dsn_has_the_last_word(database: str) -> None:
    dsn = psycopg.conninfo.make_conninfo(database, connect_timeout=2, application_name="mine")
    async with await connect(dsn) as connection:
        parameters = connection.info.get_parameters()
    assert (parameters["connect_timeout"], parameters["application_name"]) == ("2", "mine")


async def test_json_comes_as_it_was_sent(database: str) -> None:
    text = '{"b" : 1,\n "a":1e400, "a": 2}'
    async with await connect(database) as connection:
        cursor = await connection.execute("SELECT %s::json", (text,))
        assert await cursor.fetchone() == (text.encode(),)
    pool = await open_pool(database, 1, 1, 5.0)
    async with pool.connection() as pooled:
        cursor = await pooled.execute("SELECT %s::json", (text,))
        assert await cursor.fetchone() == (text.encode(),)
    await pool.close()


def test_an_old_server_is_named() -> None:
    info = SimpleNamespace(
        server_version=140_011, parameter_status={"server_version": "14.11"}.get, dbname="d"
    )
    old = cast(psycopg.Connection[Any], SimpleNamespace(info=info))
    assert server_problem(old) == "the server is PostgreSQL 14.11, the least is 15: upgrade it"


async def test_a_pooler_is_noticed(through_pooler: str) -> None:
    async with await connect(through_pooler) as connection:
        assert connection.pooled
        assert connection.prepare_threshold is None
    pool = await open_pool(through_pooler, 1, 2, 5.0)
    async with pool.connection() as pooled:
        assert pooled.pooled
    await pool.close()


async def test_sequencing_and_reading_through_a_pooler(through_pooler: str, migrated: str) -> None:
    """Transactions of one client on changing servers, and several clients on one."""
    done = asyncio.Event()

    async def write(writer: Connection, room: str) -> None:
        for number in range(100):
            await writer.execute("SELECT tidegate.publish('t', %s, %s)", (room, str(number)))

    async def sequence() -> None:
        async with await connect(through_pooler) as connection:
            sequencer = Sequencer(connection)
            while not done.is_set():
                await sequencer.batch(range(16), 7, "SELECT pg_advisory_unlock_all()")
            while (await sequencer.batch(range(16), 100)).messages:
                pass

    async with await connect(through_pooler) as one, await connect(migrated) as other:
        sequencing = [asyncio.create_task(sequence()) for _ in range(2)]
        await asyncio.gather(write(one, "a"), write(other, "b"))
        done.set()
        await asyncio.gather(*sequencing)
        cursor = await other.execute("SELECT tidegate.shard_of('t', 'a')")
        (shard,) = await cursor.fetchone() or (-1,)
    pool = await open_pool(through_pooler, 1, 2, 5.0)
    page = await Log(pool).page("t", "a", shard, 0, 1_000)
    await pool.close()
    assert [message.payload for message in page.messages] == [b"%d" % n for n in range(100)]
    assert [message.offset for message in page.messages] == list(range(1, 101))
