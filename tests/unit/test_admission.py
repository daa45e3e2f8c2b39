"""Which errors of Postgres and Redis end a process that has never worked."""

import psycopg
import pytest
import redis

from outbox.admission import Admission, lasts, refusal
from outbox.errors import (
    AccessRefused,
    OutboxError,
    PostgresUnavailable,
    SchemaBehind,
    SchemaMismatch,
    UnsupportedServer,
)

SERVER = 'connection failed: connection to server at "127.0.0.1", port 5432 failed: '
REFUSED = [
    'password authentication failed for user "app"',
    'Peer authentication failed for user "app"',
    'no pg_hba.conf entry for host "10.0.0.7", user "app", database "shop", no encryption',
    'pg_hba.conf rejects connection for host "10.0.0.7", user "app", database "shop", SSL on',
    'role "app" does not exist',
    'role "app" is not permitted to log in',
    'database "shop" does not exist',
    'permission denied for database "shop"',
    "no such database: shop",
    "SASL authentication failed",
]
PASSING = [
    SERVER + "Connection refused",
    SERVER + "FATAL:  the database system is starting up",
    SERVER + "FATAL:  sorry, too many clients already",
    SERVER + 'FATAL:  database "shop" is not currently accepting connections',
    "failed to resolve host 'db': [Errno -2] Name or service not known",
    "connection timeout expired",
    "server closed the connection unexpectedly",
]


@pytest.mark.parametrize("said", REFUSED)
def test_a_refusal_is_told_with_its_remedy(said: str) -> None:
    error = psycopg.OperationalError(f"{SERVER}FATAL:  {said}\nDETAIL:  More about it.")
    assert refusal(error) == f"Postgres: {said}: check TIDEGATE_POSTGRES_DSN"


def test_a_refusal_counts_when_another_address_is_out_of_reach() -> None:
    for attempts in (REFUSED[0], "x"), ("x", REFUSED[0]):
        lines = [
            f"{SERVER}{f'FATAL:  {said}' if said != 'x' else 'Connection refused'}"
            for said in attempts
        ]
        text = "\n- ".join(["Multiple connection attempts failed. All failures were:", *lines])
        assert refusal(psycopg.OperationalError(text)) == (
            f"Postgres: {REFUSED[0]}: check TIDEGATE_POSTGRES_DSN"
        )


def test_a_missing_password_is_a_refusal() -> None:
    error = psycopg.OperationalError(SERVER + "fe_sendauth: no password supplied")
    assert refusal(error) == "Postgres: no password supplied: check TIDEGATE_POSTGRES_DSN"


@pytest.mark.parametrize("said", PASSING)
def test_what_may_pass_is_no_refusal(said: str) -> None:
    assert refusal(psycopg.OperationalError(said)) is None
    Admission().check(psycopg.OperationalError(said))


def test_once_granted_it_is_waited_out() -> None:
    admission = Admission()
    password = psycopg.OperationalError(f"{SERVER}FATAL:  {REFUSED[0]}")
    rights = psycopg.errors.InsufficientPrivilege("permission denied for table shard")
    for error in (password, rights):
        with pytest.raises(AccessRefused, match=r"^Postgres: .*: (check|its owner must run) "):
            admission.check(error)
    admission.connected = True
    admission.check(password)
    with pytest.raises(AccessRefused):
        admission.check(rights)
    admission.proven = True
    admission.check(rights)


def test_a_refusal_is_found_behind_what_a_pool_or_a_client_says() -> None:
    error = PostgresUnavailable("Postgres: connection failed")
    error.__cause__ = psycopg.OperationalError(f"{SERVER}FATAL:  {REFUSED[0]}")
    assert refusal(error) == f"Postgres: {REFUSED[0]}: check TIDEGATE_POSTGRES_DSN"
    admission = Admission()
    with pytest.raises(AccessRefused):
        admission.check(error)
    admission.connected = True
    admission.check(error)
    unknown = redis.ConnectionError("no sentinel named the master")
    unknown.__cause__ = redis.AuthenticationError("invalid username-password pair.")
    assert refusal(unknown) == ("Redis: invalid username-password pair: check TIDEGATE_REDIS_URL")


def test_rights_are_named_by_the_function_that_grants_them() -> None:
    error = psycopg.errors.InsufficientPrivilege("permission denied for table meta")
    assert str(refusal(error, "allow_gateway")).endswith("`SELECT tidegate.allow_gateway(role)`")


@pytest.mark.parametrize(
    "error",
    [
        redis.ConnectionError("Error 111 connecting to redis:6379. Connection refused."),
        redis.BusyLoadingError("Redis is loading the dataset in memory"),
        redis.TimeoutError("Timeout connecting to server"),
        redis.ReadOnlyError("You can't write against a read only replica."),
        redis.ConnectionError("max number of clients reached"),
        redis.ResponseError("MISCONF Errors writing to the AOF file"),
    ],
)
def test_what_redis_may_recover_from_is_no_refusal(error: redis.RedisError) -> None:
    assert refusal(error) is None
    Admission().check(error)


def test_redis_refuses_only_those_whom_it_never_let_in() -> None:
    admission = Admission()
    password = redis.AuthenticationError("invalid username-password pair or user is disabled.")
    rights = redis.exceptions.NoPermissionError("this user has no permissions to run 'get'")
    for error in (password, rights):
        with pytest.raises(AccessRefused, match=r"^Redis: .*[^.]: check TIDEGATE_REDIS_URL$"):
            admission.check(error)
    admission.redis_connected = True
    admission.check(password)
    with pytest.raises(AccessRefused):
        admission.check(rights)
    admission.proven = True
    admission.check(rights)


@pytest.mark.parametrize(
    ("error", "forever"),
    [
        (SchemaMismatch("upgrade Tidegate"), True),
        (SchemaBehind("run `tidegate migrate`"), False),
        (UnsupportedServer("upgrade it"), True),
        (AccessRefused("no"), True),
        (PostgresUnavailable("no answer"), False),
        (OutboxError("the epoch has changed"), False),
    ],
)
def test_what_waiting_mends(error: OutboxError, forever: bool) -> None:
    assert lasts(error) is forever
