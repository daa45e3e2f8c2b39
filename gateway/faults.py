"""Expected faults, told in one line: what is wrong and what to do about it."""

import re

from gateway.logs import redact_text
from gateway.settings import SettingsError
from outbox.errors import OutboxError

USAGE = 2
"""Exit code for wrong use and wrong settings."""
FAILURE = 1
"""Exit code for what went wrong although it was asked for rightly."""

_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]*)\)")
"""A link of Markdown, as the descriptions of settings have them."""

_SCHEMA_MISSING = frozenset({"42P01", "3F000", "42883"})
"""SQLSTATEs: undefined table, invalid schema name, undefined function."""

_DRIVERS = {"psycopg": "Postgres", "psycopg_pool": "Postgres", "redis": "Redis"}


def explain(error: BaseException) -> tuple[int, tuple[str, ...]] | None:
    """The exit code and the lines for the user; None for what only a traceback explains."""
    if isinstance(error, BaseExceptionGroup):
        return explain(error.exceptions[0])
    if isinstance(error, SettingsError):
        return USAGE, tuple(_LINK.sub(r"docs/\2", problem) for problem in error.problems)
    line = _line(error)
    return None if line is None else (FAILURE, (redact_text(" ".join(line.split())),))


def _line(error: BaseException) -> str | None:
    if isinstance(error, OutboxError):
        return str(error)
    for ancestor in type(error).__mro__:
        # By name, so that this module needs no driver: psycopg belongs to the outbox.
        package = ancestor.__module__.partition(".")[0]
        if package in _DRIVERS:
            return _of_driver(_DRIVERS[package], error)
        if (package, ancestor.__name__) in _OWN:
            return str(error)
    if isinstance(error, OSError):
        # asyncio's TimeoutError is one too and says nothing at all.
        said = error.strerror or str(error)
        fallback = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
        return (said or fallback) + (f": {error.filename}" if error.filename else "")
    return None


_OWN = frozenset(
    {
        ("gateway", "CannotStart"),
        ("gateway", "EmbeddedServerError"),
        ("gateway", "StackError"),
        ("gateway", "TailFailed"),
        ("publisher", "PublishError"),
    }
)
"""Errors of modules that are not imported just to recognise them."""


def _of_driver(store: str, error: BaseException) -> str:
    state = getattr(error, "sqlstate", None)
    if state in _SCHEMA_MISSING:
        return "the schema is missing or too old: run `tidegate migrate`"
    if store == "Postgres" and state is None and type(error).__name__ == "ProgrammingError":
        # libpq quotes the connection string, and so perhaps the password.
        return (
            "TIDEGATE_POSTGRES_DSN is not a connection string: postgresql://user:password@host/db"
        )
    said = str(error).strip().splitlines() or [type(error).__name__]
    return f"{store}: {said[0]}"
