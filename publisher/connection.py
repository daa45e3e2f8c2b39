"""The connections and cursors that can publish, and how a statement runs on each.

psycopg's own are used through a cursor of ours on the same connection, so neither a row factory
nor a raw cursor class nor an unread result of the caller's cursor matters. Any other DB-API
connection or cursor (those of Django and SQLAlchemy above all) is used as it is: what its maker
wraps around it stays in force.
"""

from contextlib import closing
from typing import Any, Protocol, TypeVar, cast

import psycopg
from psycopg.rows import tuple_row

from publisher.errors import InvalidMessage
from publisher.rejection import rejection

T = TypeVar("T")


class DBAPICursor(Protocol):
    """A cursor of PEP 249 with pyformat parameters: psycopg's, Django's, SQLAlchemy's."""

    def execute(self, query: Any, params: Any, /) -> Any: ...

    def fetchone(self) -> Any: ...

    def close(self) -> None: ...


class DBAPIConnection(Protocol):
    """A connection of PEP 249: psycopg's, ``django.db.connection``, SQLAlchemy's raw connection."""

    def cursor(self) -> DBAPICursor: ...

    def close(self) -> None: ...


SyncTarget = DBAPIConnection | DBAPICursor
AsyncTarget = psycopg.AsyncConnection[Any] | psycopg.AsyncCursor[Any]


def run(target: SyncTarget, sql: str, params: dict[str, Any]) -> str:
    """Runs ``sql`` in the target's transaction and gives the first column of its one row."""
    if isinstance(target, psycopg.Connection | psycopg.Cursor):
        connection = target if isinstance(target, psycopg.Connection) else target.connection
        cursor_class = _cursor_class(connection.cursor_factory, psycopg.RawCursor, psycopg.Cursor)
        with cursor_class(connection, row_factory=tuple_row) as own:
            return _run(own, connection, sql, params)
    if isinstance(target, psycopg.AsyncConnection | psycopg.AsyncCursor):
        raise TypeError(
            f"publish() does not await: use publish_async() with {type(target).__name__}"
        )
    if callable(getattr(target, "cursor", None)):
        with closing(cast(DBAPIConnection, target).cursor()) as cursor:
            return _run(cursor, None, sql, params)
    if callable(getattr(target, "execute", None)) and callable(getattr(target, "fetchone", None)):
        return _run(cast(DBAPICursor, target), None, sql, params)
    raise TypeError(_misfit("publish()", "a psycopg or DB-API connection or cursor", target))


async def run_async(target: AsyncTarget, sql: str, params: dict[str, Any]) -> str:
    """`run` for psycopg's asynchronous connections and cursors."""
    if isinstance(target, psycopg.AsyncConnection):
        connection: psycopg.AsyncConnection[Any] = target
    elif isinstance(target, psycopg.AsyncCursor):
        connection = target.connection
    else:
        raise TypeError(
            _misfit("publish_async()", "psycopg's AsyncConnection or AsyncCursor", target)
        )
    cursor_class = _cursor_class(
        connection.cursor_factory, psycopg.AsyncRawCursor, psycopg.AsyncCursor
    )
    async with cursor_class(connection, row_factory=tuple_row) as own:
        in_pipeline = _in_pipeline(connection)
        try:
            await own.execute(sql.encode(), params)
            return _text(await own.fetchone())
        except Exception as error:
            _raise(error, in_pipeline)
            raise


def _run(cursor: Any, connection: Any, sql: str, params: dict[str, Any]) -> str:
    in_pipeline = connection is not None and _in_pipeline(connection)
    try:
        cursor.execute(sql, params)
        return _text(cursor.fetchone())
    except Exception as error:
        _raise(error, in_pipeline)
        raise


def _cursor_class(configured: type[T], raw: type[Any], usual: type[T]) -> type[T]:
    """The connection's own cursor class, such as a ClientCursor, unless it speaks ``$1``."""
    return usual if issubclass(configured, raw) else configured


def _in_pipeline(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    return connection.pgconn.pipeline_status != psycopg.pq.PipelineStatus.OFF


def _text(row: Any) -> str:
    value = row[0] if isinstance(row, tuple | list) else row
    # A connection with client_encoding SQL_ASCII gives text as bytes.
    return value.decode() if isinstance(value, bytes) else str(value)


def _raise(error: Exception, in_pipeline: bool) -> None:
    """Raises the error that the caller of `publish` shall see instead of ``error``, if any."""
    if isinstance(error, UnicodeEncodeError):
        character = ord(error.object[error.start])
        raise InvalidMessage(
            f"the connection's client_encoding ({error.encoding}) cannot carry U+{character:04X}: "
            "set client_encoding to UTF8"
        ) from None
    rejected = rejection(error, in_pipeline=in_pipeline)
    if rejected is not None:
        # The database's own words about JSON text quote it.
        raise rejected from (error if rejected.sqlstate == "23514" else None)


def _misfit(function: str, wanted: str, target: object) -> str:
    kind = f"{type(target).__module__}.{type(target).__qualname__}"
    hint = ""
    if kind.startswith("sqlalchemy."):
        hint = "; with SQLAlchemy run publisher.statement(), or pass connection.connection"
    elif kind.startswith("psycopg_pool."):
        hint = "; take a connection from the pool first"
    return f"{function} takes {wanted}, not {kind}{hint}"
