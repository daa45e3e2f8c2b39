"""The layout of the schema: what every process must agree on with the database."""

from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection, errors

from outbox.errors import SchemaMismatch

SCHEMA_VERSION = 1
"""The schema that this version of the code works with: the number of its newest file."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What the database says of itself."""

    epoch: str
    """Identity of the whole log."""
    shards: int
    spread: int
    """On how many of the shards a tenant's rooms lie."""
    schema_version: int
    doorbell: bool
    """Whether an insert rings; if not, a relay must poll."""


STATEMENT = """
    SELECT epoch, shards, spread, schema_version,
           (SELECT tgenabled <> 'D' FROM pg_catalog.pg_trigger
             WHERE tgrelid = 'tidegate.outbox'::regclass AND tgname = 'doorbell')
    FROM tidegate.meta
"""


async def layout(connection: AsyncConnection[Any]) -> Layout:
    """The layout that the database has.

    Raises:
        SchemaMismatch: there is no schema, or not the one that this version works with.
    """
    try:
        cursor = await connection.execute(STATEMENT)
    except (errors.UndefinedTable, errors.InvalidSchemaName):
        raise SchemaMismatch(missing_schema(connection.info.dbname)) from None
    row = await cursor.fetchone()
    if row is None:
        raise SchemaMismatch("table tidegate.meta is empty: restore it from a backup")
    found = Layout(*row)
    problem = version_problem(found.schema_version)
    if problem:
        raise SchemaMismatch(problem)
    return found


def missing_schema(dbname: str) -> str:
    """What to say of a database without the schema."""
    return f'database "{dbname}" has no schema "tidegate": run `tidegate migrate`'


def version_problem(schema_version: int) -> str | None:
    """Why this code cannot work with a schema of this version; None if it can."""
    if schema_version < SCHEMA_VERSION:
        return (
            f"the schema has version {schema_version}, needed is {SCHEMA_VERSION}: "
            "run `tidegate migrate`"
        )
    if schema_version > SCHEMA_VERSION:
        return (
            f"the schema has version {schema_version}, this Tidegate knows {SCHEMA_VERSION}: "
            "upgrade Tidegate"
        )
    return None
