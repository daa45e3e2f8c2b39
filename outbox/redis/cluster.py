"""A client of Redis Cluster.

A map of slots says which node has a key. It is read again after whatever shows it to be out of
date, and a node that names another one is followed at once. redis-py's own cluster client is not
used: it sends ASKING and the command after it over connections that need not be the same, and
repeats commands of which it does not know whether they were done.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from redis.asyncio.connection import AbstractConnection
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from outbox.redis.client import Client, Command
from outbox.redis.url import Address

REFUSED_PATIENCE_S = 0.3
"""How long a command that a node refused (nothing was done) is offered again: TRYAGAIN while the
keys of a slot move, CLUSTERDOWN during a failover."""
REDIRECTIONS_MAX = 5
"""MOVED and ASK that one command follows. More come from nodes that name one another."""
REFUSED_PAUSE_S = 0.03
MAP_TIMEOUT_S = 1.0
"""How long one node may take to tell the map before another is asked."""
MAP_INTERVAL_S = 0.1

KEYLESS = frozenset({"INFO", "TIME", "PING"})
"""Commands for any node. All others that are used have a key as their first argument."""
SCRIPTS = frozenset({"EVAL", "EVALSHA"})

Slots: TypeAlias = dict[int, Address]
"""Slot → its master."""


class Cluster(Client):
    """All nodes of a cluster. ``nodes`` makes the client of one."""

    spans_shards = False

    def __init__(self, seeds: Sequence[Address], nodes: Callable[[Address], Client]) -> None:
        self._nodes: dict[Address, Client] = {}
        self._make_node = nodes
        self._seeds = tuple(seeds)
        self._known: set[Address] = set()
        """Masters and replicas as of the last map."""
        self._silent: set[Address] = set()
        """Nodes that did not answer when they were last asked."""
        self._slots: Slots = {}
        self._outdated = True
        self._map_lock = asyncio.Lock()
        self._next_map_at_s = 0.0
        super().__init__(connection_pool=self._node(seeds[0]).connection_pool)

    # Commands

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Runs one command on the node that has its key."""
        slot = _slot_of(args)
        loop = asyncio.get_running_loop()
        refused_at_s: float | None = None
        redirections = 0
        ask_at: Address | None = None
        while True:
            address = ask_at or await self._address(slot)
            node = self._node(address)
            try:
                if ask_at is not None:
                    return await _ask(node, args, options)
                return await node.execute_command(*args, **options)
            except AskError as error:
                redirections += 1
                if redirections > REDIRECTIONS_MAX:
                    raise
                ask_at = self._follow(error, address)
            except (TryAgainError, ClusterDownError) as error:
                if refused_at_s is None:
                    refused_at_s = loop.time()
                elif loop.time() - refused_at_s >= REFUSED_PATIENCE_S:
                    raise
                if isinstance(error, ClusterDownError):
                    ask_at = self._follow(error, address)
                await asyncio.sleep(REFUSED_PAUSE_S)
            except (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OSError):
                # Whether it was done is not known: the caller decides.
                self._outdated = True
                self._silent.add(address)
                raise

    async def pipelined(self, commands: Sequence[Command]) -> list[Any]:
        """One round trip to each node at once. Errors stand in the place of answers."""
        answers: list[Any] = [None] * len(commands)
        by_node: dict[Address, list[int]] = {}
        for index, command in enumerate(commands):
            try:
                address = await self._address(_slot_of(command))
            except (RedisError, OSError) as error:
                answers[index] = error
            else:
                by_node.setdefault(address, []).append(index)
        await asyncio.gather(
            *(
                self._pipelined(address, commands, indexes, answers)
                for address, indexes in by_node.items()
            )
        )
        return answers

    async def _pipelined(
        self, address: Address, commands: Sequence[Command], indexes: list[int], answers: list[Any]
    ) -> None:
        found = await self._node(address).pipelined([commands[index] for index in indexes])
        for index, answer in zip(indexes, found, strict=True):
            answers[index] = answer
            if isinstance(answer, AskError | TryAgainError | ClusterDownError):
                self._follow(answer, address)
                try:
                    answers[index] = await self.execute_command(*commands[index])
                except (RedisError, OSError) as error:
                    answers[index] = error
            elif isinstance(answer, RedisConnectionError | RedisTimeoutError | OSError):
                self._outdated = True
                self._silent.add(address)

    def pipeline(self, *_: Any, **__: Any) -> NoReturn:
        """Keys of a pipeline may be on several nodes."""
        raise NotImplementedError("use pipelined()")

    # Connections of the caller's own

    async def dedicated(self, key: str, at: Address | None = None) -> AbstractConnection:
        """See ``Client.dedicated``. With ``at``, each command must follow an ASKING."""
        return await self._node(at or await self._address(key_slot(key.encode()))).dedicated(key)

    def redirected(self, error: RedisError) -> Address | None:
        """See ``Client.redirected``."""
        if isinstance(error, AskError):
            return self._follow(error, None)
        self._outdated = True
        return None

    async def renew(self) -> None:
        """Drops idle connections to all nodes and reads the map anew."""
        self._outdated = True
        for node in list(self._nodes.values()):
            await node.renew()

    async def servers(self) -> list[Client]:
        """All masters."""
        await self._map()
        return [self._node(address) for address in sorted(set(self._slots.values()))]

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Closes all connections."""
        for node in self._nodes.values():
            await node.aclose(close_connection_pool)
        self._nodes.clear()

    # The map

    def _node(self, address: Address) -> Client:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = self._make_node(address)
        return node

    def _follow(self, error: RedisError, asked: Address | None) -> Address | None:
        """Takes note of what a node answered; the address at which to ASK, or None."""
        if isinstance(error, AskError):
            # A node that does not know its own name leaves the host out: it is the one asked.
            host = error.host or (asked or self._slots.get(error.slot_id, ("", 0)))[0]
            address = (host, int(error.port))
            if not isinstance(error, MovedError):
                return address
            self._slots[error.slot_id] = address
        self._outdated = True
        return None

    async def _address(self, slot: int | None) -> Address:
        if self._outdated:
            await self._map()
        if slot is None:
            return random.choice(list(self._slots.values()))
        address = self._slots.get(slot)
        if address is None:
            self._outdated = True
            raise ClusterDownError(f"CLUSTERDOWN no node serves slot {slot}")
        return address

    async def _map(self) -> None:
        """Reads the map from the first node that tells it."""
        now_s = asyncio.get_running_loop().time
        async with self._map_lock:
            if not self._outdated or (self._slots and now_s() < self._next_map_at_s):
                return
            self._next_map_at_s = now_s() + MAP_INTERVAL_S
            candidates = list(self._known.union(self._seeds))
            random.shuffle(candidates)
            # All commands wait for the map: not for a node that hangs, if another one answers.
            candidates.sort(key=self._silent.__contains__)
            failure: Exception | None = None
            for address in candidates:
                try:
                    async with asyncio.timeout(MAP_TIMEOUT_S):
                        answer = await self._node(address).execute_command("CLUSTER", "SLOTS")
                except (RedisError, OSError) as error:
                    failure = error
                    self._silent.add(address)
                    continue
                self._silent.discard(address)
                if slots := self._read_map(answer, address[0]):
                    self._slots = slots
                    self._outdated = False
                    await self._forget_strangers()
                    return
            raise RedisConnectionError(
                f"none of {len(candidates)} nodes tells the slots of the cluster"
                + (f": {failure or type(failure).__name__}" if failure is not None else "")
            ) from failure

    def _read_map(self, ranges: list[Any], asked_host: str) -> Slots:
        slots: Slots = {}
        known: set[Address] = set()
        for first, last, *servers in ranges:
            found = [
                (host.decode() if host else asked_host, int(port)) for host, port, *_ in servers
            ]
            # "?" stands for a server of which the node itself does not know the address.
            known.update(address for address in found if address[0] != "?")
            if found[0] in known:
                slots.update(dict.fromkeys(range(first, last + 1), found[0]))
        self._known = known
        return slots

    async def _forget_strangers(self) -> None:
        kept = self._known.union(self._seeds)
        self._silent &= kept
        for address in [address for address in self._nodes if address not in kept]:
            await self._nodes.pop(address).aclose()


def _slot_of(command: Sequence[Any]) -> int | None:
    name = str(command[0]).upper()
    if name in KEYLESS:
        return None
    key = command[3 if name in SCRIPTS else 1]
    return key_slot(key if isinstance(key, bytes) else str(key).encode())


async def _ask(node: Client, command: Sequence[Any], options: dict[str, Any]) -> Any:
    """One command at a node that is about to get the slot, over one connection."""
    async with node.pipeline(transaction=False) as pipeline:
        run: Any = pipeline
        run.execute_command("ASKING")
        run.execute_command(*command, **options)
        _, answer = await pipeline.execute(raise_on_error=False)
    if isinstance(answer, Exception):
        raise answer
    return answer
