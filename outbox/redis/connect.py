"""From a URL to a client for Redis, in any of its set-ups.

What all share: answers as bytes over RESP2 (cheaper than RESP3) and hiredis, explicit time-outs,
and nothing that is sent twice: a repeated command is the caller's decision.
"""

import socket
from functools import partial
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.utils import HIREDIS_AVAILABLE

from outbox.errors import OutboxError, UnsupportedServer
from outbox.redis.client import Client
from outbox.redis.cluster import Cluster
from outbox.redis.connection import TcpConnection, TlsConnection, UnixConnection
from outbox.redis.sentinel import Master, MasterConnection, MasterTlsConnection, SentinelClient
from outbox.redis.url import Address, Login, RedisUrl, RedisUrlError, Tls, parse_redis_url

OLDEST_VERSION = (7, 0)
SENTINEL_TIMEOUT_S = 1.0
SENTINEL_CONNECTIONS = 4


def connect(url: str, *, timeout_s: float = 5.0, max_connections: int = 50) -> Client:
    """A client for ``url``, see ``outbox.redis.url``; no I/O yet.

    A command that takes longer than ``timeout_s`` fails, so a blocking read must ask for less. A
    caller waits up to ``timeout_s`` for one of ``max_connections`` (in a cluster: to each node).

    Raises:
        OutboxError: the URL is malformed, or hiredis is not installed.
    """
    if not HIREDIS_AVAILABLE:
        raise OutboxError("hiredis is missing or too old: pip install 'tidegate[relay]'")
    try:
        wanted = parse_redis_url(url)
    except RedisUrlError as error:
        raise OutboxError(f"the Redis URL {error}") from None
    if wanted.kind == "cluster":
        return Cluster(wanted.addresses, partial(_node, wanted, timeout_s, max_connections))
    if wanted.kind == "sentinel":
        return _sentinel_client(wanted, timeout_s, max_connections)
    options: dict[str, Any] = {"db": wanted.db, **_login(wanted.login)}
    if wanted.path:
        options |= {"connection_class": UnixConnection, "path": wanted.path}
        return cast(Client, Client.from_pool(_pool(timeout_s, max_connections, options)))
    return _node(wanted, timeout_s, max_connections, wanted.addresses[0])


def _node(wanted: RedisUrl, timeout_s: float, max_connections: int, address: Address) -> Client:
    host, port = address
    options = {
        "host": host,
        "port": port,
        "db": wanted.db,
        **_login(wanted.login),
        **_transport(wanted.tls),
    }
    return cast(Client, Client.from_pool(_pool(timeout_s, max_connections, options)))


def _sentinel_client(wanted: RedisUrl, timeout_s: float, max_connections: int) -> SentinelClient:
    shared = {**_login(wanted.sentinel_login), **_transport(wanted.tls)}
    sentinels = [
        Redis.from_pool(
            _pool(
                min(timeout_s, SENTINEL_TIMEOUT_S),
                SENTINEL_CONNECTIONS,
                {"host": host, "port": port, **shared},
            )
        )
        for host, port in wanted.addresses
    ]
    master = Master(wanted.master, sentinels)
    options = {"db": wanted.db, **_login(wanted.login), **_transport(wanted.tls), "master": master}
    options["connection_class"] = MasterTlsConnection if wanted.tls else MasterConnection
    return SentinelClient.of(master, _pool(timeout_s, max_connections, options))


def _pool(
    timeout_s: float, max_connections: int, options: dict[str, Any]
) -> BlockingConnectionPool:
    return BlockingConnectionPool(
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        decode_responses=False,
        max_connections=max_connections,
        timeout=timeout_s,
        **options,
    )


def _login(login: Login) -> dict[str, Any]:
    return {"username": login.username or None, "password": login.password or None}


def _transport(tls: Tls | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "connection_class": TcpConnection,
        "socket_keepalive": True,
        "socket_keepalive_options": _keepalive(),
    }
    if tls is not None:
        options |= {
            "connection_class": TlsConnection,
            "ssl_ca_certs": tls.ca_file or None,
            "ssl_certfile": tls.certificate_file or None,
            "ssl_keyfile": tls.key_file or None,
            "ssl_check_hostname": tls.check_hostname,
            "ssl_cert_reqs": tls.verification,
        }
    return options


def _keepalive() -> dict[int, int]:
    """Half-open links are found after 10 + 3 × 5 seconds, where the system can be told so."""
    wanted = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}


async def check(client: Client) -> tuple[str, ...]:
    """Asks each server what it is; gives warnings for the operator.

    Raises:
        UnsupportedServer: one is older than 7.0.
    """
    warnings = []
    for server in await client.servers():
        info: dict[str, Any] = await server.info()
        version = str(info.get("redis_version", ""))
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if numbers < OLDEST_VERSION:
            raise UnsupportedServer(
                f"Redis is {version or 'of unknown version'}, Tidegate needs 7.0"
            )
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            warnings.append(
                f"Redis may evict streams (maxmemory-policy {policy}): they are made again from "
                "the log, at a cost; set maxmemory-policy noeviction"
            )
    return tuple(dict.fromkeys(warnings))
