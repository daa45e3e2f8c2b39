"""What a load takes: gateways, relays, Postgres and Redis, from unit costs that were measured.

Arithmetic only. Everything that is known of costs stands in ``COSTS``, measured by ``make bench``
on two cores: put in the figures of another machine's report, and the plan is one for that machine.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Cost:
    """What one unit of something costs."""

    value: float
    unit: str
    what: str
    source: str
    """The scenario of ``make bench`` that measures it."""


COSTS: Mapping[str, Cost] = MappingProxyType(
    {
        # Gateway
        "delivery_alone": Cost(4.5, "µs", "delivery, one message at a time", "fanout"),
        "delivery_of_eight": Cost(0.8, "µs", "delivery, eight messages at a time", "fanout"),
        "gateway_read": Cost(100, "µs", "read of the streams by a worker", "pipeline"),
        "gateway_message": Cost(10, "µs", "message that a worker reads and encodes", "pipeline"),
        "join": Cost(450, "µs", "connect with a token and subscribe", "connect"),
        "connection": Cost(4_096, "bytes", "idle connection with one subscription", "memory"),
        "subscription": Cost(140, "bytes", "each further subscription", "storage"),
        "room": Cost(2_355, "bytes", "room in use at a worker", "growth"),
        "worker": Cost(90_000_000, "bytes", "worker without connections", "memory"),
        # Relay and stores
        "relay_message": Cost(20, "µs", "message in a relay", "relay"),
        "postgres_message": Cost(
            30, "µs", "message in Postgres, beside the application's commit", "relay"
        ),
        "redis_message": Cost(10, "µs", "message in Redis", "relay"),
        # Bytes beside the payload
        "frame": Cost(90, "bytes", "frame to a client, beside the payload", "storage"),
        "entry": Cost(75, "bytes", "stream entry in Redis, beside the payload", "storage"),
        "room_stream": Cost(
            1_000, "bytes", "room's stream in Redis, beside its entries", "storage"
        ),
        "log_row": Cost(
            300, "bytes", "row of the log with its indexes, beside the payload", "storage"
        ),
        "wal_message": Cost(950, "bytes", "WAL of a message, beside twice its payload", "storage"),
    }
)

TOGETHER = 8
"""How many messages ``delivery_of_eight`` is about."""
HEADROOM = 0.6
"""The share of a core that is planned with: the rest is for peaks, garbage and neighbours."""
READING_MOST = 0.4
"""The share of a worker's core that may go into reading: workers do not divide it."""
SURVIVORS_MOST = 0.9
"""The share of a core that the others may use when one worker is gone."""
CONNECTIONS_MOST = 10_000
"""Connections of a worker, the most that was measured."""
READS_MOST_PER_S = 1_000
"""What comes faster is read together."""
LEAST = 2
"""Workers and relays: one may go."""
RELAYS_MOST = 32
SHARDS_LEAST = 16
SPREAD_LEAST = 4
SHARDS_OF_A_RELAY = 4
"""At least so many, so that they divide evenly also when a relay is gone."""
SHARDS_MOST = 1_024

# Defaults of the settings of the same names; a test holds them together.
BUS_MESSAGES = 10_000
ROOM_STREAM_MESSAGES = 300
ROOM_STREAM_IDLE_S = 600
ROOM_RING_MESSAGES = 512
ROOM_RING_BYTES = 262_144
REPLAY_MEMORY_BYTES = 268_435_456
RING_MESSAGE_BYTES = 512
"""What a message counts in a worker's replay memory beside its payload."""
RETENTION_DAYS = 7

DAY_S = 86_400
US = 1e-6


