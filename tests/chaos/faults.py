"""What the kinds of faults of a schedule do to a cluster, and how they are healed."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, cast

import psycopg
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from outbox import tasks
from tests.chaos.cluster import Cluster, could_not_start
from tests.chaos.failover import postgres_fails_over, redis_fails_over
from tests.chaos.proxy import Link
from tests.chaos.schedule import Fault
from tests.chaos.trial import Trial, within
from tests.processes import Process, catches

LOOP_PAUSE_S = 0.1
BYTES_PER_S = 20_000
TERMINATION_S = 30.0
SWITCH_S = 90.0
"""Above the longest time for which another fault keeps a transaction open or Postgres away."""
LOCK_TIMEOUT_S = 2
TAIL = 0.4
"""The share of a stream that "lose the tail" takes away, at most."""

Healing = AbstractAsyncContextManager[None]


def inject(fault: Fault, trial: Trial) -> Healing:
    """Entered, it does the fault; left, it heals it."""
    cluster = trial.cluster
    pick = random.Random(fault.seed)
    if fault.target == "redis":
        return _REDIS[fault.kind](cluster, pick)
    if fault.target == "postgres":
        return _POSTGRES[fault.kind](cluster, pick)
    if fault.target == "writers":
        return _prepare_transactions(trial)
    if fault.target == "some clients":
        links = [link for name, link in trial.links.items() if not name.startswith("steady")]
        return _links(fault, pick.sample(links, max(1, len(links) // 2)), pick)
    if fault.target in cluster.links:
        return _links(fault, [cluster.links[fault.target]], pick)
    process = cluster.processes.all[fault.target]
    return _process(fault.kind, cluster, process)


@asynccontextmanager
async def _links(fault: Fault, links: list[Link], pick: random.Random) -> AsyncIterator[None]:
    acts: dict[str, Callable[[Link], None]] = {
        "delay": lambda link: link.delay(pick.uniform(0.02, 0.3)),
        "throttle": lambda link: link.throttle(BYTES_PER_S),
        "freeze": Link.freeze,
        "cut": Link.cut,
        "cuts in a loop": Link.cut,
        "refuse": Link.refuse,
        "half-open": Link.half_open,
        "black hole": Link.black_hole,
    }
    act = acts[fault.kind]

    def all_links() -> None:
        for link in links:
            act(link)

    all_links()
    repeated = asyncio.create_task(_repeat(all_links)) if "loop" in fault.kind else None
    try:
        yield
    finally:
        if repeated is not None:
            await _end(repeated)
        for link in links:
            link.heal()


async def _repeat(act: Callable[[], Any]) -> None:
    while True:
        await asyncio.sleep(LOOP_PAUSE_S)
        done = act()
        if asyncio.iscoroutine(done):
            await done


async def _end(task: "asyncio.Task[None]") -> None:
    await tasks.end((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


@asynccontextmanager
async def _process(kind: str, cluster: Cluster, process: Process) -> AsyncIterator[None]:
    if kind == "stop":
        process.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.signal(signal.SIGCONT)
        return
    cluster.down.add(process.name)
    try:
        if kind == "kill":
            await asyncio.to_thread(process.kill)
        elif process.alive:
            # One that was just started may be ended before it runs a line of ours.
            ends = {0} if catches(process.pid, signal.SIGTERM) else {0, -signal.SIGTERM}
            process.signal(signal.SIGTERM)
            code = await asyncio.to_thread(process.wait, TERMINATION_S)
            if code not in ends and not could_not_start(process):
                raise AssertionError(f"{process.name} ended with {code} after SIGTERM")
        yield
    finally:
        # Not awaited: it becomes ready when its servers answer, which other faults may delay.
        await asyncio.to_thread(process.restart)
        cluster.down.discard(process.name)


# Redis


@asynccontextmanager
async def _flushall(cluster: Cluster, pick: random.Random) -> AsyncIterator[None]:
    async with cluster.client() as client:
        await client.flushall()
    yield


@asynccontextmanager
async def _delete_keys(cluster: Cluster, pick: random.Random) -> AsyncIterator[None]:
    async with cluster.client() as client:
        found = sorted([key async for key in client.scan_iter("tg:*")])
        if found:
            await client.delete(*pick.sample(found, pick.randint(1, len(found))))
    yield


@asynccontextmanager
async def _destroy_groups(cluster: Cluster, pick: random.Random) -> AsyncIterator[None]:
    async with cluster.client() as client:
        for bus in [key async for key in client.scan_iter("tg:*:bus")]:
            # A relay may replace the bus meanwhile.
            with suppress(ResponseError):
                for group in await cast(Any, client).xinfo_groups(bus):
                    await client.xgroup_destroy(bus, group["name"])
    yield


@asynccontextmanager
async def _lose_the_tail(cluster: Cluster, pick: random.Random) -> AsyncIterator[None]:
    """Some shards as a replica had them that lagged; of the others each stream for itself."""
    async with cluster.client() as client:
        for bus in [key async for key in client.scan_iter("tg:*:bus")]:
            if pick.random() < 0.5:
                await lag(client, bus, 1 - pick.uniform(0, TAIL))
                continue
            for stream in [bus, *await rooms_of(client, bus)]:
                if pick.random() < 0.7:
                    count = await client.xlen(stream)
                    await shorten(client, stream, int(count * (1 - pick.uniform(0, TAIL))))
        for key in [key async for key in client.scan_iter("tg:{*}:*:*")]:
            if pick.random() < 0.2:
                await client.delete(key)
    yield


async def rooms_of(client: Redis, bus: bytes) -> list[bytes]:
    """The room streams of the bus' shard."""
    return [key async for key in client.scan_iter(bus.removesuffix(b"bus") + b"room:*")]


