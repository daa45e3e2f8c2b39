"""What the parts of a relay share: how it stands, how often it looks, how long it waits."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol


class Journal(Protocol):
    """Where the pump tells what happened: a structlog logger, which only the relay imports."""

    def info(self, event: str, **values: Any) -> Any: ...

    def warning(self, event: str, **values: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often to look into the outbox."""

    bell_poll_s: float = 120.0
    """While the doorbell works."""
    poll_min_s: float = 0.05
    poll_max_s: float = 0.25
    """While it does not: backing off from the one to the other."""
    lock_poll_min_s: float = 0.002
    lock_poll_max_s: float = 0.05
    """While a writer is under way in one of the shards."""


@dataclass(slots=True)
class Standing:
    """What the relay knows at this moment; its pump and its heartbeat share it."""

    epoch: str = ""
    publish_epoch: bool = True
    """Whether Redis lacks the epoch or has another."""
    held: frozenset[int] = frozenset()
    """Shards that the leases give to this relay."""
    ready: set[int] = field(default_factory=set)
    """Shards whose bus was brought up to the head and has followed since."""
    lasts: dict[int, int] = field(default_factory=dict)
    """Shard → seq up to which its bus is known to reach."""
    redis_up: bool = False
    away: set[int] = field(default_factory=set)
    """Shards whose node of a cluster is out of reach, while those of others are not."""
    failing: dict[int, str] = field(default_factory=dict)
    """Shard → why it cannot be sequenced, though others can."""
    doorbell_off: str | None = None
    """Why it polls instead of waiting for the bell."""
    sequenced: int = 0
    refilled: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after a change, to end the pump's sleep."""
    appended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after messages were appended."""

    def adopt(self, epoch: str) -> bool:
        """Goes on with the epoch that was just read from Postgres; whether it is another."""
        if epoch == self.epoch:
            return False
        self.epoch = epoch
        self.publish_epoch = True
        self.ready.clear()
        self.lasts.clear()
        return True

    def distrust(self, shards: frozenset[int] | None = None) -> None:
        """Has the buses of the shards, or all, compared with the log before anything else."""
        self.ready -= set(self.ready) if shards is None else shards
        self.wake.set()
