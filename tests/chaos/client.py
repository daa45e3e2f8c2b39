"""Clients for times of trouble: one that notices silence and may be slow, and one that churns."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

from websockets.asyncio.client import ClientConnection

from tests.system.crowd import Member
from tests.system.raw_client import RawClient

SILENCE_S = 6.0
"""A connection without even a ping for so long is given up; pings come every two seconds."""
STAY_S = (0.0, 1.0)


class AlertClient(RawClient):
    """Gives up a connection that is silent for too long, as SDKs do."""

    def __init__(self, url: str, token: str, seed: int, pause_s: float = 0.0) -> None:
        """``pause_s``: it takes its time before each frame, up to so long."""
        super().__init__(url, token, seed)
        self._pause_s = pause_s
        self._pauses = random.Random(seed)
        self.reading = asyncio.Event()
        """Cleared, it reads nothing."""
        self.reading.set()

    async def _frame(self, socket: ClientConnection) -> str:
        await self.reading.wait()
        if self._pause_s:
            await asyncio.sleep(self._pauses.uniform(0, self._pause_s))
        async with asyncio.timeout(SILENCE_S):
            return await super()._frame(socket)


async def churn(
    make: Callable[[], Awaitable[Member]],
    dismiss: Callable[[Member], Awaitable[None]],
    stop: asyncio.Event,
    pick: random.Random,
) -> None:
    """One short-lived client after the other until ``stop``.

    ``make`` gives a member that has not arrived yet, ``dismiss`` ends one.
    """
    while not stop.is_set():
        member = await make()
        await member.arrive(late=pick.random() < 0.5)
        with suppress(TimeoutError):
            async with asyncio.timeout(pick.uniform(*STAY_S)):
                await stop.wait()
        await dismiss(member)
