"""Connections to Redis, over TCP, TLS and Unix sockets: those of redis-py with one repair.

uvloop answers a write to a transport that is closed with RuntimeError, and redis-py passes it on,
where asyncio's own loop says nothing and the read that follows fails. To callers a connection that
broke must look the same wherever it broke.

And with TLS errors say what to do: OpenSSL's words name none of our options.
"""

import re
import ssl
from collections.abc import Iterable, Mapping
from typing import Any, cast

from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

REMEDIES: Mapping[str, str] = {
    "mismatch, certificate is not valid": "connect by a name that the certificate has, or put "
    "ssl_check_hostname=false into the Redis URL",
    "CERTIFICATE_VERIFY_FAILED": "ssl_ca_certs in the Redis URL must name the authority that "
    "signed the certificate",
    "CERTIFICATE_REQUIRED": "the server wants a certificate: name one with ssl_certfile and "
    "ssl_keyfile in the Redis URL",
    "WRONG_VERSION_NUMBER": "this is no TLS: redis:// instead of rediss://, no tls=true",
}
"""What to do by what OpenSSL says; the first that fits."""
CUT = re.compile("reset by peer|closed by server|broken pipe", re.IGNORECASE)
"""How a connection ends that was made and then ended by the server."""


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

    async def connect(self) -> None:
        """Raises redis.ConnectionError and redis.TimeoutError, with what to do about it."""
        try:
            await cast(Any, super()).connect()
        except RedisConnectionError as error:
            remedy = self._remedy(str(error)) if type(error) is RedisConnectionError else None
            if remedy is None:
                raise
            raise RedisConnectionError(f"{str(error).rstrip('.')}: {remedy}") from error
        except RedisTimeoutError as error:
            # A server that speaks no TLS waits for the rest of what it takes for a command.
            raise RedisTimeoutError(
                f"no TLS connection to {self.host}:{self.port} in time: is it there, and does it "
                "speak TLS (rediss://, tls=true)?"
            ) from error

    def _remedy(self, said: str) -> str | None:
        for sign, remedy in REMEDIES.items():
            if sign in said:
                return remedy
        if not self.ssl_context.certfile and CUT.search(said):
            # Its alert may be overtaken by the end of the connection.
            return "does the server want a certificate (ssl_certfile, ssl_keyfile)?"
        return None

    def _connection_arguments(self) -> Mapping[str, Any]:
        try:
            return cast(Mapping[str, Any], cast(Any, super())._connection_arguments())
        except OSError as error:  # also of OpenSSL
            said = error.strerror or str(error)
            raise RedisConnectionError(f"{self._unusable()} in the Redis URL: {said}") from error

    def _unusable(self) -> str:
        """The option whose file is to blame."""
        files = self.ssl_context
        if files.certfile or files.keyfile:
            try:
                ssl.create_default_context().load_cert_chain(files.certfile or "", files.keyfile)
            except OSError:
                return "ssl_certfile or ssl_keyfile"
        return "ssl_ca_certs"


class UnixConnection(_Repaired, UnixDomainSocketConnection):
    """Over a Unix socket."""
