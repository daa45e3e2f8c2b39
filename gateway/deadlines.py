"""One timer for all connections of a worker: pings, time-outs and expiries.

A timer object per connection would cost memory and a heap of its own in the event loop; most
deadlines only ever move into the future, so an entry is looked at when it comes up and put back.
One entry counts for each: an earlier one takes its place, and the old one is dropped in its turn.
"""

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Protocol

RESOLUTION_S = 0.05
IDLE_S = 1.0


class Timed(Protocol):
    """What can be entered: ``deadline`` in seconds of the clock, None once it is over."""

    @property
    def deadline(self) -> float | None: ...

    def on_deadline(self, now: float) -> None:
        """Called at the deadline or a little later; moves it."""
        ...


class Deadlines:
    """``clock`` gives seconds and is never set: pings go on whatever happens to the time of day."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Timed]] = []
        self._counts: dict[Timed, float] = {}
        """The time of the entry that counts for each."""
        self._entered = count()
        self._earlier = asyncio.Event()

    def enter(self, timed: Timed) -> None:
        """Watch ``timed``. To be called again when its deadline may have come nearer."""
        when = timed.deadline
        if when is None or when >= self._counts.get(timed, inf):
            return
        self._counts[timed] = when
        if not self._heap or when < self._heap[0][0]:
            self._earlier.set()
        heappush(self._heap, (when, next(self._entered), timed))

    async def run(self) -> None:
        """Serve the deadlines until cancelled."""
        while True:
            now = self._clock()
            while self._heap and self._heap[0][0] <= now:
                when, _, timed = heappop(self._heap)
                if self._counts.get(timed) != when:
                    continue
                del self._counts[timed]
                deadline = timed.deadline
                if deadline is not None and deadline <= now:
                    timed.on_deadline(now)
                self.enter(timed)
            wait_s = self._heap[0][0] - now if self._heap else IDLE_S
            self._earlier.clear()
            try:
                async with asyncio.timeout(max(RESOLUTION_S, min(wait_s, IDLE_S))):
                    await self._earlier.wait()
            except TimeoutError:
                continue
