"""Publishing inside the caller's transaction."""

from collections.abc import Iterable, Mapping
from typing import Any

from outbox.names import DEFAULT_TENANT
from publisher.connection import AsyncTarget, SyncTarget, run, run_async
from publisher.message import Message
from publisher.statement import MANY_SQL, many_params, statement


def publish(
    conn: SyncTarget,
    room: str,
    data: Any,
    *,
    tenant: str = DEFAULT_TENANT,
    tags: Mapping[str, str] | None = None,
) -> str:
    """Publishes ``data`` to a room if, and only if, the current transaction commits.

    ```python
    with psycopg.connect(dsn) as conn, conn.transaction():
        conn.execute("UPDATE orders SET status = 'paid' WHERE id = %s", (42,))
        txid = publish(conn, "orders:42", {"status": "paid"}, tenant="acme")
    ```

    ``conn`` is a psycopg connection or cursor, ``django.db.connection`` or one of its cursors, or
    any DB-API connection or cursor with pyformat parameters. The results of a psycopg cursor stay
    as they are. With autocommit and no open transaction the message is published at once. One
    statement and one round trip, also in a pipeline.

    ``data``: a value for `json.dumps`; `RawJSON`, published as it stands; or ``bytes`` (also
    ``bytearray``, ``memoryview``), which JSON clients get as a base64 string. At most 1 MiB.
    ``tags`` travel beside it; the name ``txid`` is taken.

    Returns the transaction's id in decimal. The message carries the same string as its tag
    ``txid``, so a client can tell its own write when it arrives.

    Raises `InvalidMessage` for data, names or tags that cannot be sent at all (NaN, lone
    surrogates, NUL; nothing was sent, the transaction goes on), and its subclass `Rejected` if the
    database refuses the message (a wrong name, too large, wrong JSON text; the transaction is
    aborted). Other errors of the driver pass through.
    """
    message = statement(room, data, tenant=tenant, tags=tags)
    return run(conn, message.sql, message.params)


async def publish_async(
    conn: AsyncTarget,
    room: str,
    data: Any,
    *,
    tenant: str = DEFAULT_TENANT,
    tags: Mapping[str, str] | None = None,
) -> str:
    """`publish` for psycopg's AsyncConnection and AsyncCursor.

    ```python
    async with await psycopg.AsyncConnection.connect(dsn) as conn, conn.transaction():
        await conn.execute("UPDATE orders SET status = 'paid' WHERE id = %s", (42,))
        txid = await publish_async(conn, "orders:42", {"status": "paid"}, tenant="acme")
    ```
    """
    message = statement(room, data, tenant=tenant, tags=tags)
    return await run_async(conn, message.sql, message.params)


def publish_many(conn: SyncTarget, messages: Iterable[Message]) -> str:
    """Publishes messages, of any rooms and tenants, in the given order with one statement.

    ```python
    publish_many(conn, [Message(f"orders:{id}", {"status": "paid"}, tenant="acme") for id in ids])
    ```

    All or none: if one is refused, none is published. Each room receives its messages in the given
    order. Returns and raises as `publish` does; an `InvalidMessage` names the index. All messages
    are in memory at once: publish very many in slices of some thousand. None at all is fine.
    """
    return run(conn, MANY_SQL, many_params(messages))


async def publish_many_async(conn: AsyncTarget, messages: Iterable[Message]) -> str:
    """`publish_many` for psycopg's AsyncConnection and AsyncCursor."""
    return await run_async(conn, MANY_SQL, many_params(messages))