class TooMuch(ValueError):
    """One installation cannot carry it. One line with what would."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be carried. Rooms are alike: each has the same share of clients and messages."""

    clients: int
    """Connected at one time."""
    rooms: int
    """In use at one time."""
    rate_per_s: float
    """Messages committed, of all rooms together."""
    payload_bytes: int = 256
    rooms_each: int = 1
    """Rooms that a client has subscribed to."""
    together: int = 1
    """Messages of one room that are committed at a time, and so reach its clients in one write."""
    audience: float | None = None
    """Clients that get a message, on average over the messages; None: as rooms are alike."""
    retention_days: int = RETENTION_DAYS

    def __post_init__(self) -> None:
        for name in ("clients", "rooms", "payload_bytes", "rooms_each", "together"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1")
        if self.rooms_each > self.rooms:
            raise ValueError(f"a client cannot be in {self.rooms_each} of {self.rooms} rooms")
        if not (math.isfinite(self.rate_per_s) and self.rate_per_s >= 0):
            raise ValueError(f"a rate of {self.rate_per_s} is none: give messages per second")
        if self.audience is not None and not 0 <= self.audience <= self.clients:
            raise ValueError(f"an audience of {self.audience} is not within {self.clients} clients")
        if self.retention_days < 1:
            raise ValueError(f"a retention of {self.retention_days} days: give at least 1")

    @property
    def listeners(self) -> float:
        """Clients that get a message, on average."""
        if self.audience is not None:
            return self.audience
        return self.clients * self.rooms_each / self.rooms

    @property
    def deliveries_per_s(self) -> float:
        return self.rate_per_s * self.listeners


@dataclass(frozen=True, slots=True)
class Gateways:
    """All gateway workers: processes, each with a core. A pod may have several."""

    workers: int
    load: float
    """Of a worker's core, 0…1."""
    load_with_one_lost: float
    delivery_us: float
    connections_most: int
    """Of a worker, when one is lost."""
    memory_most_bytes: int
    """Of a worker with so many."""
    deliveries_per_s: float
    to_clients_bytes_per_s: float
    return_s: float
    """Until all clients are back after all workers were restarted, by their CPU."""


@dataclass(frozen=True, slots=True)
class Relays:
    processes: int
    cores: float
    """That all of them use together."""
    shards: int
    spread: int


@dataclass(frozen=True, slots=True)
class Redis:
    cores: float
    """Of the one that a server without cluster has."""
    commands_per_s: float
    """At most: a batch is one command."""
    memory_bytes: int
    to_gateways_bytes_per_s: float
    servers: int
    """As a cluster, if more than one."""


@dataclass(frozen=True, slots=True)
class Postgres:
    cores: float
    rows_per_s: float
    """Inserted into outbox and log, deleted from the outbox; heads of rooms changed (at most)."""
    wal_bytes_per_s: float
    disk_bytes: int
    """The log, for the whole retention."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What it takes. Shares of cores are what is used; counts have head-room in them."""

    work: Work
    gateways: Gateways
    relays: Relays
    redis: Redis
    postgres: Postgres

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def delivery_us(together: int, costs: Mapping[str, Cost] = COSTS) -> float:
    """CPU of a delivery when so many messages share a write: a part per message, one per write."""
    alone, of_eight = costs["delivery_alone"].value, costs["delivery_of_eight"].value
    write = (alone - of_eight) / (1 - 1 / TOGETHER)
    return max(0.0, alone - write) + write / together


def plan(work: Work, costs: Mapping[str, Cost] = COSTS) -> Plan:
    """What carries ``work``. Raises TooMuch."""
    gateways = _gateways(work, costs)
    relays = _relays(work, costs)
    return Plan(
        work,
        gateways,
        relays,
        _redis(work, relays, gateways, costs),
        _postgres(work, costs),
    )


def _gateways(work: Work, costs: Mapping[str, Cost]) -> Gateways:
    def value(name: str) -> float:
        return costs[name].value

    # Clients are anywhere, so each worker needs every message.
    message = value("gateway_message") * US
    reads_per_s = min(READS_MOST_PER_S, work.rate_per_s / work.together)
    reading = work.rate_per_s * message + reads_per_s * value("gateway_read") * US
    if reading >= READING_MOST:
        most = (READING_MOST - READS_MOST_PER_S * value("gateway_read") * US) / message
        raise TooMuch(
            f"each gateway worker reads every message, and {work.rate_per_s:,.0f} a second leave "
            f"too little of it for clients: divide the tenants among installations of at most "
            f"{most:,.0f} a second"
        )
    each_us = delivery_us(work.together, costs)
    delivering = work.deliveries_per_s * each_us * US

    def load(workers: int) -> float:
        return reading + delivering / workers

    workers = max(
        LEAST,
        1 + math.ceil(work.clients / CONNECTIONS_MOST),
        math.ceil(delivering / (HEADROOM - reading)),
        1 + math.ceil(delivering / (SURVIVORS_MOST - reading)),
    )
    connections = math.ceil(work.clients / (workers - 1))
    rooms = min(work.rooms, connections * work.rooms_each)
    ring_messages = min(ROOM_RING_MESSAGES, ROOM_RING_BYTES // work.payload_bytes)
    rings = rooms * ring_messages * (work.payload_bytes + RING_MESSAGE_BYTES)
    memory = (
        value("worker")
        + connections * (value("connection") + (work.rooms_each - 1) * value("subscription"))
        + rooms * value("room")
        + min(REPLAY_MEMORY_BYTES, rings)
    )
    return Gateways(
        workers=workers,
        load=load(workers),
        load_with_one_lost=load(workers - 1),
        delivery_us=each_us,
        connections_most=connections,
        memory_most_bytes=round(memory),
        deliveries_per_s=work.deliveries_per_s,
        to_clients_bytes_per_s=work.deliveries_per_s * (work.payload_bytes + value("frame")),
        return_s=work.clients * value("join") * US / (workers * (1 - load(workers))),
    )


def _relays(work: Work, costs: Mapping[str, Cost]) -> Relays:
    cores = work.rate_per_s * costs["relay_message"].value * US
    processes = max(LEAST, math.ceil(cores / HEADROOM) + 1)
    if processes > RELAYS_MOST:
        raise TooMuch(f"{processes:,} relays: divide the tenants among several installations")
    shards = max(SHARDS_LEAST, _power_of_two(processes * SHARDS_OF_A_RELAY))
    return Relays(
        processes=processes,
        cores=cores,
        shards=min(SHARDS_MOST, shards),
        spread=max(SPREAD_LEAST, _power_of_two(processes)),
    )


def _redis(work: Work, relays: Relays, gateways: Gateways, costs: Mapping[str, Cost]) -> Redis:
    entry = work.payload_bytes + costs["entry"].value
    of_a_room_per_s = work.rate_per_s / work.rooms
    # A stream lives until nothing has come for the idle time, and grows until then.
    lives = min(1.0, of_a_room_per_s * ROOM_STREAM_IDLE_S)
    entries = ROOM_STREAM_MESSAGES if lives == 1 else 1
    memory = relays.shards * BUS_MESSAGES * entry + work.rooms * lives * (
        costs["room_stream"].value + entries * entry
    )
    cores = work.rate_per_s * costs["redis_message"].value * US
    return Redis(
        cores=cores,
        commands_per_s=work.rate_per_s / work.together * (1 + gateways.workers),
        memory_bytes=round(memory),
        to_gateways_bytes_per_s=work.rate_per_s * entry * gateways.workers,
        servers=max(1, math.ceil(cores / HEADROOM)),
    )


def _postgres(work: Work, costs: Mapping[str, Cost]) -> Postgres:
    # Retention drops whole days, so that one more than it says is there.
    kept = work.rate_per_s * DAY_S * (work.retention_days + 1)
    return Postgres(
        cores=work.rate_per_s * costs["postgres_message"].value * US,
        rows_per_s=4 * work.rate_per_s,
        wal_bytes_per_s=work.rate_per_s * (2 * work.payload_bytes + costs["wal_message"].value),
        disk_bytes=round(kept * (work.payload_bytes + costs["log_row"].value)),
    )


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
