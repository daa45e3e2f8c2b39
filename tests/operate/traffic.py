"""A writer that never stops, for tests of what operators do meanwhile."""

import asyncio
from types import TracebackType
from typing import Any, Self

import psycopg

TENANT = "acme"


class Traffic:
    """``async with Traffic(dsn, *rooms) as traffic``: commits numbered messages to each room.

    A transaction whose outcome is not known, because the connection broke, is made again until one
    is: each number is in the room at least once, and in order.
    """

    def __init__(self, dsn: str, *rooms: str, pause_s: float = 0.01) -> None:
        self.committed = dict.fromkeys(rooms, 0)
        """Room → the highest number that is known to be committed."""
        self.breaks = 0
        """How often a connection broke."""
        self._dsn = dsn
        self._pause_s = pause_s
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.end()

    async def end(self) -> None:
        """Ends it after a commit; afterwards every number is known."""
        self._stop.set()
        await self._task

    async def some(self, count: int = 20) -> None:
        """Waits until so many more are committed to each room."""
        wanted = {room: number + count for room, number in self.committed.items()}
        async with asyncio.timeout(30):
            while any(self.committed[room] < number for room, number in wanted.items()):
                assert not self._task.done() or self._task.result() is None
                await asyncio.sleep(self._pause_s)

    async def _run(self) -> None:
        while not self._stop.is_set():
            try:
                async with await psycopg.AsyncConnection.connect(
                    self._dsn, connect_timeout=5, autocommit=True
                ) as connection:
                    await self._write(connection)
            except psycopg.OperationalError:
                self.breaks += 1
                await asyncio.sleep(0.05)

    async def _write(self, connection: psycopg.AsyncConnection[Any]) -> None:
        while not self._stop.is_set():
            async with asyncio.timeout(20):
                for room, number in self.committed.items():
                    await connection.execute(
                        "SELECT tidegate.publish(%s, %s, %s)", (TENANT, room, str(number + 1))
                    )
                    self.committed[room] = number + 1
            await asyncio.sleep(self._pause_s)


def numbers_are_complete(numbers: list[Any], last: int) -> bool:
    """Whether 1 … last came in order, none left out; a number may have come again."""
    highest = 0
    for number in numbers:
        if number is None:
            continue
        if not number <= highest + 1:
            return False
        highest = max(highest, number)
    return highest >= last
