"""The one timer, on a clock of the test's own."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.deadlines import Deadlines


@dataclass(eq=False)
class Timer:
    deadline: float | None
    step: Callable[[float], float | None]
    calls: list[float] = field(default_factory=list)
    called: asyncio.Event = field(default_factory=asyncio.Event)

    def on_deadline(self, now: float) -> None:
        self.calls.append(now)
        self.deadline = self.step(now)
        self.called.set()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_each_is_called_at_its_time_until_it_is_over() -> None:
    clock = Clock()
    deadlines = Deadlines(clock)
    once = Timer(1.0, lambda now: None)
    often = Timer(2.0, lambda now: now + 2.0)
    running = asyncio.ensure_future(deadlines.run())
    for timer in (once, often):
        deadlines.enter(timer)
    for now in (1.0, 2.5, 3.0, 4.5):
        clock.now = now
        # An earlier one wakes the timer: no second has to pass.
        probe = Timer(now, lambda now: None)
        deadlines.enter(probe)
        await asyncio.wait_for(probe.called.wait(), 10)
    assert once.calls == [1.0]
    assert often.calls == [2.5, 4.5]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_deadline_that_moves_to_and_fro_leaves_nothing_behind() -> None:
    clock = Clock()
    deadlines = Deadlines(clock)
    flapping = Timer(25.0, lambda now: now + 25.0)
    running = asyncio.ensure_future(deadlines.run())
    for turn in range(1_000):
        clock.now = turn * 0.01
        flapping.deadline = clock.now + 30.0
        deadlines.enter(flapping)
        flapping.deadline = clock.now + 25.0
        deadlines.enter(flapping)
        await asyncio.sleep(0)
    assert len(deadlines._heap) < 5
    # What came nearer is called once, however many entries there were.
    flapping.deadline = clock.now
    deadlines.enter(flapping)
    await asyncio.wait_for(flapping.called.wait(), 10)
    clock.now = flapping.calls[0] + 24.9
    probe = Timer(clock.now, lambda now: None)
    deadlines.enter(probe)
    await asyncio.wait_for(probe.called.wait(), 10)
    assert len(flapping.calls) == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
