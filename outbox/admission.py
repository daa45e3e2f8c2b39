"""Admission: whether Postgres and Redis let a process in and let it do its work.

What a process meets at its start is either waited for (a store that is not there yet, a schema that
a migration is about to make) or ends it, because only its settings or its version can mend it.
Before it has worked for the first time, a refusal is a mistake in its settings. Later one passes:
passwords and rights are changed, a failover is under way.
"""

import re
from collections.abc import Iterator

import psycopg
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from outbox.database import first_line
from outbox.errors import AccessRefused, SchemaBehind, SchemaMismatch, UnsupportedServer

_REFUSED = re.compile(
    r"(?<=FATAL:  )(?:"
    # 28P01, 28000
    r"[\w. -]*authentication failed.*|no pg_hba\.conf entry for .*|pg_hba\.conf rejects .*"
    r'|role ".*" does not exist|role ".*" is not permitted to log in'
    # 3D000, 42501
    r'|database ".*" does not exist|no such database.*|permission denied for database .*'
    r")|(?<=fe_sendauth: )no password supplied"
)
_REDIS_REFUSALS = (AuthenticationError, AuthenticationWrongNumberOfArgsError, NoPermissionError)
CAUSES_MAX = 4


class Admission:
    """What one relay was granted so far."""

    def __init__(self) -> None:
        self.connected = False
        """Whether Postgres let it in."""
        self.redis_connected = False
        """Whether Redis did."""
        self.proven = False
        """Whether its rights were enough to sequence and to append."""

    def check(self, error: Exception) -> None:
        """Raises AccessRefused if the error is a refusal of what was never granted."""
        for cause in _causes(error):
            if (refused := _refused(cause, "allow_relay")) is None:
                continue
            if isinstance(cause, psycopg.OperationalError):
                granted = self.connected
            elif isinstance(cause, RedisError) and not isinstance(cause, NoPermissionError):
                granted = self.redis_connected
            else:
                granted = self.proven
            if not granted:
                raise AccessRefused(refused) from error


def lasts(error: BaseException) -> bool:
    """Whether only another version, another server or a hand at the schema mends it.

    A schema that is missing or too old is waited for: a migration may be on its way.
    """
    if isinstance(error, SchemaMismatch):
        return not isinstance(error, SchemaBehind)
    return isinstance(error, UnsupportedServer | AccessRefused)


def refusal(error: BaseException, grant: str = "allow_relay") -> str | None:
    """Why Postgres or Redis refuses this user or database, in one line; None if waiting may help.

    ``grant`` is the function of the schema that gives the rights which the process needs.

    Of Postgres SQLSTATEs 28P01, 28000, 3D000 and 42501. libpq has none for a connection that
    fails, so there the text decides: where a server speaks another language than English, nothing
    is a refusal. Of Redis WRONGPASS, NOAUTH, NOPERM and a database number that it does not have.
    """
    return next(filter(None, (_refused(cause, grant) for cause in _causes(error))), None)


def _refused(error: BaseException, grant: str) -> str | None:
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return f"Postgres: {first_line(error)}: its owner must run `SELECT tidegate.{grant}(role)`"
    if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
        # An address may have been out of reach as well, as ::1 often is for localhost.
        found = _REFUSED.search(str(error))
        return None if found is None else f"Postgres: {found[0]}: check TIDEGATE_POSTGRES_DSN"
    if isinstance(error, _REDIS_REFUSALS) or (
        isinstance(error, ResponseError) and "DB index is out of range" in str(error)
    ):
        said = first_line(error).rstrip(".") or type(error).__name__
        return f"Redis: {said}: check TIDEGATE_REDIS_URL"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from: clients and pools wrap what a server said."""
    cause: BaseException | None = error
    for _ in range(CAUSES_MAX):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__
