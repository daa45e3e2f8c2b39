"""What the gateway publishes for clients, over links that hang."""

import asyncio

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gateway.writer import Writer
from outbox.database import open_pool
from outbox.errors import PostgresUnavailable
from tests.chaos.proxy import Link


async def test_an_answer_that_does_not_come(migrated: str) -> None:
    """A proxy that hangs acknowledges every byte: nothing but a time-out ends the wait."""
    port = int(conninfo_to_dict(migrated)["port"] or 0)
    async with Link("publish", port) as link:
        pool = await open_pool(make_conninfo(migrated, port=link.port), 2, 2, 5.0)
        await pool.wait()
        writer = Writer(pool, timeout_s=0.5)
        assert await writer.insert("acme", "orders:1", b"1")
        link.freeze()
        async with asyncio.timeout(15):
            with pytest.raises(PostgresUnavailable, match="does not answer in time"):
                await writer.insert("acme", "orders:1", b"2")
        link.heal()
        assert await writer.insert("acme", "orders:1", b"3")
        await pool.close(0)
