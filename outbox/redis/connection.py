"""Connections to Redis, over TCP, TLS and Unix sockets: those of redis-py with one repair.

uvloop answers a write to a transport that is closed with RuntimeError, and redis-py passes it on,
where asyncio's own loop says nothing and the read that follows fails. To callers a connection that
broke must look the same wherever it broke.
"""

from collections.abc import Iterable
from typing import Any, cast

from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)


class _Repaired(AbstractConnection):
    """Of its own no connection: it comes before one of redis-py's among the bases."""

    async def _send_packed_command(self, command: Iterable[bytes]) -> None:
        try:
            await cast(Any, super())._send_packed_command(command)
        except RuntimeError as error:
            # redis-py makes a redis.ConnectionError of it.
            raise ConnectionResetError(str(error)) from error


class TcpConnection(_Repaired, Connection):
    """Over TCP."""


class TlsConnection(_Repaired, SSLConnection):
    """Over TCP with TLS."""


class UnixConnection(_Repaired, UnixDomainSocketConnection):
    """Over a Unix socket."""
