"""Publishing through PgBouncer in transaction mode: each transaction may get another server."""

import asyncio
from collections.abc import Callable, Iterator

import psycopg
import pytest

from publisher import Message, publish, publish_async, publish_many
from tests.pgbouncer import pgbouncer


@pytest.fixture
def pooled(migrated: str, require: Callable[[str], str]) -> Iterator[str]:
    """The migrated database behind PgBouncer."""
    with pgbouncer(require("pgbouncer"), migrated) as conninfo:
        yield conninfo


async def test_many_clients_share_three_servers(pooled: str, migrated: str) -> None:
    async def write(writer: int) -> list[tuple[str, str]]:
        done = []
        async with await psycopg.AsyncConnection.connect(pooled, prepare_threshold=None) as conn:
            for number in range(30):
                txid = await publish_async(conn, f"room:{writer % 3}", [writer, number])
                await conn.commit()
                done.append((f"[{writer},{number}]", txid))
        return done

    written = [pair for done in await asyncio.gather(*map(write, range(10))) for pair in done]
    with psycopg.connect(migrated) as direct:
        rows = direct.execute("SELECT payload::text, txid::text FROM tidegate.outbox").fetchall()
    assert sorted(rows) == sorted(written)


def test_no_trace_stays_in_the_session(pooled: str) -> None:
    with psycopg.connect(pooled, prepare_threshold=None) as conn:
        for number in range(20):
            publish(conn, "room", number)
            publish_many(conn, [Message("room", number)] * 3)
            conn.commit()
    with psycopg.connect(pooled, prepare_threshold=None) as conn:
        assert conn.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
        assert conn.execute(
            "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'"
        ).fetchone() == (0,)
        assert conn.execute("SELECT count(*) FROM tidegate.outbox").fetchone() == (80,)
