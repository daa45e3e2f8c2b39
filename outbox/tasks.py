"""Ending tasks for certain."""

import asyncio
from collections.abc import Iterable
from typing import Any

CANCEL_AGAIN_S = 0.5


async def end(tasks: "Iterable[asyncio.Task[Any]]") -> None:
    """Cancels the tasks and returns when all have ended, however they did.

    Cancels again those that go on: code on the way, such as redis-py while it connects, may take a
    cancellation for a failure of the network and return as if there had been none.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        ended, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
        for task in ended:
            if not task.cancelled():
                # Whoever ends several that failed of one cause reports one of them.
                task.exception()
