"""Leases: which relay works on which shards.

They spare relays from doing the same work twice, and nothing more. That a shard has two relays, or
for some seconds none, can neither lose, double nor reorder a message: sequencing is ordered by
locks in Postgres, appending by the script. So a lease is never checked before an action.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from redis.exceptions import RedisError

from outbox import keys
from outbox.redis.client import Client
from outbox.streams import Script

LEASE_TTL_S = 3.0
RENEW_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class LeaseTable:
    """Who is there and who holds what, for operators."""

    relays: tuple[str, ...]
    """Ids of the live relays."""
    holders: dict[int, str]
    """Shard → id of the relay that holds it; a shard without a holder is missing."""


class Leases:
    """The leases of one relay, shared with the relays of the same history.

    Errors of Redis come through as ``redis.RedisError``.
    """

    def __init__(
        self, client: Client, relay: str, shards: int, epoch: str, ttl_s: float = LEASE_TTL_S
    ) -> None:
        """``relay`` is an id without spaces, unique among relays; ``shards`` how many there are."""
        self.relay = relay
        self.held: frozenset[int] = frozenset()
        """The shards as of the last renewal."""
        self.relays = 0
        """Live relays as of the last renewal."""
        self.shards = shards
        self._client = client
        self._epoch = epoch
        self._ttl_ms = round(ttl_s * 1000)
        self._script = Script("lease.lua")
        self._expires_at_s = 0.0

    async def move(self, epoch: str) -> None:
        """Goes over to another history: leases of the one before are given back, or expire."""
        if epoch == self._epoch:
            return
        before, self._epoch = self._epoch, epoch
        with suppress(RedisError, OSError):
            await self._call(0, before)

    async def renew(self) -> frozenset[int]:
        """Renews what is held, takes what is free and gives back what exceeds the fair share."""
        return await self._call(self._ttl_ms, self._epoch)

    async def release(self) -> None:
        """Gives everything back at once: others take it with their next renewal."""
        await self._call(0, self._epoch)

    @property
    def expired(self) -> bool:
        """Whether others may hold these shards by now, since renewing failed for so long."""
        return time.monotonic() >= self._expires_at_s

    async def _call(self, lifetime_ms: int, epoch: str) -> frozenset[int]:
        asked_at_s = time.monotonic()
        self.relays, *held = await self._script(
            self._client,
            [keys.leases(epoch), keys.relays(epoch)],
            [self.relay, lifetime_ms, self.shards],
        )
        self.held = frozenset(held)
        self._expires_at_s = asked_at_s + lifetime_ms / 1000
        return self.held


async def read_leases(client: Client, epoch: str) -> LeaseTable:
    """Reads the leases of a history as they stand now by Redis' clock."""
    seconds, micros = await client.time()
    relays = cast(dict[bytes, bytes], await cast(Any, client).hgetall(keys.relays(epoch)))
    leases = cast(dict[bytes, bytes], await cast(Any, client).hgetall(keys.leases(epoch)))
    now_ms = seconds * 1000 + micros // 1000
    alive = sorted(name.decode() for name, expiry in relays.items() if int(expiry) > now_ms)
    holders = {}
    for shard, lease in leases.items():
        holder, expiry = lease.decode().split(" ")
        if holder in alive and int(expiry) > now_ms:
            holders[int(shard)] = holder
    return LeaseTable(tuple(alive), dict(sorted(holders.items())))
