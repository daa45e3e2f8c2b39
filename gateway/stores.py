"""Which Postgres and which Redis the settings name, told without their passwords, and whether the
latter is there."""

import asyncio

from outbox import conninfo
from outbox.admission import refusal
from outbox.errors import AccessRefused
from outbox.redis.connect import check, connect
from outbox.redis.url import RedisUrlError, parse_redis_url
from outbox.streams import Streams

POSTGRES_DSN = "TIDEGATE_POSTGRES_DSN"
REDIS_URL = "TIDEGATE_REDIS_URL"


def postgres_of(dsn: str) -> str:
    """Words for a person. Raises ValueError for what is no connection string."""
    problem = conninfo.problem(dsn)
    if problem:
        raise ValueError(f"{POSTGRES_DSN} {problem}")
    return f"the Postgres of {POSTGRES_DSN} ({conninfo.hosts(dsn) or 'local socket'})"


def redis_of(url: str) -> str:
    """Words for a person. Raises ValueError for what is no URL of Redis."""
    try:
        parsed = parse_redis_url(url)
    except RedisUrlError as error:
        raise ValueError(f"{REDIS_URL} {error}") from None
    hosts = ", ".join(host for host, _ in parsed.addresses)
    return f"the Redis of {REDIS_URL} ({hosts or parsed.path})"


def try_redis(url: str) -> None:
    """One attempt to use it, for those who do not want to wait.

    Raises OutboxError, redis.RedisError or OSError.
    """
    try:
        asyncio.run(_try_redis(url))
    except Exception as error:
        if (refused := refusal(error)) is not None:
            raise AccessRefused(refused) from error
        raise


async def _try_redis(url: str) -> None:
    client = connect(url)
    try:
        await check(client)
        # A server that loads its data tells about itself, and nothing else.
        await Streams(client).epoch()
    finally:
        await client.aclose()
