"""The writer: what clients and the HTTP API publish goes into the outbox like anyone's message."""

import asyncio

from outbox.database import Pool, awaited, reached
from publisher import InvalidMessage as Rejected
from publisher import RawJSON, publish_async

__all__ = ["Rejected", "Writer"]

TIMEOUT_S = 10.0
"""For the answer of Postgres; some seconds more until a link that hangs is given up."""


class Writer:
    """Publishes through a pool of connections; each message is a transaction of its own."""

    def __init__(self, pool: Pool, timeout_s: float = TIMEOUT_S) -> None:
        self._pool = pool
        self._timeout_s = timeout_s

    async def insert(
        self, tenant: str, room: str, data: bytes, tags: dict[str, str] | None = None
    ) -> str:
        """Commit one message of JSON text; gives the transaction id that it carries as its tag.

        Raises:
            Rejected: the message is not allowed as it is; the text says what and how much.
            outbox.errors.PostgresUnavailable: no answer; whether it is committed is not known.
        """
        with awaited(self._pool):
            async with (
                reached(),
                asyncio.timeout(self._timeout_s),
                self._pool.connection() as connection,
            ):
                return await publish_async(
                    connection, room, RawJSON(data), tenant=tenant, tags=tags
                )
