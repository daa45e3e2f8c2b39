"""The layout of the schema: what every process must agree on with the database.

Which versions work together is decided here and nowhere else. The code knows the schema up to
SCHEMA_VERSION and works with any from OLDEST_SCHEMA on, so a new relay or gateway may start before
the migration that came with it. The schema says in ``meta.oldest_reader`` the oldest version of the
code that it still suits, so the old ones go on while the migration runs and afterwards.
"""

from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import AsyncConnection, errors

from outbox.errors import SchemaBehind, SchemaMismatch

SCHEMA_VERSION = 3
"""The schema that this version of the code brings: the number of its newest file."""

OLDEST_SCHEMA = 1
"""The oldest schema with which its relays and gateways work. What needs a newer one says so."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What the database says of itself."""

    epoch: str
    """Identity of the whole log."""
    shards: int
    spread: int
    """On how many of the shards a tenant's rooms lie."""
    schema_version: int
    oldest_reader: int
    """The oldest version of the code that the schema suits."""
    doorbell: bool
    """Whether an insert rings; if not, a relay must poll."""


OLDEST_READER: LiteralString = (
    "coalesce((to_jsonb(meta) ->> 'oldest_reader')::int, meta.schema_version)"
)
"""Through JSON, because version 1 has no such column."""

STATEMENT: LiteralString = f"""
    SELECT epoch, shards, spread, schema_version, {OLDEST_READER},
           (SELECT tgenabled <> 'D' FROM pg_catalog.pg_trigger
             WHERE tgrelid = 'tidegate.outbox'::regclass AND tgname = 'doorbell')
    FROM tidegate.meta
"""  # noqa: S608


async def layout(connection: AsyncConnection[Any]) -> Layout:
    """The layout that the database has.

    Raises:
        SchemaBehind: there is no schema, or one that is too old for this version.
        SchemaMismatch: it is too new, or damaged.
    """
    try:
        cursor = await connection.execute(STATEMENT)
    except (errors.UndefinedTable, errors.InvalidSchemaName):
        raise SchemaBehind(missing_schema(connection.info.dbname)) from None
    row = await cursor.fetchone()
    if row is None:
        raise SchemaMismatch("table tidegate.meta is empty: restore it from a backup")
    found = Layout(*row)
    problem = version_problem(found.schema_version, found.oldest_reader)
    if problem:
        behind = found.schema_version < OLDEST_SCHEMA
        raise (SchemaBehind if behind else SchemaMismatch)(problem)
    return found


def missing_schema(dbname: str) -> str:
    """What to say of a database without the schema."""
    return f'database "{dbname}" has no schema "tidegate": run `tidegate migrate`'


def version_problem(
    schema_version: int, oldest_reader: int, needed: int = OLDEST_SCHEMA
) -> str | None:
    """Why this code cannot work with such a schema, in one line; None if it can.

    ``needed`` is the oldest schema that the caller can do with.
    """
    if schema_version < needed:
        return (
            f"the schema has version {schema_version}, needed is {needed}: run `tidegate migrate`"
        )
    if schema_version > SCHEMA_VERSION and oldest_reader > SCHEMA_VERSION:
        return (
            f"the schema has version {schema_version} and suits Tidegate from version "
            f"{oldest_reader} of it on, this one knows {SCHEMA_VERSION}: upgrade Tidegate"
        )
    return None
