"""The schema's files and how they get into a database.

``schema/NNNN_name.sql`` are applied in order, each in a transaction of its own, and recorded with
the hash of their text in ``tidegate.migration``. A file that has been released is never changed.
"""

import random
import re
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from time import monotonic, sleep
from typing import Any

import psycopg
from psycopg import Connection, errors, sql

from outbox.database import (
    ADVISORY_CLASS,
    MIGRATION_KEY,
    conninfo_with_defaults,
    server_problem,
)
from outbox.errors import SchemaMismatch, UnsupportedServer
from outbox.layout import OLDEST_READER, SCHEMA_VERSION, missing_schema, version_problem

DEFAULT_SHARDS = 16
DEFAULT_SPREAD = 4
MAX_SHARDS = 1024

LOCK_TIMEOUT_S = 60
"""How long a migration waits for another one, and how long it tries for locks on the tables."""
TABLE_LOCK_TIMEOUT_MS = 500
"""How long one attempt waits for a table: relays, gateways and publishers queue behind it."""
RETRY_S = 0.5

ACCEPT_SCHEMA = 3
"""The schema from which on a trigger checks each row and computes its shard."""

_FILE_NAME = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_VARIABLE = re.compile(r"(?<![:\w]):(shards|spread)\b")


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of the schema."""

    id: int
    name: str
    text: str
    sha256: str

    def statement(self, shards: int, spread: int) -> str:
        """The text with psql's variables ``:shards`` and ``:spread`` replaced by numbers."""
        values = {"shards": str(shards), "spread": str(spread)}
        return _VARIABLE.sub(lambda match: values[match[1]], self.text)


def migrations() -> list[Migration]:
    """All files of the schema, in order."""
    found = []
    for file in resources.files("outbox").joinpath("schema").iterdir():
        match = _FILE_NAME.fullmatch(file.name)
        if match:
            data = file.read_bytes()
            found.append(
                Migration(int(match[1]), match[2], data.decode(), sha256(data).hexdigest())
            )
    return sorted(found, key=lambda migration: migration.id)


def layout_problem(shards: int, spread: int) -> str | None:
    """Why this layout is impossible, in one line; None if it is possible."""
    if not 1 <= shards <= MAX_SHARDS:
        return f"shards is {shards}: give a number from 1 to {MAX_SHARDS}"
    if not 1 <= spread <= shards:
        return f"spread is {spread}: give a number from 1 to {shards}, the number of shards"
    return None


def migrate(conninfo: str, shards: int | None = None, spread: int | None = None) -> list[Migration]:
    """Brings the schema up to this version and returns what it has applied.

    ``shards`` and ``spread`` count when the schema is made (default 16 and 4, spread at most
    shards); afterwards they may be left out, and must agree with the database if they are given.
    May be repeated, and run by several processes at once.

    Raises:
        SchemaMismatch: the database has another layout, a newer schema that does not suit this
            version, or one made of other files.
        UnsupportedServer: Postgres before 15, or a database that is not in UTF8.
        psycopg.Error: no connection, or no permission.
    """
    with psycopg.connect(
        conninfo_with_defaults(conninfo, "tidegate-migrate"),
        autocommit=True,
        prepare_threshold=None,
    ) as connection:
        problem = server_problem(connection)
        if problem:
            raise UnsupportedServer(problem)
        return [
            migration
            for migration in migrations()
            if _patiently(connection, migration, shards, spread)
        ]


def _patiently(
    connection: Connection[Any], migration: Migration, shards: int | None, spread: int | None
) -> bool:
    """Applies one file unless the database has it; whether it did.

    Gives way to those who use the tables, and tries again.
    """
    deadline_s = monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            with connection.transaction():
                return _apply(connection, migration, shards, spread)
        except (errors.LockNotAvailable, errors.DeadlockDetected):
            if monotonic() >= deadline_s:
                raise
        sleep(random.uniform(RETRY_S / 2, RETRY_S))


def _apply(
    connection: Connection[Any], migration: Migration, shards: int | None, spread: int | None
) -> bool:
    _lock(connection)
    if migration.id <= _verified_version(connection, shards, spread):
        return False
    if migration.id == 1:
        asked = shards if shards is not None else DEFAULT_SHARDS
        given = spread if spread is not None else min(DEFAULT_SPREAD, asked)
    else:
        asked, given = _layout(connection)
    problem = layout_problem(asked, given)
    if problem:
        raise SchemaMismatch(problem)
    _set_lock_timeout(connection, TABLE_LOCK_TIMEOUT_MS)
    connection.execute(migration.statement(asked, given).encode())
    _record(connection, migration)
    return True


def check(conninfo: str, shards: int | None = None, spread: int | None = None) -> list[str]:
    """What keeps this version of Tidegate from working with the database, one line each.

    Raises:
        psycopg.OperationalError: there is no way to the server.
    """
    try:
        with psycopg.connect(
            conninfo_with_defaults(conninfo, "tidegate-migrate"),
            autocommit=True,
            prepare_threshold=None,
        ) as connection:
            problem = server_problem(connection)
            if problem:
                return [problem]
            with connection.transaction():
                connection.execute("SET TRANSACTION READ ONLY")
                return _problems(connection, shards, spread)
    except UnsupportedServer as error:
        return [str(error)]


