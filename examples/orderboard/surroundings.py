"""What the demo takes from the environment: nothing, unless it is told to.

It writes, kills and flushes. A shell that has exported the settings of somebody's real database
must not lead it there.
"""

from collections.abc import Mapping, MutableMapping
from urllib.parse import urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict

PREFIX = "TIDEGATE_"
POSTGRES_DSN = "TIDEGATE_POSTGRES_DSN"
REDIS_URL = "TIDEGATE_REDIS_URL"
EMBEDDED = "the demo's own"


def leave_out(environment: MutableMapping[str, str]) -> list[str]:
    """Remove all settings of Tidegate; the names of those that had a value."""
    names = sorted(name for name in environment if name.startswith(PREFIX))
    return [name for name in names if environment.pop(name)]


def describe(environment: Mapping[str, str]) -> str:
    """Which servers the environment names, by their hosts only: no users, no passwords."""
    postgres = _postgres_host(environment.get(POSTGRES_DSN, ""))
    return f"Postgres: {postgres}, Redis: {_redis_host(environment.get(REDIS_URL, ''))}"


def _postgres_host(conninfo: str) -> str:
    if not conninfo:
        return EMBEDDED
    try:
        parts = conninfo_to_dict(conninfo)
    except psycopg.Error:
        return "a connection string that libpq does not understand"  # it may hold the password
    return str(parts.get("host") or parts.get("hostaddr") or "libpq's default host")


def _redis_host(url: str) -> str:
    if not url:
        return EMBEDDED
    try:
        return urlsplit(url).hostname or "a local socket"
    except ValueError:
        return "a URL that cannot be understood"
