"""Whether the link to Postgres still carries anything.

A dead peer and a broken route are found by TCP (``database._LINK_DEFAULTS``). A proxy that hangs
acknowledges every byte and passes nothing on: only an answer proves that the link is well. While a
relay waits for one, it asks over a second connection whether its session is at work; while it
sleeps, it exchanges a message with the server now and then, which is no statement.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import psycopg

from outbox import database
from outbox.database import Connection

SUSPECT_AFTER_S = 3.0
"""How long an answer may take before the link is looked at."""
ANSWER_S = 4.0
"""How long the look at it may take, and the exchange during sleep."""
TOUCH_INTERVAL_S = 4.0
QUIET_AFTER_S = 300.0
"""A relay that has had nothing to do for so long leaves the server alone, so that a database that
is billed by use can sleep."""


def hang_up(connection: Connection) -> None:
    """Ends the connection at its socket: who waits for an answer has an error at once."""
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


async def touch(connection: Connection) -> None:
    """One exchange with the server without a statement.

    Raises psycopg.OperationalError if there is no answer; the connection is then closed.
    """
    timer = asyncio.get_running_loop().call_later(ANSWER_S, hang_up, connection)
    try:
        async with connection.pipeline() as pipeline:
            await pipeline.sync()
    finally:
        timer.cancel()


async def is_working(conninfo: str, pid: int) -> bool:
    """Whether the server can be reached and the session with this process id is at work."""
    try:
        async with asyncio.timeout(ANSWER_S):
            connection = await database.connect(conninfo, application_name="tidegate-relay-look")
            try:
                cursor = await connection.execute(
                    "SELECT coalesce(state, '') NOT LIKE 'idle%%' FROM pg_stat_activity "
                    "WHERE pid = %s",
                    (pid,),
                )
                row = await cursor.fetchone()
            finally:
                await connection.close()
    except (psycopg.Error, OSError):
        return False
    return bool(row and row[0])


class Watch:
    """``with watch:`` around an exchange over the connection: a dead link ends it.

    Costs a timer. Behind a pooler, where nobody knows which session it is, it does nothing.
    """

    def __init__(self, connection: Connection, working: Callable[[int], Awaitable[bool]]) -> None:
        self._connection = connection
        self._working = working
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        if not self._connection.pooled:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(SUSPECT_AFTER_S, self._suspect)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _suspect(self) -> None:
        self._looking = asyncio.ensure_future(self._look())

    async def _look(self) -> None:
        if not await self._working(self._connection.info.backend_pid):
            hang_up(self._connection)
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(SUSPECT_AFTER_S, self._suspect)


class Unwatched:
    """Stands for a Watch where there is none."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...
