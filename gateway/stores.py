"""Which Postgres and which Redis the settings name, told without their passwords."""

from outbox import conninfo
from outbox.redis.url import RedisUrlError, parse_redis_url

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
