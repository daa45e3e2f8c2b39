"""Publishing through PgBouncer in transaction mode: each transaction may get another server."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gateway.embedded.process import free_port, start_child, stop_child, wait_until
from publisher import Message, publish, publish_async, publish_many

CONFIG = """\
[databases]
pooled = host={host} port={port} dbname={dbname} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 3
ignore_startup_parameters = extra_float_digits
"""


@pytest.fixture
def pooled(migrated: str, require: Callable[[str], str]) -> Iterator[str]:
    """The migrated database behind PgBouncer."""
    program = require("pgbouncer")
    listen_port = free_port()
    server: dict[str, Any] = conninfo_to_dict(migrated)
    folder = Path(tempfile.mkdtemp(prefix="tidegate-pgbouncer-"))
    folder.chmod(0o755)  # PgBouncer refuses to run as root, and becomes nobody then
    config, log = folder / "pgbouncer.ini", folder / "log"
    config.write_text(CONFIG.format(**server, listen_port=listen_port))
    as_nobody = ["--user=nobody"] if os.geteuid() == 0 else []
    with log.open("wb") as output:
        process = start_child([program, *as_nobody, str(config)], output=output)
    conninfo = make_conninfo(host="127.0.0.1", port=listen_port, dbname="pooled", user="app")
    try:
        wait_until(lambda: _answers(conninfo), process, log, "PgBouncer", 20)
        yield conninfo
    finally:
        stop_child(process, [(signal.SIGTERM, 5)])
        shutil.rmtree(folder)


def _answers(conninfo: str) -> bool:
    try:
        psycopg.connect(conninfo, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


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