_LAG = """
local bus = redis.call('XRANGE', KEYS[1], '-', '+')
local kept = math.floor(#bus * tonumber(ARGV[1]))
if kept == #bus then
  return 0
end
local last = kept > 0 and tonumber(string.match(bus[kept][1], '^%d+')) or 0
redis.call('DEL', KEYS[1])
for i = 1, kept do
  redis.call('XADD', KEYS[1], bus[i][1], unpack(bus[i][2]))
end
for k = 2, #KEYS, 2 do
  local entries = redis.call('XRANGE', KEYS[k], '-', '+')
  local begun = string.match(redis.call('GET', KEYS[k + 1]) or '', ' (%d+)$')
  local top, beyond = 0, nil
  redis.call('DEL', KEYS[k])
  for _, entry in ipairs(entries) do
    local fields = entry[2]
    local offset = tonumber(string.match(entry[1], '^%d+'))
    for f = 1, #fields, 2 do
      if fields[f] == 's' and tonumber(fields[f + 1]) <= last then
        redis.call('XADD', KEYS[k], entry[1], unpack(fields))
        top = offset
      elseif fields[f] == 's' then
        beyond = beyond or offset
      end
    end
  end
  -- Where it has a hole, it does not say itself how far the room had come.
  if beyond == top + 1 and top > 0 and begun then
    redis.call('SET', KEYS[k + 1], top .. ' ' .. begun)
  elseif beyond then
    redis.call('DEL', KEYS[k + 1])
  end
end
return #bus - kept
"""


async def lag(client: Redis, bus: bytes, keep: float) -> None:
    """Leaves the shard as it was when its bus had only this share of its entries.

    Replication is in order, so the streams of a replica that lags all end at one moment.
    """
    names = [
        name
        for room in await rooms_of(client, bus)
        for name in (room, room.replace(b"}:room:", b"}:top:", 1))
    ]
    await cast(Any, client).eval(_LAG, 1 + len(names), bus, *names, str(keep))


_SHORTEN = """
local entries = redis.call('XRANGE', KEYS[1], '-', '+')
local kept = tonumber(ARGV[1])
local ttl_ms = redis.call('PTTL', KEYS[1])
redis.call('DEL', KEYS[1])
for i = 1, kept do
  redis.call('XADD', KEYS[1], entries[i][1], unpack(entries[i][2]))
end
if kept > 0 and ttl_ms > 0 then
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
end
"""


async def shorten(client: Redis, stream: bytes | str, kept: int) -> None:
    """Leaves only the first so many entries of one stream, as if there had never been more."""
    await cast(Any, client).eval(_SHORTEN, 1, stream, kept)


@asynccontextmanager
async def _restart_empty(cluster: Cluster, pick: random.Random) -> AsyncIterator[None]:
    await asyncio.to_thread(cluster.redis.kill)
    try:
        yield
    finally:
        await asyncio.to_thread(cluster.redis.restart)


