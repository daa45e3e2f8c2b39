"""Reads of one store: equal ones are shared, only so many are under way at one time.

The others wait for their turn. What nobody waits for any more ends: readers whose time is up would
else leave work behind, thousands of them so much that the store is busy for seconds, and those who
try again come after it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar


class Answer(Protocol):
    """What a read brings: true for ``seq``."""

    @property
    def seq(self) -> int: ...


A = TypeVar("A", bound=Answer)


@dataclass(slots=True)
class _Read:
    task: "asyncio.Task[Any]"
    readers: int = 0


class Reads:
    """``at_once`` reads at one time."""

    def __init__(self, at_once: int) -> None:
        self.turn = asyncio.Semaphore(at_once)
        """For reads that are not shared."""
        self._under_way: dict[tuple[Any, ...], _Read] = {}

    async def share(self, key: tuple[Any, ...], floor: int, read: Callable[[], Awaitable[A]]) -> A:
        """The answer to a read, or to an equal one that is under way if it is true for ``floor``.

        If that one began too early those who waited with this reader share the next, whose answer
        comes as it is.
        """
        under_way = self._under_way.get(key)
        if under_way is not None:
            answer: A = await self._outcome(key, under_way)
            if answer.seq >= floor:
                return answer
            # One of those who waited, too, may have begun to read anew.
            under_way = self._under_way.get(key)
        if under_way is None:
            under_way = _Read(asyncio.create_task(self._in_turn(read)))
            self._under_way[key] = under_way
            under_way.task.add_done_callback(lambda task: self._ended(key, task))
        renewed: A = await self._outcome(key, under_way)
        return renewed

    async def _in_turn(self, read: Callable[[], Awaitable[A]]) -> A:
        async with self.turn:
            return await read()

    async def _outcome(self, key: tuple[Any, ...], read: _Read) -> Any:
        read.readers += 1
        try:
            return await asyncio.shield(read.task)
        finally:
            read.readers -= 1
            if not read.readers and not read.task.done():
                self._forget(key, read.task)
                read.task.cancel()

    def _ended(self, key: tuple[Any, ...], task: "asyncio.Task[Any]") -> None:
        self._forget(key, task)
        if not task.cancelled():
            task.exception()  # those who wait have it; with none left it would be reported as lost

    def _forget(self, key: tuple[Any, ...], task: "asyncio.Task[Any]") -> None:
        read = self._under_way.get(key)
        if read is not None and read.task is task:
            del self._under_way[key]
