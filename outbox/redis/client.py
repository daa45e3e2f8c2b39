"""A client of one Redis server: the base of those for Sentinel and for a cluster."""

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ReadOnlyError, RedisError

from outbox.redis.url import Address

Command: TypeAlias = tuple[bytes | str | int, ...]


class Client(Redis):
    """One server, whatever its address leads to."""

    spans_shards = True
    """Whether one connection reaches the keys of all shards."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Runs one command.

        A server that says it is a replica was demoted: no connection to it is used again.
        """
        try:
            return await cast(Any, super()).execute_command(*args, **options)
        except ReadOnlyError:
            await self.renew()
            raise

    async def pipelined(self, commands: Sequence[Command]) -> list[Any]:
        """The answers to several commands in one round trip, errors in the place of answers."""
        async with self.pipeline(transaction=False) as pipeline:
            for command in commands:
                cast(Any, pipeline).execute_command(*command)
            try:
                return list(await pipeline.execute(raise_on_error=False))
            except (RedisError, OSError) as error:
                return [error] * len(commands)

    async def dedicated(self, key: str, at: Address | None = None) -> AbstractConnection:
        """A connection of the caller's own, not yet made, to the server that holds the key.

        ``at`` is the server that an earlier one has named instead.
        """
        return cast(AbstractConnection, cast(Any, self.connection_pool).make_connection())

    def redirected(self, error: RedisError) -> Address | None:
        """Takes note of what a dedicated connection ended with; where to ASK instead, or None."""
        return None

    async def renew(self) -> None:
        """Drops idle connections: the next commands find out anew where they lead."""
        await self.connection_pool.disconnect(inuse_connections=False)

    async def verify(self) -> None:
        """Finds out whether the server is still the one to talk to, and leaves it if not."""

    def is_stale(self, connection: AbstractConnection) -> bool:
        """Whether the connection leads to a server that is no longer the one to talk to."""
        return False

    async def servers(self) -> list["Client"]:
        """Clients of all servers that hold keys."""
        return [self]
