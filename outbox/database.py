"""Connections to Postgres: how relay and gateways open them, and what they refuse."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from outbox.errors import PostgresUnavailable, UnsupportedServer

ADVISORY_CLASS = 1_414_087_749
"""First key of every advisory lock of Tidegate: "TIDE" in ASCII. The second key is the shard, held
exclusively by a relay while it sleeps (the doorbell), or one of the constants below."""

MIGRATION_KEY = -1
PARTITION_KEY = -2
MAINTENANCE_KEY = -3

DOORBELL_CHANNEL = "tidegate"
"""NOTIFY channel of the doorbell; the payload is the shard's number."""

CONNECT_TIMEOUT_S = 5
RECONNECT_TIMEOUT_S = 1.0
LATE_S = 3.0
"""An answer that takes longer makes its link, and those beside it, suspect."""
MIN_SERVER_VERSION = 150_000

_LINK_DEFAULTS = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    # A half-open link is noticed within 5 + 2 x 2 s when idle, 9 s when data is under way.
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 2,
    "tcp_user_timeout": 9_000,
}


class RawJsonLoader(Loader):
    """JSON as the bytes that were published: payloads are passed on, never parsed."""

    def load(self, data: bytes | bytearray | memoryview) -> bytes:
        return bytes(data)


class Connection(AsyncConnection[TupleRow]):
    """A connection in autocommit mode that gives ``json`` as bytes.

    ``pooled`` tells that a pooler such as PgBouncer stands in between: what belongs to a session
    (LISTEN, advisory locks, prepared statements, transaction ids) cannot be relied on.
    """

    pooled: bool = False


def conninfo_with_defaults(conninfo: str, application_name: str) -> str:
    """``conninfo`` with time-outs that notice a dead link within 10 s; what it says itself wins."""
    try:
        given = conninfo_to_dict(conninfo)
    except psycopg.ProgrammingError as error:
        # The text may hold a password.
        raise UnsupportedServer(
            f"the Postgres DSN cannot be read: {str(error).split(chr(34), maxsplit=1)[0].strip()}"
        ) from None
    defaults: dict[str, Any] = {**_LINK_DEFAULTS, "application_name": application_name}
    missing = {name: value for name, value in defaults.items() if name not in given}
    # Everything that is sent and read is UTF-8, whatever the environment says.
    return make_conninfo(conninfo, **{**missing, "client_encoding": "UTF8"})


async def connect(conninfo: str, *, application_name: str = "tidegate") -> Connection:
    """Opens a connection and looks at what it leads to.

    Raises:
        UnsupportedServer: Postgres before 15, or a database that is not in UTF8.
        psycopg.OperationalError: there is no way to the server.
    """
    connection: Connection = await Connection.connect(
        conninfo_with_defaults(conninfo, application_name), autocommit=True
    )
    try:
        await prepare(connection)
    except BaseException:
        await connection.close()
        raise
    return connection


async def prepare(connection: Connection) -> None:
    """Checks the server and sets the connection up; for connections that a pool has made, too."""
    problem = server_problem(connection)
    if problem:
        raise UnsupportedServer(problem)
    connection.adapters.register_loader("json", RawJsonLoader)
    cursor = await connection.execute("SELECT pg_backend_pid()", prepare=False)
    row = await cursor.fetchone()
    # A pooler announces a process id of its own making.
    connection.pooled = row is None or row[0] != connection.info.backend_pid
    if connection.pooled:
        connection.prepare_threshold = None


def server_problem(connection: psycopg.Connection[Any] | AsyncConnection[Any]) -> str | None:
    """Why Tidegate cannot work with this server or database, in one line; None if it can."""
    info = connection.info
    if info.server_version < MIN_SERVER_VERSION:
        version = info.parameter_status("server_version") or str(info.server_version)
        return f"the server is PostgreSQL {version}, the least is 15: upgrade it"
    encoding = info.parameter_status("server_encoding")
    if encoding != "UTF8":
        return (
            f'database "{info.dbname}" is encoded in {encoding}, needed is UTF8: '
            "create one with ENCODING 'UTF8' TEMPLATE template0"
        )
    return None


Pool = AsyncConnectionPool[Connection]
"""A pool whose connections are like those of ``connect``."""


@asynccontextmanager
async def reached() -> AsyncIterator[None]:
    """Around the use of a pool, for callers that do not know the driver.

    Raises:
        PostgresUnavailable: no answer, or an end to what was under way; whether it was committed
            is not known.
    """
    try:
        yield
    except PoolClosed:
        raise PostgresUnavailable("the connections to Postgres are closed") from None
    except (PoolTimeout, TimeoutError):
        raise PostgresUnavailable("Postgres does not answer in time") from None
    except psycopg.OperationalError as error:
        raise PostgresUnavailable(f"Postgres: {first_line(error)}") from error


@contextmanager
def awaited(pool: Pool) -> Iterator[None]:
    """Around the wait for an answer over a connection of the pool.

    An answer that is late may never come, and neither may any over the pool's idle connections: a
    proxy that hangs acknowledges every byte. So they are replaced, and who comes next need not find
    out about each of them.
    """

    def replace() -> None:
        if not pool.closed:
            task = asyncio.ensure_future(pool.drain())
            _replacing.add(task)
            task.add_done_callback(_replacing.discard)

    timer = asyncio.get_running_loop().call_later(LATE_S, replace)
    try:
        yield
    finally:
        timer.cancel()


_replacing: set[asyncio.Task[None]] = set()


def first_line(error: Exception) -> str:
    """The message without its details, which may quote data."""
    return str(error).partition("\n")[0]


async def open_pool(
    conninfo: str,
    min_size: int,
    max_size: int,
    timeout_s: float,
    *,
    application_name: str = "tidegate",
) -> Pool:
    """Opens a pool; ``timeout_s`` bounds the wait for a free connection.

    One connection is tried first, so that what is wrong is said at once and as it is.

    Raises:
        UnsupportedServer: as ``connect``.
        PostgresUnavailable: there is no way to the server.
    """
    async with reached():
        trial = await connect(conninfo, application_name=application_name)
        await trial.close()
    pool: Pool = AsyncConnectionPool(
        conninfo_with_defaults(conninfo, application_name),
        connection_class=Connection,
        kwargs={"autocommit": True},
        min_size=min_size,
        max_size=max_size,
        timeout=timeout_s,
        # Long pauses between attempts would outlive the outage: whoever needs one begins anew.
        reconnect_timeout=RECONNECT_TIMEOUT_S,
        configure=prepare,
        open=False,
    )
    await pool.open()
    return pool
