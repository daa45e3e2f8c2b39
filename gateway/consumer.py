"""The consumer: has the buses read of the shards in which this worker has subscribers.

Where one connection reaches all shards, one *lane* reads them all, as many as there are. In Redis
Cluster each shard has a slot of its own and no command may span slots: then each shard that is
wanted has its lane, at most as many as there are shards. Clients never add connections.

All lanes belong to one epoch: on a change they end before anything of the new one begins.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import structlog
from redis.exceptions import AskError, RedisError, ResponseError

from gateway.feed import Feed
from gateway.hub import Hub
from gateway.lane import ANSWER_S, Lane, is_missing
from outbox import tasks
from outbox.backoff import Backoff
from outbox.errors import OutboxError
from outbox.log import Log
from outbox.streams import Streams

LOOK_INTERVAL_S = 1.0
"""How often the epoch is looked at, and the longest time in which a change goes unseen."""
ASK_INTERVAL_S = 0.5
"""Postgres is asked for the epoch no more often, however often Redis lacks it."""
BACKOFF_S = (0.05, 1.0)

ALL = -1
"""The key of the lane that reads all shards."""

log = structlog.get_logger(__name__)


class Consumer:
    """Feeds one hub. ``worker`` names this process among all; ``epoch_changed`` is called after
    the hub was emptied because of a new epoch."""

    def __init__(
        self,
        hub: Hub,
        streams: Streams,
        message_log: Log,
        worker: str,
        epoch_changed: Callable[[], None],
    ) -> None:
        self.epoch = ""
        self._hub = hub
        self._streams = streams
        self._log = message_log
        self._feed: Feed
        """Of the present epoch."""
        self._worker = worker
        self._epoch_changed = epoch_changed
        self._reachable = False
        self._running = False
        """Whether lanes may be made."""
        self._suspected = False
        self._asked_at_s = -ASK_INTERVAL_S
        self._wake = asyncio.Event()
        self._failure: BaseException | None = None
        self._connections = 0
        self._lanes: dict[int, Lane] = {}
        """Shard or ALL → the lane of the moment."""
        self._keepers: dict[int, asyncio.Task[None]] = {}
        """Shard or ALL → what makes one lane after another."""
        self._attaching: dict[int, asyncio.Task[None]] = {}
        self._including: set[asyncio.Task[None]] = set()
        self._leftovers: dict[tuple[str, str], None] = {}
        """Bus and group: what lanes of this worker left behind."""

    @property
    def connected(self) -> bool:
        """Whether the last exchanges with Redis went well."""
        lanes = self._lanes.values()
        return any(lane.connected for lane in lanes) if lanes else self._reachable

    async def start(self) -> None:
        """Learn the epoch. Raises OutboxError if Postgres does not answer."""
        epoch, _ = await self._log.heads()
        self._follow(epoch)

    def _follow(self, epoch: str) -> None:
        self.epoch = epoch
        self._feed = Feed(self._hub, self._log, epoch, self.suspect, self._include)

    def suspect(self) -> None:
        """Somebody saw a sign of another epoch: ask Postgres at the next opportunity."""
        self._suspected = True
        self._wake.set()

    # Shards

    async def attach(self, shard: int) -> None:
        """Have the shard read; returns when its position is known.

        Raises:
            OutboxError, redis.RedisError, OSError: neither Redis nor Postgres could tell it.
        """
        # Again where it was let go in the very moment: nobody was in a room of it yet.
        while shard not in self._hub.positions:
            task = self._attaching.get(shard)
            if task is None:
                task = asyncio.ensure_future(self._attach(shard))
                self._attaching[shard] = task
                task.add_done_callback(lambda done: self._attached(shard, done))
            await asyncio.shield(task)

    def _attached(self, shard: int, task: "asyncio.Task[None]") -> None:
        del self._attaching[shard]
        if not task.cancelled():
            task.exception()  # those who wait have it, if they are still there

    async def _attach(self, shard: int) -> None:
        epoch = self.epoch
        position = 0
        try:
            async with asyncio.timeout(ANSWER_S):
                position = (await self._streams.last_ids(epoch, [shard]))[shard]
                if position and await self._streams.epoch() != epoch:
                    position = 0
        except (RedisError, OSError):
            pass
        if not position:
            current, heads = await self._log.heads()
            if current != epoch:
                self.suspect()
                raise OutboxError("the epoch has changed, try again")
            position = heads[shard]
        if epoch != self.epoch:
            raise OutboxError("the epoch has changed, try again")
        if shard not in self._hub.positions:
            self._feed.forget(shard)
            self._hub.positions[shard] = position
        self._tend()
        self._include(shard)

    def _include(self, shard: int) -> None:
        """Has the lane that is to read the shard do so at once."""
        lane = self._lanes.get(ALL) or self._lanes.get(shard)
        if lane is not None:
            task = asyncio.ensure_future(lane.include(shard))
            self._including.add(task)
            task.add_done_callback(self._including.discard)

    # Lanes

    async def run(self) -> None:
        """Read until cancelled, whatever fails."""
        self._running = True
        try:
            while True:
                self._wake.clear()
                self._tend()
                await self._look()
                await self._tidy()
                if (failure := self._failure or self._feed.failure) is not None:
                    raise failure
                try:
                    async with asyncio.timeout(
                        ASK_INTERVAL_S if self._suspected else LOOK_INTERVAL_S
                    ):
                        await self._wake.wait()
                except TimeoutError:
                    continue
        finally:
            self._running = False
            await self._stop()

    def _tend(self) -> None:
        """Has the lanes be those that are wanted."""
        if not self._running:
            return
        wanted = {ALL} if self._streams.client.spans_shards else set(self._hub.positions)
        for key in self._keepers.keys() - wanted:
            self._keepers[key].cancel()
        for key in wanted - self._keepers.keys():
            task = asyncio.create_task(self._keep(key))
            self._keepers[key] = task
            task.add_done_callback(partial(self._ended, key))

    def _ended(self, key: int, task: "asyncio.Task[None]") -> None:
        del self._keepers[key]
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = failure
        self._wake.set()

    async def _stop(self) -> None:
        try:
            await tasks.end([*self._keepers.values(), *self._including])
        finally:
            await self._feed.end()

    async def _keep(self, key: int) -> None:
        """One lane after another: every failure is answered by a new connection."""
        client = self._streams.client
        failures = 0
        backoff = Backoff(*BACKOFF_S)
        ask_at = None
        while True:
            self._connections += 1
            lane = self._lanes[key] = Lane(
                client,
                self._feed,
                self.epoch,
                f"{self._worker}:{self._connections}",
                partial(self._wanted, key),
                ask_at,
            )
            progressed = False
            try:
                await lane.run()
            except (RedisError, OSError) as error:
                progressed = lane.was_connected
                if isinstance(error, AskError):
                    log.info("bus is on another node", shard=key, slot_and_node=str(error))
                elif progressed or failures == 0:
                    log.warning(
                        "bus read failed",
                        shard="all" if key == ALL else key,
                        error=f"{type(error).__name__}: {error}",
                    )
                ask_at = client.redirected(error) if isinstance(error, RedisError) else None
            finally:
                del self._lanes[key]
                self._leftovers |= dict.fromkeys((bus, lane.group) for bus in lane.joined.values())
            failures = 1 if progressed else failures + 1
            if progressed:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    def _wanted(self, key: int) -> Mapping[int, int]:
        wanted = self._feed.wanted
        if key == ALL:
            return wanted
        return {key: wanted[key]} if key in wanted else {}

    # What is looked at now and then

    async def _look(self) -> None:
        """Follow the epoch in Redis; where it is missing or suspect, the one in Postgres."""
        found = None
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._streams.client.verify()
                for lane in list(self._lanes.values()):
                    await lane.leave_if_stale()
                found = await self._streams.epoch()
            self._reachable = True
        except (RedisError, OSError):
            self._reachable = False
            if not self._suspected:
                return
        if found == self.epoch and not self._suspected:
            return
        now_s = asyncio.get_running_loop().time()
        if now_s - self._asked_at_s < ASK_INTERVAL_S:
            return
        self._asked_at_s = now_s
        try:
            current, _ = await self._log.heads()
        except OutboxError as error:
            # The buses' keys hold the epoch: reading on cannot mix two histories.
            log.warning("the epoch cannot be checked", error=str(error))
            return
        self._suspected = False
        if current != self.epoch:
            log.warning("the epoch changed: clients are told to subscribe again", epoch=current)
            # What lanes of the old epoch have in hand must not reach the hub any more.
            self._running = False
            await self._stop()
            self._follow(current)
            self._epoch_changed()
            self._running = True
            self._tend()

    async def _tidy(self) -> None:
        """Remove the groups of lanes that have ended."""
        for bus, group in list(self._leftovers):
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._streams.client.xgroup_destroy(bus, group)
            except (RedisError, OSError) as error:
                if not (isinstance(error, ResponseError) and is_missing(error)):
                    return
            del self._leftovers[bus, group]

    def holds(self, group: str) -> bool:
        """Whether a lane reads, or is about to, in a group of this name."""
        return any(lane.group == group for lane in self._lanes.values())

    async def leave(self) -> None:
        """Remove this worker's groups; called once at the end."""
        await self._tidy()
        if self._leftovers:
            log.info("groups not removed, they will be reaped", groups=len(self._leftovers))
