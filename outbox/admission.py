"""Admission: whether Postgres lets a relay in and lets it do its work.

Before a relay has worked for the first time, a refusal is a mistake in its settings, and it ends.
Later one passes: passwords and rights are changed, a failover is under way.
"""

import re

import psycopg

from outbox.database import first_line
from outbox.errors import AccessRefused

_REFUSED = re.compile(
    r"(?<=FATAL:  )(?:"
    # 28P01, 28000
    r"[\w. -]*authentication failed.*|no pg_hba\.conf entry for .*|pg_hba\.conf rejects .*"
    r'|role ".*" does not exist|role ".*" is not permitted to log in'
    # 3D000, 42501
    r'|database ".*" does not exist|no such database.*|permission denied for database .*'
    r")|(?<=fe_sendauth: )no password supplied"
)


class Admission:
    """What one relay was granted so far."""

    def __init__(self) -> None:
        self.connected = False
        """Whether it was let in."""
        self.proven = False
        """Whether its rights were enough to sequence."""

    def check(self, error: Exception) -> None:
        """Raises AccessRefused if the error is a refusal of what was never granted."""
        granted = self.connected if isinstance(error, psycopg.OperationalError) else self.proven
        if not granted and (refused := refusal(error)) is not None:
            raise AccessRefused(f"Postgres: {refused}") from error


def refusal(error: BaseException) -> str | None:
    """Why Postgres refuses this user or database, in one line; None if waiting may help.

    SQLSTATEs 28P01, 28000, 3D000 and 42501. libpq has none for a connection that fails, so there
    the text decides: where a server speaks another language than English, nothing is a refusal.
    """
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return f"{first_line(error)}: its owner must run `SELECT tidegate.allow_relay(role)`"
    if not isinstance(error, psycopg.OperationalError) or error.sqlstate is not None:
        return None
    # An address may have been out of reach as well, as ::1 often is for localhost.
    found = _REFUSED.search(str(error))
    return None if found is None else f"{found[0]}: check TIDEGATE_POSTGRES_DSN"