@asynccontextmanager
async def _stall_redis(cluster: Cluster, pick: random.Random) -> AsyncIterator[None]:
    os.kill(cluster.redis.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(cluster.redis.pid, signal.SIGCONT)


@asynccontextmanager
async def _kill_connections(cluster: Cluster, pick: random.Random) -> AsyncIterator[None]:
    async with cluster.client() as client:
        repeated = asyncio.create_task(
            _repeat(lambda: client.client_kill_filter(_type="normal", skipme=True))
        )
        try:
            yield
        finally:
            await _end(repeated)


@asynccontextmanager
async def _fill_memory(cluster: Cluster, pick: random.Random) -> AsyncIterator[None]:
    async with cluster.client() as client:
        await client.config_set("maxmemory", "1")
        try:
            yield
        finally:
            await client.config_set("maxmemory", "0")


# Postgres


@asynccontextmanager
async def _terminate_backends(cluster: Cluster, pick: random.Random) -> AsyncIterator[None]:
    await cluster.terminate_backends()
    await cluster.terminate_backends("writer%")
    yield


@asynccontextmanager
async def _restart(cluster: Cluster, pick: random.Random) -> AsyncIterator[None]:
    await asyncio.to_thread(cluster.postgres.restart)
    yield


@asynccontextmanager
async def _crash(cluster: Cluster, pick: random.Random) -> AsyncIterator[None]:
    await asyncio.to_thread(cluster.postgres.kill)
    try:
        yield
    finally:
        await asyncio.to_thread(cluster.postgres.restart)


@asynccontextmanager
async def _stall_postgres(cluster: Cluster, pick: random.Random) -> AsyncIterator[None]:
    """Stops the backends that serve this database, as a machine without time for them would."""
    pids = [
        pid
        for (pid,) in await cluster.sql(
            "SELECT pid FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    ]
    _signal_all(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal_all(pids, signal.SIGCONT)


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


@asynccontextmanager
async def _hold(cluster: Cluster, statement: str) -> AsyncIterator[None]:
    async with await psycopg.AsyncConnection.connect(cluster.dsn, autocommit=True) as connection:
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await connection.execute(statement.encode())
        yield


@asynccontextmanager
async def _prepare_transactions(trial: Trial) -> AsyncIterator[None]:
    """Half of the writers' transactions have two phases, without the bell, which forbids them."""
    await _until_answered(lambda: _switch_doorbell(trial.cluster, on=False))
    trial.two_phases.allowed = True
    try:
        yield
    finally:
        trial.two_phases.allowed = False

        async def ended() -> bool:
            return trial.two_phases.under_way == 0

        assert await within(SWITCH_S, ended), "writers still have prepared transactions"

        async def end() -> None:
            # One whose answer was lost may be prepared late, and holds the lock as well.
            await trial.forget_prepared()
            await _switch_doorbell(trial.cluster, on=True)

        await _until_answered(end)


async def _switch_doorbell(cluster: Cluster, on: bool) -> None:
    """It takes a lock on the outbox, for which it must not wait long: others wait behind it."""
    await cluster.sql(f"SET lock_timeout = '{LOCK_TIMEOUT_S}s'; SELECT tidegate.set_doorbell({on})")


async def _until_answered(act: Callable[[], Awaitable[Any]]) -> None:
    """Repeats what other faults make fail."""

    async def answered() -> bool:
        try:
            await act()
        except (psycopg.OperationalError, OSError):
            return False
        return True

    assert await within(SWITCH_S, answered), "Postgres is not back, or the outbox is locked"


def _hold_a_snapshot(cluster: Cluster, pick: random.Random) -> Healing:
    return _hold(cluster, "SELECT FROM tidegate.outbox")


def _idle_in_transaction(cluster: Cluster, pick: random.Random) -> Healing:
    return _hold(cluster, "SELECT tidegate.publish('nobody', 'nowhere', '{}')")


_REDIS: dict[str, Callable[[Cluster, random.Random], Healing]] = {
    "flushall": _flushall,
    "delete keys": _delete_keys,
    "destroy groups": _destroy_groups,
    "lose the tail": _lose_the_tail,
    "restart empty": _restart_empty,
    "stall": _stall_redis,
    "kill connections": _kill_connections,
    "fill memory": _fill_memory,
    "fail-over without the tail": redis_fails_over,
}
_POSTGRES: dict[str, Callable[[Cluster, random.Random], Healing]] = {
    "terminate backends": _terminate_backends,
    "restart": _restart,
    "crash": _crash,
    "stall": _stall_postgres,
    "hold a snapshot": _hold_a_snapshot,
    "idle in transaction": _idle_in_transaction,
    "fail-over": postgres_fails_over,
}
