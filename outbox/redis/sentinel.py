"""The master that sentinels watch over.

Each new connection asks the sentinels where the master is, and the server whether it is one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Self, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, RedisError

from outbox import tasks
from outbox.redis.client import Client
from outbox.redis.connection import TcpConnection, TlsConnection
from outbox.redis.url import Address


class Master:
    """The master that sentinels name."""

    def __init__(self, name: str, sentinels: Sequence[Redis]) -> None:
        self.current: Address | None = None
        """What they named last."""
        self.leave: Callable[[], Awaitable[None]] | None = None
        """Called when they name another one: drops the connections to the old one."""
        self._name = name
        self._sentinels = sentinels

    async def address(self) -> Address:
        """Asks all sentinels at once; what most of them say is it.

        A sentinel that was cut off may name a master that the others have replaced.

        Raises:
            redis.ConnectionError: none knows it.
        """
        votes: dict[Address, int] = {}
        asked = [asyncio.ensure_future(self._ask(sentinel)) for sentinel in self._sentinels]
        failure: Exception | None = None
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    address = await answer
                except (RedisError, OSError) as error:
                    failure = error
                    continue
                if address is None:
                    continue
                votes[address] = votes.get(address, 0) + 1
                if votes[address] * 2 > len(asked):
                    break
        finally:
            await tasks.end(asked)
        if not votes:
            why = f"{type(failure).__name__}: {failure}" if failure else "it is not known to them"
            raise RedisConnectionError(
                f"no sentinel named the master {self._name!r}: {why}"
            ) from failure
        found = max(votes, key=lambda address: votes[address])
        before, self.current = self.current, found
        if before not in (None, found) and self.leave is not None:
            # All of them at once: to write here and there by turns would be worse than an error.
            await self.leave()
        return found

    async def _ask(self, sentinel: Redis) -> Address | None:
        answer = await cast(Any, sentinel).execute_command(
            "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._name
        )
        return None if answer is None else (answer[0].decode(), int(answer[1]))

    async def aclose(self) -> None:
        """Closes the connections to the sentinels."""
        for sentinel in self._sentinels:
            await sentinel.aclose()


class MasterConnection(TcpConnection):
    """A connection to whatever server is the master at the moment of connecting."""

    def __init__(self, *, master: Master, **options: Any) -> None:
        super().__init__(host="", port=0, **options)
        self._master = master

    async def connect(self) -> None:
        """Raises redis.ConnectionError where the server named does not call itself a master (if
        the user may ask it)."""
        if self.is_connected:
            return
        self.host, self.port = await self._master.address()
        await cast(Any, super()).connect()
        await self.send_command("ROLE")
        try:
            role = await self.read_response()
        except NoPermissionError:
            return
        if role[0] != b"master":
            await self.disconnect()
            raise RedisConnectionError(f"{self.host}:{self.port} is not the master any more")


class MasterTlsConnection(MasterConnection, TlsConnection):
    """The same with TLS."""


class SentinelClient(Client):
    """The master that sentinels watch over."""

    master: Master

    @classmethod
    def of(cls, master: Master, pool: BlockingConnectionPool) -> Self:
        """``pool`` has connections to ``master``."""
        client = cast(Self, cls.from_pool(pool))
        client.master = master
        master.leave = partial(pool.disconnect, inuse_connections=True)
        return client

    async def verify(self) -> None:
        """Asks the sentinels. An old master that cannot see them may serve on for any time."""
        await self.master.address()

    def is_stale(self, connection: AbstractConnection) -> bool:
        """Whether the sentinels have named another master since."""
        address = (cast(Any, connection).host, cast(Any, connection).port)
        return self.master.current not in (None, address)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Closes all connections."""
        await super().aclose(close_connection_pool)
        await self.master.aclose()
