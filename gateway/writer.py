"""The writer: what clients and the HTTP API publish goes into the outbox like anyone's message."""

from outbox.database import Pool, reached
from publisher import InvalidMessage as Rejected
from publisher import RawJSON, publish_async

__all__ = ["Rejected", "Writer"]


class Writer:
    """Publishes through a pool of connections; each message is a transaction of its own."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def insert(
        self, tenant: str, room: str, data: bytes, tags: dict[str, str] | None = None
    ) -> str:
        """Commit one message of JSON text; gives the transaction id that it carries as its tag.

        Raises:
            Rejected: the message is not allowed as it is; the text says what and how much.
            outbox.errors.PostgresUnavailable: no answer; whether it is committed is not known.
        """
        async with reached(), self._pool.connection() as connection:
            return await publish_async(connection, room, RawJSON(data), tenant=tenant, tags=tags)
