"""Ending tasks that do not want to."""

import asyncio
import gc
from typing import Any

import pytest

from outbox import tasks


async def test_a_task_that_swallows_a_cancellation_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "CANCEL_AGAIN_S", 0.01)
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while swallowed < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1

    async def failing() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError

    running = [asyncio.create_task(stubborn()), asyncio.create_task(failing())]
    await asyncio.sleep(0)
    await tasks.end(running)
    assert all(task.done() for task in running)
    assert swallowed == 3
    assert isinstance(running[1].exception(), OSError)
    await tasks.end([])


async def test_who_ends_several_that_failed_need_not_look_at_each() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    async def fail() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("one cause for all")

    async def work() -> None:
        several = [asyncio.create_task(fail()) for _ in range(2)]
        await asyncio.sleep(0)
        await tasks.end(several)

    await work()
    gc.collect()
    await asyncio.sleep(0)
    assert not told
