"""Ending tasks that do not want to."""

import asyncio

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
