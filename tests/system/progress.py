"""How far the writers are, for those whose doings depend on it."""

import asyncio
import heapq
import itertools


class Progress:
    """A number that only rises, and an end."""

    def __init__(self) -> None:
        self.count = 0
        self._finished = asyncio.Event()
        self._waiting: list[tuple[int, int, asyncio.Event]] = []
        self._order = itertools.count()

    def advance(self, by: int) -> None:
        self.count += by
        while self._waiting and self._waiting[0][0] <= self.count:
            heapq.heappop(self._waiting)[2].set()

    def finish(self) -> None:
        """Nothing more will come: everyone who waits goes on."""
        self._finished.set()
        for _, _, event in self._waiting:
            event.set()
        self._waiting.clear()

    @property
    def finished(self) -> bool:
        return self._finished.is_set()

    async def reach(self, count: int) -> None:
        """Wait until so many, or until the end."""
        if self.count >= count or self.finished:
            return
        event = asyncio.Event()
        heapq.heappush(self._waiting, (count, next(self._order), event))
        await event.wait()
