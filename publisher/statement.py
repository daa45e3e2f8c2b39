"""The SQL that publishes, for connections that are not psycopg's own and for joined statements.

A second statement for the outbox row costs its round trip. Business write and message as one
statement cost nothing extra: put `Statement.cte` before the business statement.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from outbox.names import DEFAULT_TENANT
from publisher.encoding import encode
from publisher.errors import InvalidMessage
from publisher.message import Message

ParamStyle = Literal["pyformat", "named"]
"""How SQL text marks a parameter, in the words of PEP 249: ``%(room)s`` or ``:room``."""

_TYPES = {
    "tenant": "text",
    "room": "text",
    "payload": "json",
    "payload_bin": "bytea",
    "tags": "jsonb",
}

_NAME_PATTERN = re.compile(r"[a-z_][a-z0-9_]*", re.ASCII)

# No SELECT privilege on the table is needed: the id is asked of the transaction, not of the row.
_TXID = "pg_current_xact_id()::text AS txid"

MANY_SQL = f"""\
WITH message AS (
  INSERT INTO tidegate.outbox (tenant, room, payload, payload_bin, tags)
  SELECT tenant, room, CAST(payload AS json), payload_bin, CAST(tags AS jsonb)
  FROM unnest(
    CAST(%(tenants)s AS text[]), CAST(%(rooms)s AS text[]), CAST(%(payloads)s AS text[]),
    CAST(%(payload_bins)s AS bytea[]), CAST(%(tags)s AS text[])
  ) WITH ORDINALITY AS row (tenant, room, payload, payload_bin, tags, position)
  ORDER BY position
)
SELECT {_TXID}"""  # noqa: S608
"""Publishes many messages, in order: parameters from `many_params`, one row with ``txid``."""


@dataclass(frozen=True, slots=True)
class Statement:
    """SQL text that publishes one message, and its parameters."""

    sql: str
    """A complete INSERT. It returns one row with one column: ``txid``, text."""
    params: dict[str, Any]
    """The parameters' values by name. Names begin with the statement's name: merge with yours."""
    cte: str
    """``name AS (INSERT …)``: for the WITH clause of another statement. The message is published
    whatever that statement does with it; ``SELECT txid FROM name`` gives the transaction id."""


def statement(
    room: str,
    data: Any,
    *,
    tenant: str = DEFAULT_TENANT,
    tags: Mapping[str, str] | None = None,
    paramstyle: ParamStyle = "pyformat",
    name: str = "message",
) -> Statement:
    """SQL and parameters that publish one message; arguments as in `publish`.

    ``paramstyle`` is ``"pyformat"`` (``%(…)s``) for psycopg and Django, ``"named"`` (``:…``) for
    SQLAlchemy's ``text()``. ``name`` names the CTE and begins the parameters' names: give each
    message of a joined statement its own.

    ```python
    # Django
    m = statement("orders:42", {"status": "paid"}, tenant="acme")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(m.sql, m.params)

    # SQLAlchemy
    m = statement("orders:42", {"status": "paid"}, tenant="acme", paramstyle="named")
    session.execute(text(m.sql), m.params)

    # Business write and message as one statement
    m = statement("orders:42", {"status": "paid"}, tenant="acme")
    conn.execute(
        f"WITH {m.cte} UPDATE orders SET status = 'paid' WHERE id = %(id)s",
        {**m.params, "id": 42},
    )
    ```

    Raises `InvalidMessage` if ``data`` or ``tags`` cannot be encoded. What the database refuses
    when the statement runs is an error of the driver, with Tidegate's text.
    """
    if not _NAME_PATTERN.fullmatch(name):
        raise InvalidMessage(
            f"statement name {name!r} is not allowed: lower-case letters, digits and _"
        )
    if paramstyle not in get_args(ParamStyle):
        raise InvalidMessage(f"paramstyle {paramstyle!r} is not known: pyformat or named")
    row = encode(Message(room, data, tenant, tags))
    # The other payload column is left out, not set to NULL.
    payload = "payload" if row.payload_bin is None else "payload_bin"
    columns = {column: getattr(row, column) for column in ("tenant", "room", payload, "tags")}
    # CAST and not `::`, which stands badly next to a `:name`.
    marks = ", ".join(
        f"CAST({_mark(f'{name}_{column}', paramstyle)} AS {_TYPES[column]})" for column in columns
    )
    sql = f"INSERT INTO tidegate.outbox ({', '.join(columns)}) VALUES ({marks}) RETURNING {_TXID}"  # noqa: S608
    params = {f"{name}_{column}": value for column, value in columns.items()}
    return Statement(sql, params, f"{name} AS ({sql})")


def many_params(messages: Iterable[Message]) -> dict[str, list[Any]]:
    """The parameters of `MANY_SQL`. An `InvalidMessage` names the message's index."""
    rows = []
    for index, message in enumerate(messages):
        if not isinstance(message, Message):
            raise TypeError(f"message {index} must be a Message, not {type(message).__name__}")
        try:
            rows.append(encode(message))
        except InvalidMessage as error:
            raise InvalidMessage(f"message {index}: {error}") from None
    return {
        "tenants": [row.tenant for row in rows],
        "rooms": [row.room for row in rows],
        "payloads": [row.payload for row in rows],
        "payload_bins": [row.payload_bin for row in rows],
        "tags": [row.tags for row in rows],
    }


def _mark(parameter: str, paramstyle: ParamStyle) -> str:
    return f"%({parameter})s" if paramstyle == "pyformat" else f":{parameter}"
