"""Traffic through running gateways: a tireless writer, and clients that check all they get."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import psycopg

from tests.client import Client
from tests.processes import Process

TENANT = "acme"
SHUTDOWN = 3001
PAUSE_S = 0.004
"""Between two transactions."""


class Traffic:
    """``async with Traffic(dsn, gateways, rooms, token) as traffic``: one client per gateway, each
    in all rooms; the writer publishes to one room after another."""

    def __init__(
        self, dsn: str, gateways: Sequence[Process], rooms: Sequence[str], token: str
    ) -> None:
        self.published: dict[str, list[int]] = {room: [] for room in rooms}
        """Room → what was committed to it, in order."""
        self.clients = [Client(gateway.websocket_url) for gateway in gateways]
        self._dsn = dsn
        self._token = token
        self._count = 0
        self._writing: asyncio.Task[None] | None = None
        self._stopping = False
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for client in self.clients:
            await self._stack.enter_async_context(client)
            await client.greet(self._token)
            for room in self.published:
                await client.subscribe(room)
        self._writing = asyncio.create_task(self._write())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()
        await self._stack.__aexit__(kind, error, trace)

    async def move(self, number: int, gateway: Process) -> None:
        """Waits until one client's gateway has closed it, and resumes at another gateway."""
        old = self.clients[number]
        assert await old.until_closed() == SHUTDOWN
        new = await self._stack.enter_async_context(Client(gateway.websocket_url))
        await new.greet(self._token)
        new.received = old.received
        for room, position in old.positions.items():
            reply = await new.subscribe(room, position)
            assert reply["recovered"]
            assert reply["epoch"] == position[1]
        self.clients[number] = new

    async def stop(self) -> None:
        """Ends the writing."""
        self._stopping = True
        if self._writing is not None:
            await self._writing

    async def more(self, count: int, rooms: Sequence[str] = (), timeout_s: float = 20.0) -> None:
        """Waits until each client has had ``count`` more messages than now, in these rooms."""
        wanted = list(rooms or self.published)
        for client, goal in [
            (client, self._got(client, wanted) + count) for client in self.clients
        ]:
            await client.until(lambda c=client, g=goal: self._got(c, wanted) >= g, timeout_s)

    async def settle(self, timeout_s: float = 20.0) -> None:
        """Stops, waits until every client has everything, and compares it. That nothing came twice
        or out of order the clients check themselves."""
        await self.stop()
        assert self._count > 0
        for client in self.clients:
            for room, numbers in self.published.items():
                await client.until_offset(room, len(numbers), timeout_s)
                assert client.data(room) == numbers
            assert client.evicted == {}

    def _got(self, client: Client, rooms: Sequence[str]) -> int:
        return sum(len(client.received.get(room, ())) for room in rooms)

    async def _write(self) -> None:
        connection = await psycopg.AsyncConnection.connect(self._dsn, autocommit=True)
        async with connection:
            while not self._stopping:
                for room, numbers in self.published.items():
                    await self._publish(connection, room, numbers)
                    await asyncio.sleep(PAUSE_S)

    async def _publish(self, connection: Any, room: str, numbers: list[int]) -> None:
        self._count += 1
        await connection.execute(
            "SELECT tidegate.publish(%s, %s, %s)", (TENANT, room, str(self._count))
        )
        numbers.append(self._count)
