"""PgBouncer in transaction mode in front of a database."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gateway.embedded.process import free_port, start_child, stop_child, wait_until

CONFIG = """\
[databases]
pooled = host={host} port={port} dbname={dbname} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {servers}
ignore_startup_parameters = extra_float_digits
"""


@contextmanager
def pgbouncer(program: str, dsn: str, servers: int = 3) -> Iterator[str]:
    """Runs it with so many connections to the database; gives the conninfo through it."""
    listen_port = free_port()
    server: dict[str, Any] = conninfo_to_dict(dsn)
    folder = Path(tempfile.mkdtemp(prefix="tidegate-pgbouncer-"))
    folder.chmod(0o755)  # PgBouncer refuses to run as root, and becomes nobody then
    config, log = folder / "pgbouncer.ini", folder / "log"
    config.write_text(CONFIG.format(**server, listen_port=listen_port, servers=servers))
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
