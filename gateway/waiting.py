"""Waiting: at its start a gateway waits for Postgres, the schema and Redis, in any order.

After a power cut, and on Kubernetes, everything starts at once. What no waiting would mend ends the
start: see ``outbox.admission``.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import structlog

from gateway.faults import explain
from outbox.admission import lasts, refusal
from outbox.backoff import Backoff
from outbox.errors import AccessRefused, SchemaBehind

RETRY_S: Final = (0.1, 1.0)
REMIND_S: Final = 60.0
"""Between two warnings of the same cause."""
GRANT: Final = "allow_gateway"
SCHEMA: Final = "the schema (tidegate migrate)"

T = TypeVar("T")

log = structlog.get_logger(__name__)


class Waiting:
    """What one process waits for at this moment."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.begun = asyncio.Event()
        """Set when something was not there at the first attempt."""
        self._clock = clock
        self._missing: dict[str, str] = {}
        """Store → what it lacks, for everybody to see: no cause, no address."""
        self._remind_at_s: dict[tuple[str, str], float] = {}
        """Store and cause → when to warn of it again."""

    @property
    def reason(self) -> str | None:
        """``waiting for Postgres and Redis``; None if nothing is known to be missing."""
        missing = " and ".join(sorted(self._missing.values()))
        return f"waiting for {missing}" if missing else None

    async def until(self, store: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """What the first attempt gives that succeeds.

        Raises:
            outbox.errors.OutboxError: what no waiting mends.
        """
        backoff = Backoff(*RETRY_S)
        while True:
            try:
                done = await attempt()
            except Exception as error:
                self._failed(store, error)
            else:
                self._missing.pop(store, None)
                return done
            await asyncio.sleep(backoff.next_s())

    def _failed(self, store: str, error: Exception) -> None:
        if lasts(error):
            raise error
        if (refused := refusal(error, GRANT)) is not None:
            raise AccessRefused(refused) from error
        told = explain(error)
        if told is None:
            raise error
        missing = SCHEMA if isinstance(error, SchemaBehind) else store
        self._missing[store] = missing
        self.begun.set()
        now_s, cause = self._clock(), "; ".join(told[1])
        if now_s >= self._remind_at_s.get((store, cause), now_s):
            # Those that were due are over: causes that change all the time do not pile up.
            self._remind_at_s = {k: at_s for k, at_s in self._remind_at_s.items() if at_s > now_s}
            self._remind_at_s[store, cause] = now_s + REMIND_S
            log.warning(f"waiting for {missing}", cause=cause)
