"""How an installation stands: shards, lag, relays, gateways; for ``tidegate status``."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, TypeVar

from gateway import faults
from gateway.registry import read_workers
from outbox import database
from outbox.layout import Layout
from outbox.lease import LeaseTable, read_leases
from outbox.neighbour import complaint
from outbox.overview import Overview, overview
from outbox.redis.connect import connect
from outbox.refusal import read_told
from outbox.streams import Streams

TIMEOUT_S: Final = 10.0
"""How long each of the two stores may take."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bus:
    """What Redis says."""

    epoch: str | None
    """The epoch that it tells gateways."""
    last_ids: dict[int, int]
    leases: LeaseTable
    gateways: tuple[dict[str, Any], ...]
    neighbours: tuple[str, ...] = ()
    """Other epochs whose relays hold leases: of installations with the same Redis."""
    failing: Mapping[int, str] = field(default_factory=dict)
    """Shard → why it stands still, as its relay says."""


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard on its way from the outbox to the gateways."""

    shard: int
    head: int | None
    """The last seq in the log; None if Postgres is out of reach."""
    last: int | None
    """The last seq on the bus; None if Redis is out of reach."""
    lag: int | None
    """Messages in the log that are not on the bus; negative: Postgres lost commits."""
    waiting: int | None
    """Committed rows in the outbox."""
    oldest_s: float | None
    relay: str | None
    """Id of the relay that holds the shard."""


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """One gateway worker as it last reported itself."""

    id: str
    host: str
    port: int
    connections: int
    subscriptions: int
    shards: int
    """How many shards it reads."""
    lag: int | None
    """Messages on the bus that it has not taken yet, over its shards."""


@dataclass(frozen=True, slots=True)
class Status:
    """Everything; ``problems`` is empty if all is well."""

    problems: tuple[str, ...]
    epoch: str | None
    waiting: int | None
    """Committed rows in the outbox, all shards."""
    oldest_s: float | None
    """Age of the oldest of them in seconds."""
    shards: tuple[ShardStatus, ...]
    relays: tuple[str, ...]
    gateways: tuple[GatewayStatus, ...]
    also_lag: int | None = None
    """Messages in the log that the additional Redis lacks; None if there is none or it is out of
    reach."""

    def json(self) -> str:
        """One JSON object with the fields of this class."""
        return json.dumps({"ok": not self.problems, **asdict(self)}, indent=2)


async def read_status(postgres_dsn: str, redis_url: str, redis_url_also: str = "") -> Status:
    """Ask all stores. What is out of reach becomes a problem, not an error."""
    log = await _ask("Postgres", lambda: _read_log(postgres_dsn))
    layout = None if isinstance(log, str) else log.layout
    bus = await _ask("Redis", lambda: _read_bus(redis_url, layout))
    if not isinstance(log, str):
        # Once more: the heads are then younger than the bus, and a bus that is ahead of its head
        # is proof of lost commits instead of bad timing.
        log = await _ask("Postgres", lambda: _read_log(postgres_dsn))
    status = judge(log, bus)
    if not redis_url_also or isinstance(log, str):
        return status
    # The log was read before: what is appended meanwhile cannot look like a lag.
    also = await _ask("additional Redis", lambda: _read_bus(redis_url_also, layout))
    return judge_also(status, log, also)


def judge_also(status: Status, log: Overview, also: Bus | str) -> Status:
    """The same with what is to be said of the additional Redis."""
    if isinstance(also, str):
        return replace(status, problems=(*status.problems, also))
    if also.epoch != log.layout.epoch:
        problem = (
            f"the additional Redis has {f'epoch {also.epoch}' if also.epoch else 'no epoch'}: no "
            "relay with TIDEGATE_REDIS_URL_ALSO is running"
        )
        return replace(status, problems=(*status.problems, problem))
    lag = sum(max(0, one.head - also.last_ids.get(s, 0)) for s, one in log.shards.items())
    # Those that have moved already.
    gateways = tuple(_gateway(reported, also.last_ids) for reported in also.gateways)
    return replace(status, also_lag=lag, gateways=(*status.gateways, *gateways))


def judge(log: Overview | str, bus: Bus | str) -> Status:
    """The whole from the two halves, of which each may be the reason why it is missing."""
    problems = [half for half in (log, bus) if isinstance(half, str)]
    heads = {} if isinstance(log, str) else log.shards
    last_ids = {} if isinstance(bus, str) else bus.last_ids
    if not isinstance(bus, str):
        problems += map(complaint, bus.neighbours)
        if bus.epoch is None:
            problems.append(
                "Redis has no epoch: no relay has written one yet, start `tidegate relay`"
            )
        elif (
            not isinstance(log, str)
            and bus.epoch != log.layout.epoch
            and bus.epoch not in bus.neighbours
        ):
            problems.append(
                f"Redis has epoch {bus.epoch}, Postgres {log.layout.epoch}: "
                "a relay that reaches both must run"
            )
        problems += _relay_problems(bus.leases, heads)
        problems += [f"shard {shard}: {cause}" for shard, cause in sorted(bus.failing.items())]
    shards = []
    for shard in sorted(heads.keys() | last_ids.keys()):
        in_log = heads.get(shard)
        last = last_ids.get(shard)
        lag = None if in_log is None or last is None else in_log.head - last
        if lag is not None and lag < 0:
            problems.append(
                f"shard {shard}: the bus is {-lag} messages ahead of the log: Postgres lost commits"
            )
        shards.append(
            ShardStatus(
                shard,
                in_log.head if in_log else None,
                last,
                lag,
                in_log.waiting if in_log else None,
                in_log.oldest_s if in_log else None,
                None if isinstance(bus, str) else bus.leases.holders.get(shard),
            )
        )
    ages = [s.oldest_s for s in shards if s.oldest_s is not None]
    return Status(
        problems=tuple(problems),
        epoch=log.layout.epoch if not isinstance(log, str) else None,
        waiting=None if isinstance(log, str) else sum(s.waiting for s in heads.values()),
        oldest_s=max(ages, default=None),
        shards=tuple(shards),
        relays=() if isinstance(bus, str) else bus.leases.relays,
        gateways=() if isinstance(bus, str) else tuple(_gateway(g, last_ids) for g in bus.gateways),
    )


def _relay_problems(leases: LeaseTable, shards: Mapping[int, object]) -> list[str]:
    if not leases.relays:
        return ["no relay is running: messages wait in the outbox, start `tidegate relay`"]
    orphans = sorted(shards.keys() - leases.holders.keys())
    if not orphans:
        return []
    named = ", ".join(map(str, orphans[:8])) + (", …" if len(orphans) > 8 else "")
    return [f"no relay holds shards {named}: normal for some seconds while relays come and go"]


def _gateway(reported: Mapping[str, Any], last_ids: Mapping[int, int]) -> GatewayStatus:
    positions = {int(shard): int(seq) for shard, seq in reported.get("positions", {}).items()}
    behind = [last_ids[s] - seq for s, seq in positions.items() if s in last_ids]
    return GatewayStatus(
        id=str(reported.get("id", "?")),
        host=str(reported.get("host", "?")),
        port=int(reported.get("port", 0)),
        connections=int(reported.get("connections", 0)),
        subscriptions=int(reported.get("subscriptions", 0)),
        shards=len(positions),
        lag=sum(max(0, lag) for lag in behind) if behind else None,
    )


async def _ask(store: str, read: Callable[[], Awaitable[T]]) -> T | str:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await read()
    except TimeoutError:
        return f"{store}: no answer within {TIMEOUT_S:g} s"
    except Exception as error:
        explained = faults.explain(error)
        if explained is None:
            raise
        line = explained[1][0]
        return line if line.startswith(store) else f"{store}: {line}"


async def _read_log(dsn: str) -> Overview:
    connection = await database.connect(dsn, application_name="tidegate-status")
    async with connection:
        return await overview(connection)


async def _read_bus(url: str, layout: Layout | None) -> Bus:
    """What Redis has of the history that Postgres has or, without Postgres, that Redis tells."""
    client = connect(url, max_connections=2)
    try:
        bus = Streams(client)
        epoch = await bus.epoch()
        own = epoch if layout is None else layout.epoch
        workers = await read_workers(client)
        told = (epoch, *(worker.get("epoch") for worker in workers))
        others = {str(other) for other in told if other} - {own}
        neighbours = [
            other for other in sorted(others) if (await read_leases(client, other)).holders
        ]
        if own is None:
            return Bus(None, {}, LeaseTable((), {}), workers)
        leases = await read_leases(client, own)
        # Without Postgres nobody says how many shards there are: the leases name those in use.
        asked = sorted(leases.holders) if layout is None else range(layout.shards)
        return Bus(
            epoch,
            await bus.last_ids(own, asked),
            leases,
            tuple(worker for worker in workers if worker.get("epoch") == own),
            tuple(neighbours),
            await read_told(client, own),
        )
    finally:
        await client.aclose()
