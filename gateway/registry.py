"""The registry: which workers are alive, and what each of them does.

Each worker writes a line about itself into one hash in Redis, again and again; a line that was not
renewed is out of date. ``tidegate status`` reads it, and the consumer groups of workers without a
line are removed: a worker that was killed cannot do so itself.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import structlog
from redis.exceptions import RedisError

from outbox import keys
from outbox.redis.client import Client
from outbox.streams import Streams

RENEW_S = 2.0
LEASE_S = 15.0
REAP_EVERY = 5
"""Renewals between two looks for groups of vanished workers."""

_TIME = "#!lua flags=no-writes\nreturn redis.call('TIME')"

log = structlog.get_logger(__name__)


class Registry:
    """The line of one worker. ``describe`` gives what it says; shards are those it reads; ``holds``
    says whether it reads in a group of this name."""

    def __init__(
        self,
        streams: Streams,
        worker: str,
        describe: Callable[[], dict[str, Any]],
        epoch: Callable[[], str],
        shards: Callable[[], list[int]],
        holds: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._streams = streams
        self._worker = worker
        self._describe = describe
        self._epoch = epoch
        self._shards = shards
        self._holds = holds

    async def run(self) -> None:
        """Renew the line until cancelled. Redis may be away for any time."""
        rounds = 0
        while True:
            try:
                await self.renew()
                if rounds % REAP_EVERY == 0:
                    await self.reap()
                rounds += 1
            except (RedisError, OSError) as error:
                log.debug("registry not reached", error=type(error).__name__)
            await asyncio.sleep(RENEW_S)

    async def renew(self) -> None:
        """Write this worker's line."""
        expires_ms = await _now_ms(self._streams.client) + round(LEASE_S * 1000)
        line = json.dumps({"id": self._worker, **self._describe(), "expires_ms": expires_ms})
        await cast(Any, self._streams.client).hset(keys.GATEWAYS, self._worker, line)

    async def reap(self) -> None:
        """Remove lines that are out of date, the groups of workers without a line, and groups of
        this worker that came back: a replica that lags has those that were removed last."""
        client = cast(Any, self._streams.client)
        lines: dict[bytes, bytes] = await client.hgetall(keys.GATEWAYS)
        now_ms = await _now_ms(self._streams.client)
        dead = [worker for worker, line in lines.items() if _expired(line, now_ms)]
        if dead:
            await client.hdel(keys.GATEWAYS, *dead)
        alive = set(lines) - set(dead) | {self._worker.encode()}
        for shard in self._shards():
            bus = keys.bus(self._epoch(), shard)
            if not await client.exists(bus):
                continue
            for group in await client.xinfo_groups(bus):
                name: bytes = group["name"]
                worker = name.rpartition(b":")[0]
                if worker == self._worker.encode():
                    vanished = not self._holds(name.decode())
                else:
                    vanished = worker not in alive
                if vanished:
                    await client.xgroup_destroy(bus, name)
                    log.info("vanished reader's group removed", group=name.decode(), shard=shard)

    async def leave(self) -> None:
        """Remove this worker's line; called once at the end."""
        try:
            await cast(Any, self._streams.client).hdel(keys.GATEWAYS, self._worker)
        except (RedisError, OSError) as error:
            log.debug("registry not reached", error=type(error).__name__)


async def read_workers(client: Client, epoch: str | None = None) -> tuple[dict[str, Any], ...]:
    """The lines of the workers that are alive by Redis' clock, in order of their ids.

    With ``epoch`` only of those that are of this history: the table is the same for all.
    """
    now_ms = await _now_ms(client)
    raw = cast(dict[bytes, bytes], await cast(Any, client).hgetall(keys.GATEWAYS))
    reported = (json.loads(value) for value in raw.values())
    alive = [
        entry
        for entry in reported
        if entry.get("expires_ms", 0) > now_ms and epoch in (None, entry.get("epoch"))
    ]
    return tuple(sorted(alive, key=lambda entry: str(entry.get("id"))))


async def _now_ms(client: Client) -> int:
    """By the clock of the server that has the table: workers whose machines' clocks differ must not
    take each other for dead, and another node of a cluster may be away."""
    seconds, micros = await cast(Any, client).eval(_TIME, 1, keys.GATEWAYS)
    return int(seconds) * 1000 + int(micros) // 1000


def _expired(line: bytes, now_ms: float) -> bool:
    try:
        return bool(json.loads(line)["expires_ms"] < now_ms)
    except (ValueError, KeyError, TypeError):
        return True
