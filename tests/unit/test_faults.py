import psycopg
import pytest
import redis

from gateway import faults
from gateway.settings import SettingsError
from gateway.tail import TailFailed
from outbox.errors import SchemaMismatch
from publisher import InvalidMessage


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (SettingsError(["TIDEGATE_PORT is odd"]), 2, "TIDEGATE_PORT is odd"),
        (SettingsError(["See [Redis](operate/redis.md)."]), 2, "See docs/operate/redis.md."),
        (SchemaMismatch("run `tidegate migrate`"), 1, "run `tidegate migrate`"),
        (
            psycopg.errors.UndefinedTable("no"),
            1,
            "the schema is missing or too old: run `tidegate migrate`",
        ),
        (
            psycopg.ProgrammingError('missing "=" after "hunter2" in connection info string'),
            1,
            "TIDEGATE_POSTGRES_DSN is not a connection string: "
            "postgresql://user:[redacted]@host/db",
        ),
        (
            psycopg.OperationalError("connection refused\n\tIs the server running?"),
            1,
            "Postgres: connection refused",
        ),
        (redis.ConnectionError("Error 111 connecting"), 1, "Redis: Error 111 connecting"),
        (redis.AuthenticationError(""), 1, "Redis: AuthenticationError"),
        (ConnectionRefusedError(111, "Connection refused"), 1, "Connection refused"),
        (FileNotFoundError(2, "No such file", "a.toml"), 1, "No such file: a.toml"),
        (TimeoutError(), 1, "no answer in time"),
        (TailFailed("closed with 3500"), 1, "closed with 3500"),
        (InvalidMessage("room name is odd"), 1, "room name is odd"),
        (ExceptionGroup("several", [SchemaMismatch("one")]), 1, "one"),
    ],
)
def test_expected_faults(error: Exception, code: int, line: str) -> None:
    assert faults.explain(error) == (code, (line,))


def test_the_rest_needs_its_traceback() -> None:
    for error in (RuntimeError("bug"), KeyError("x"), ValueError("x")):
        assert faults.explain(error) is None


def test_no_password_in_a_line() -> None:
    error = psycopg.OperationalError("no way to postgresql://app:hunter2@db/x")
    explained = faults.explain(error)
    assert explained is not None
    assert "hunter2" not in explained[1][0]
