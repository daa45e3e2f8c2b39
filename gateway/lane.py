"""A lane: the life of one connection that reads buses.

It has a consumer group of its own, created at the worker's position, which is always possible since
entry ids are our own seqs. So an old connection that hangs half-open can take nothing from its
successor, and nothing has to be acknowledged: sockets die with their worker, there is nobody to
redeliver to.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, cast

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from gateway.feed import Feed
from outbox import keys
from outbox.redis.client import Client
from outbox.redis.url import Address

READ_COUNT = 500
"""Most entries per shard and read."""
FIRST_READ_COUNT = 32
READ_BYTES = 8_388_608
"""About as much a read should bring at most: payloads may have a megabyte each."""
BLOCK_S = 2.0
"""How long a read waits in Redis."""
ANSWER_S = 3.0
"""How much longer than BLOCK_S an answer may take before the link counts as dead."""
INTERRUPT_ATTEMPTS = 20
INTERRUPT_PAUSE_S = 0.002

Wanted = Callable[[], Mapping[int, int]]
"""Gives the shards that are to be read, with their positions."""


class Lane:
    """Reads the shards that ``wanted`` gives, all of one server, in the group ``group``.

    ``run`` is called once. With ``ask_at`` it reads there, from a cluster's node that is about to
    get the slot.
    """

    def __init__(
        self,
        client: Client,
        feed: Feed,
        epoch: str,
        group: str,
        wanted: Wanted,
        ask_at: Address | None = None,
    ) -> None:
        self.group = group
        self.connected = False
        """Whether the last exchange with Redis went well."""
        self.was_connected = False
        """Whether one ever did."""
        self.joined: dict[int, str] = {}
        """Shard → bus on which the group may be; as they were at the end, once that has come."""
        self._client = client
        self._feed = feed
        self._epoch = epoch
        self._wanted = wanted
        self._ask_at = ask_at
        self._connection: AbstractConnection
        self._wake = asyncio.Event()
        self._client_id = 0
        self._count = FIRST_READ_COUNT
        self._reading: frozenset[int] = frozenset()

    async def run(self) -> NoReturn:
        """Reads until the connection fails.

        Raises:
            redis.RedisError, OSError: as they come, also where a read is overdue.
        """
        shard = next(iter(self._wanted()), None)
        key = keys.EPOCH if shard is None else keys.bus(self._epoch, shard)
        async with asyncio.timeout(ANSWER_S):
            self._connection = await self._client.dedicated(key, self._ask_at)
        try:
            async with asyncio.timeout(ANSWER_S):
                await cast(Any, self._connection).connect()
            self._client_id = int(await self._call("CLIENT", "ID"))
            await self._read()
        finally:
            self.connected = False
            self._client_id = 0
            self._reading = frozenset()
            await self._connection.disconnect(nowait=True)

    async def include(self, shard: int) -> None:
        """Has a blocked read return, so that the next one includes a shard newly wanted, or reads
        one again from its position.

        In a cluster the lane has one shard: it is idle before, or its read ends by itself.
        """
        self._wake.set()
        if not self._client.spans_shards:
            # The id means another client on another node.
            return
        for attempt in range(1, INTERRUPT_ATTEMPTS + 1):
            # Another server would unblock somebody else.
            if not self._client_id or self._reads(shard) or self._stale:
                return
            try:
                await self._client.execute_command("CLIENT", "UNBLOCK", self._client_id)
            except (RedisError, OSError):
                return
            # The read may not have reached Redis yet, then there was nothing to unblock.
            await asyncio.sleep(INTERRUPT_PAUSE_S * attempt)

    async def leave_if_stale(self) -> None:
        """Ends a read from a server that is no longer the one to talk to."""
        if self._client_id and self._stale:
            await self._connection.disconnect(nowait=True)

    def _reads(self, shard: int) -> bool:
        return shard in self._reading and shard not in self._feed.rereads

    @property
    def _stale(self) -> bool:
        return self._client.is_stale(self._connection)

    async def _read(self) -> NoReturn:
        pending = False
        while True:
            if not pending:
                if self._stale:
                    raise RedisConnectionError("another server has become the master")
                await self._join()
                self.connected = self.was_connected = True
                if not self.joined:
                    await self._idle()
                    continue
                await self._ask()
            async with asyncio.timeout(BLOCK_S + ANSWER_S):
                answer = await self._response()
            self._adapt(answer or ())
            # The next read is under way while this one is delivered, unless something has to be
            # looked at first.
            shards = {bus.encode(): shard for shard, bus in self.joined.items()}
            pending = self._joined_all and not self._stale
            if pending:
                await self._ask()
            for bus, entries in answer or ():
                await self._feed.deliver(shards[bus], entries)

    @property
    def _joined_all(self) -> bool:
        """Whether the group is where it is wanted, and nowhere else."""
        if self._wanted().keys() != self.joined.keys():
            return False
        rereads = self._feed.rereads
        return not rereads or rereads.isdisjoint(self.joined)

    async def _join(self) -> None:
        """Makes the group on every bus that is wanted, and removes it from the others.

        Where entries of a bus were dropped it is made once more, at the position.
        """
        rereads = self._feed.rereads
        for shard, bus in list(self.joined.items()):
            if shard not in self._wanted() or shard in rereads:
                await self._call("XGROUP", "DESTROY", bus, self.group)
                del self.joined[shard]
        for shard, position in list(self._wanted().items()):
            if shard not in self.joined:
                bus = self.joined[shard] = keys.bus(self._epoch, shard)
                await self._call("XGROUP", "CREATE", bus, self.group, f"{position}-0", "MKSTREAM")
                rereads.discard(shard)

    def _adapt(self, answer: Iterable[Any]) -> None:
        """Ask for more at once while entries are small, for less when they are large."""
        size_bytes = sum(len(fields[-1]) for _, entries in answer for _, fields in entries)
        if size_bytes > READ_BYTES:
            self._count = max(1, self._count * READ_BYTES // size_bytes)
        elif size_bytes < READ_BYTES // 2:
            self._count = min(READ_COUNT, self._count * 2)

    async def _ask(self) -> None:
        buses = [bus for _, bus in sorted(self.joined.items())]
        await self._send(
            *("XREADGROUP", "GROUP", self.group, "c", "COUNT", self._count),
            *("BLOCK", int(BLOCK_S * 1000), "NOACK", "STREAMS", *buses, *[">"] * len(buses)),
        )
        self._reading = frozenset(self.joined)

    async def _idle(self) -> None:
        """No shard is wanted: waits until one is, and looks whether the link is alive."""
        self._wake.clear()
        if self._wanted():
            return
        try:
            async with asyncio.timeout(BLOCK_S):
                await self._wake.wait()
        except TimeoutError:
            await self._call("PING")

    async def _call(self, *command: Any) -> Any:
        async with asyncio.timeout(ANSWER_S):
            await self._send(*command)
            try:
                return await self._response()
            except ResponseError as error:
                if command[:2] == ("XGROUP", "DESTROY") and is_missing(error):
                    return None
                raise

    async def _send(self, *command: Any) -> None:
        prefix = [("ASKING",)] if self._ask_at is not None else []
        packed = cast(Any, self._connection).pack_commands([*prefix, command])
        await self._connection.send_packed_command(packed)

    async def _response(self) -> Any:
        if self._ask_at is not None:
            await self._connection.read_response()
        return await self._connection.read_response()


def is_missing(error: ResponseError) -> bool:
    """Whether XGROUP DESTROY says that the bus is gone, and its groups with it."""
    return "requires the key to exist" in str(error) or "no such key" in str(error).lower()
