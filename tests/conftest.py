"""Real servers and processes for the tests, each throw-away.

- ``postgres``: one server per session; ``postgres.dsn(dbname)``.
- ``database``: a fresh empty database per test (conninfo).
- ``migrated``: a fresh database per test with the schema (conninfo).
- ``redis``: an own Redis server per test, which the test may stop, kill and start again.
- ``redis_url``: its URL.
- ``free_port``: a function that gives a free TCP port.
- ``processes``: starts ``python -m gateway …`` and watches over it.
- ``seed``: what the test's random choices begin with.
- ``require``: skips the test if the machine lacks a program, or fails if it must be there.

``TIDEGATE_TEST_SERVERS=wheel`` (or ``machine``) runs the tests on the servers from there.
"""

import importlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
from gateway.embedded import process as embedded_process
from gateway.embedded.programs import find_programs
from tests.processes import Processes
from tests.requirements import lacking

SOURCE = os.environ.get("TIDEGATE_TEST_SERVERS", "any")
SEED = os.environ.get("TIDEGATE_TEST_SEED", "")
TEMPLATE = "migrated_template"
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "chromium": ("chromium-browser", "google-chrome", "google-chrome-stable")
}
POSTGRES_PROGRAMS = ("pgbench", "psql", "pg_dump")

# The tests start from the defaults, whatever the user has set.
for _name in [name for name in os.environ if name.startswith("TIDEGATE_")]:
    del os.environ[_name]


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(source=SOURCE) as server:  # type: ignore[arg-type]
        yield server


@pytest.fixture
def database(postgres: EmbeddedPostgres) -> Iterator[str]:
    yield from _database(postgres, "template1")


@pytest.fixture(scope="session")
def _template(postgres: EmbeddedPostgres) -> str:
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
    importlib.import_module("outbox.migrations").migrate(postgres.dsn(TEMPLATE))
    return TEMPLATE


@pytest.fixture
def migrated(postgres: EmbeddedPostgres, _template: str) -> Iterator[str]:
    # A copy of the template would share its epoch: this one is as good as any for one database.
    yield from _database(postgres, _template)


def _database(postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )
    yield postgres.dsn(name)
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute(
            sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
        )


@pytest.fixture
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(source=SOURCE) as server:  # type: ignore[arg-type]
        yield server


@pytest.fixture
def redis_url(redis: EmbeddedRedis) -> str:
    return redis.url


@pytest.fixture
def free_port() -> Callable[[], int]:
    return embedded_process.free_port


@pytest.fixture
def seed() -> int:
    """TIDEGATE_TEST_SEED, else a random number."""
    return int(SEED) if SEED else secrets.randbelow(2**32)


@pytest.fixture
def processes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Processes]:
    started = Processes(tmp_path / "processes")
    try:
        yield started
    finally:
        started.stop()
    started.check_logs()


@pytest.fixture(scope="session")
def require() -> Callable[[str], str]:
    """``require("node")`` gives the program's path, or skips the test if there is none.

    It fails instead for the programs named in TIDEGATE_TEST_REQUIRE (with commas).
    """

    def path_of(program: str) -> str:
        path = _path_of(program)
        if path is None:
            lacking(program, f"{program} is not installed")
        return path

    return path_of


def _path_of(program: str) -> str | None:
    """On PATH, where distributions put daemons, or among the programs of Postgres."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    for name in (program, *OTHER_NAMES.get(program, ())):
        if found := shutil.which(name, path=path):
            return found
    if program in POSTGRES_PROGRAMS:
        for programs in find_programs():
            if (programs.bin / program).exists():
                return str(programs.bin / program)
    return None
