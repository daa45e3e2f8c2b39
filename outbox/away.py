"""Shards whose node of a cluster is out of reach: left alone until it answers again.

The pump does one thing at a time, so it must not wait for such a node: an append that takes long
goes on by itself, and whether a node answers again is asked aside. What became of an append need
not be known: reconcile compares the bus with the log before anything else is appended.
"""

import asyncio
from collections.abc import Collection
from functools import partial
from time import monotonic

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from outbox.standing import Journal, Standing
from outbox.streams import Appended, Streams

RETRY_S = 0.25
"""How often the nodes of such shards are asked whether they are back."""
PROBE_TIMEOUT_S = 1.0
"""How long they may take for an answer."""


class Away:
    """Keeps ``standing.away``, for one pump."""

    def __init__(self, streams: Streams, standing: Standing, journal: Journal) -> None:
        self._streams = streams
        self._standing = standing
        self._journal = journal
        self._told: set[int] = set()
        """Shards of which the journal was told that they are away."""
        self._late: dict[int, asyncio.Task[Appended]] = {}
        """Shard → an append without an answer as yet."""
        self._probes: set[asyncio.Task[None]] = set()
        self._due_at_s = 0.0
        standing.away.clear()

    def leave(self, shards: Collection[int], cause: object) -> None:
        """Has these shards left alone until they answer."""
        standing = self._standing
        if not self._told:
            self._journal.warning(
                "shards out of reach",
                shards=sorted(shards),
                cause=str(cause or "").partition("\n")[0],
            )
        self._told.update(shards)
        standing.away.update(shards)
        standing.ready.difference_update(shards)
        self._due_at_s = monotonic() + RETRY_S

    async def answers(
        self, appends: "dict[int, asyncio.Task[Appended]]", patience_s: float | None
    ) -> dict[int, Appended | BaseException]:
        """What became of appends, by shard. One that takes longer goes on by itself, and no other
        of its shard is begun until it has ended."""
        try:
            _, late = await asyncio.wait(appends.values(), timeout=patience_s)
        except asyncio.CancelledError:
            for append in appends.values():
                append.cancel()
            raise
        found: dict[int, Appended | BaseException] = {}
        for shard, append in appends.items():
            if append in late:
                found[shard] = RedisTimeoutError(f"no answer within {patience_s} s")
                self._late[shard] = append
                append.add_done_callback(partial(self._ended, shard))
            else:
                found[shard] = append.exception() or append.result()
        return found

    def look(self) -> None:
        """Asks aside whether shards are within reach again, if it is time to."""
        if not self._standing.away or self._probes or monotonic() < self._due_at_s:
            return
        for shard in self._standing.away - self._late.keys():
            probe = asyncio.create_task(self._probe(shard))
            self._probes.add(probe)
            probe.add_done_callback(self._probed)

    def returned(self) -> None:
        """Tells the journal when the buses of all such shards are what they should be again."""
        if self._told and not self._told - self._standing.ready:
            self._journal.info("shards within reach again", shards=sorted(self._told))
            self._told.clear()

    async def answering(self, shards: Collection[int], timeout_s: float) -> frozenset[int]:
        """Those of the shards whose nodes answer within the time."""
        ordered = sorted(shards)
        found = await asyncio.gather(*(self._answers(shard, timeout_s) for shard in ordered))
        return frozenset(s for s, answers in zip(ordered, found, strict=True) if answers)

    async def _answers(self, shard: int, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._streams.last_ids(self._standing.epoch, [shard])
        except (RedisError, OSError):
            return False
        return True

    async def _probe(self, shard: int) -> None:
        if await self._answers(shard, PROBE_TIMEOUT_S):
            self._standing.away.discard(shard)
            self._standing.wake.set()

    def _probed(self, probe: "asyncio.Task[None]") -> None:
        self._probes.discard(probe)
        self._due_at_s = monotonic() + RETRY_S

    def _ended(self, shard: int, append: "asyncio.Task[Appended]") -> None:
        del self._late[shard]
        if not append.cancelled() and append.exception() is None:
            self._due_at_s = 0.0
        self._standing.wake.set()