def _problems(connection: Connection[Any], shards: int | None, spread: int | None) -> list[str]:
    version = _schema_version(connection)
    if version == 0:
        return [missing_schema(connection.info.dbname)]
    found = version_problem(version, _oldest_reader(connection), SCHEMA_VERSION)
    problems = [found] if found else []
    problems += _changed_files(connection)
    problems += _layout_differences(connection, shards, spread)
    row = connection.execute(
        "SELECT FROM pg_catalog.pg_trigger "
        "WHERE tgrelid = 'tidegate.outbox'::regclass AND tgname = 'doorbell'"
    ).fetchone()
    if row is None:
        problems.append("table tidegate.outbox has lost its trigger doorbell: restore it")
    elif version >= ACCEPT_SCHEMA and not _accepts(connection):
        problems.append(
            "table tidegate.outbox takes no rows, both its triggers are off: "
            "SELECT tidegate.set_doorbell(true), or false where transactions are prepared"
        )
    row = connection.execute(
        "SELECT to_regclass('tidegate.message_' || "
        "to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')) IS NULL"
    ).fetchone()
    if row is not None and row[0]:
        problems.append(
            "the log has no partition for today: start a relay, "
            "or SELECT tidegate.make_partitions(7)"
        )
    return problems


def _accepts(connection: Connection[Any]) -> bool:
    row = connection.execute(
        "SELECT FROM pg_catalog.pg_trigger WHERE tgrelid = 'tidegate.outbox'::regclass "
        "AND tgname IN ('accept', 'doorbell') AND tgenabled = 'A'"
    ).fetchone()
    return row is not None


def _lock(connection: Connection[Any]) -> None:
    _set_lock_timeout(connection, LOCK_TIMEOUT_S * 1000)
    connection.execute("SELECT pg_advisory_xact_lock(%s, %s)", (ADVISORY_CLASS, MIGRATION_KEY))


def _set_lock_timeout(connection: Connection[Any], timeout_ms: int) -> None:
    connection.execute(
        sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(f"{timeout_ms}ms"))
    )


def _verified_version(connection: Connection[Any], shards: int | None, spread: int | None) -> int:
    version = _schema_version(connection)
    if version == 0:
        return 0
    problems = _changed_files(connection) + _layout_differences(connection, shards, spread)
    newer = version_problem(version, _oldest_reader(connection), min(version, SCHEMA_VERSION))
    if newer:
        problems.insert(0, newer)
    if problems:
        raise SchemaMismatch("; ".join(problems))
    # Files that were applied by hand are recorded now.
    for migration in migrations():
        if migration.id <= version:
            _record(connection, migration)
    return version


def _schema_version(connection: Connection[Any]) -> int:
    row = connection.execute("SELECT to_regclass('tidegate.meta') IS NOT NULL").fetchone()
    if row is None or not row[0]:
        return 0
    row = connection.execute("SELECT schema_version FROM tidegate.meta").fetchone()
    if row is None:
        raise SchemaMismatch("table tidegate.meta is empty: restore it from a backup")
    version: int = row[0]
    return version


def _oldest_reader(connection: Connection[Any]) -> int:
    row = connection.execute(f"SELECT {OLDEST_READER} FROM tidegate.meta").fetchone()  # noqa: S608
    return 0 if row is None else int(row[0])


def _layout(connection: Connection[Any]) -> tuple[int, int]:
    row = connection.execute("SELECT shards, spread FROM tidegate.meta").fetchone()
    if row is None:
        raise SchemaMismatch("table tidegate.meta is empty: restore it from a backup")
    return row[0], row[1]


def _layout_differences(
    connection: Connection[Any], shards: int | None, spread: int | None
) -> list[str]:
    has = dict(zip(("shards", "spread"), _layout(connection), strict=True))
    return [
        f"the database has {name} = {has[name]}, asked for was {asked}: "
        "a layout cannot be changed, leave the option out"
        for name, asked in (("shards", shards), ("spread", spread))
        if asked is not None and asked != has[name]
    ]


def _changed_files(connection: Connection[Any]) -> list[str]:
    files = {migration.id: migration for migration in migrations()}
    rows = connection.execute("SELECT id, name, sha256 FROM tidegate.migration ORDER BY id")
    return [
        f"migration {id:04}_{name} was applied from another file than this version has: "
        "use the version of Tidegate that made the schema, or restore the file"
        for id, name, applied in rows
        if id in files and files[id].sha256 != applied
    ]


def _record(connection: Connection[Any], migration: Migration) -> None:
    connection.execute(
        "INSERT INTO tidegate.migration (id, name, sha256) VALUES (%s, %s, %s) "
        "ON CONFLICT (id) DO NOTHING",
        (migration.id, migration.name, migration.sha256),
    )
