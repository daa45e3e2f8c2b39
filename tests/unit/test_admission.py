"""Which errors of Postgres end a relay that has never worked."""

import psycopg
import pytest

from outbox.admission import Admission, refusal
from outbox.errors import AccessRefused

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
    assert refusal(error) == f"{said}: check TIDEGATE_POSTGRES_DSN"


def test_a_refusal_counts_when_another_address_is_out_of_reach() -> None:
    for attempts in (REFUSED[0], "x"), ("x", REFUSED[0]):
        lines = [
            f"{SERVER}{f'FATAL:  {said}' if said != 'x' else 'Connection refused'}"
            for said in attempts
        ]
        text = "\n- ".join(["Multiple connection attempts failed. All failures were:", *lines])
        assert refusal(psycopg.OperationalError(text)) == (
            f"{REFUSED[0]}: check TIDEGATE_POSTGRES_DSN"
        )


def test_a_missing_password_is_a_refusal() -> None:
    error = psycopg.OperationalError(SERVER + "fe_sendauth: no password supplied")
    assert refusal(error) == "no password supplied: check TIDEGATE_POSTGRES_DSN"


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
