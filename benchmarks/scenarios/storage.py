"""Bytes that a message takes in Postgres and Redis, and a subscription in the gateway.

20,000 messages, whose payloads do not compress, go in transactions of ten to 1,000 rooms. In
Postgres: the log with its indexes, and the WAL (without full pages, unless with --fsync) of
everything from the insert on; in Redis: the bus, and the rooms' streams with what belongs to them,
20 entries each. Beside the payload, in bytes. Then RSS of a gateway with 2,000 connections in 1 and
in 21 of 100 rooms.
"""

import base64
import random

import psycopg
import redis

from benchmarks.bench import Bench
from benchmarks.figures import Result
from benchmarks.load import Load
from benchmarks.processor import rss_bytes
from benchmarks.servers import Installation, wait_until
from gateway.protocols.centrifuge_json import CentrifugeJSON
from gateway.room import encode
from outbox import keys
from outbox import message as outbox_message
from publisher import Message, RawJSON, publish_many

MESSAGES = 20_000
ROOMS = 1_000
TOGETHER = 10
SIZES_BYTES = (100, 1_000)
CONNECTIONS = 2_000
BEFORE = 100
EACH = (1, 21)
GATEWAY_ROOMS = 100


def run(bench: Bench, result: Result) -> None:
    for _ in bench.runs():
        for size_bytes in SIZES_BYTES:
            with bench.servers.installation() as installed:
                _stores(bench, result, installed, size_bytes)
        held = {each: _connection_bytes(bench, each) for each in EACH}
        few, many = EACH
        result.add("gateway", "connection, bytes", held[few])
        result.add(
            "gateway", "further subscription, bytes", (held[many] - held[few]) / (many - few)
        )


def _stores(bench: Bench, result: Result, installed: Installation, size_bytes: int) -> None:
    messages, rooms = bench.work(MESSAGES, 100), bench.work(ROOMS, 5)
    messages -= messages % TOGETHER
    text = _payload(bench.random, size_bytes)
    installed.relay(bench.cores.rest)
    case = f"payload of {size_bytes:,} B"
    with psycopg.connect(installed.dsn, autocommit=True) as connection:

        def one(statement: str) -> float:
            row = connection.execute(statement.encode()).fetchone()
            assert row is not None
            return float(row[0])

        before = one("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')")
        for first in range(0, messages, TOGETHER):
            publish_many(
                connection,
                [Message(f"room:{(first + i) % rooms}", RawJSON(text)) for i in range(TOGETHER)],
            )
        done = "SELECT sum(head) FROM tidegate.shard"
        wait_until(lambda: one(done) == messages, "the last message in the log")
        wal = one("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')") - before
        log = one(
            "SELECT sum(pg_total_relation_size(inhrelid)) FROM pg_inherits "
            "WHERE inhparent = 'tidegate.message'::regclass"
        )
        epoch = installed.query("SELECT epoch FROM tidegate.meta")
        shards = range(installed.query("SELECT shards FROM tidegate.meta"))
    with redis.Redis.from_url(installed.redis_url) as client:
        buses = {keys.bus(epoch, shard).encode() for shard in shards}
        wait_until(
            lambda: sum(client.xlen(bus) for bus in buses) == messages, "the last on a stream"
        )
        bus_bytes = sum(client.memory_usage(bus, samples=0) or 0 for bus in buses)
        of_rooms = [key for key in client.scan_iter() if key not in buses and b":room:" in key]
        rooms_bytes = sum(client.memory_usage(key, samples=0) or 0 for key in of_rooms)
    entry = bus_bytes / messages
    result.add(case, "log row", log / messages - size_bytes)
    result.add(case, "WAL, beside twice the payload", wal / messages - 2 * size_bytes)
    result.add(case, "stream entry", entry - size_bytes)
    result.add(case, "room's stream beside its entries", (rooms_bytes - messages * entry) / rooms)
    sent = outbox_message.Message(0, 0, "", "room:0", messages, "", "12345", None, text, False, 0)
    frame = encode(CentrifugeJSON(), "room:0", [sent])
    result.add(case, "frame to a client", len(frame) - len(text))


def _payload(source: random.Random, size_bytes: int) -> bytes:
    """JSON of this size that does not compress well."""
    return b'"%b"' % base64.b64encode(source.randbytes(size_bytes))[: size_bytes - 2]


def _connection_bytes(bench: Bench, each: int) -> float:
    count = bench.crowd(CONNECTIONS)
    with bench.servers.installation() as installed:
        installed.relay(bench.cores.rest)
        gateway = installed.gateway(bench.cores.server)
        with Load(gateway.port, bench.cores.load, rooms=GATEWAY_ROOMS, each=each) as load:
            load.open(BEFORE)
            before_bytes = rss_bytes(gateway.pid)
            load.open(count)
            return (rss_bytes(gateway.pid) - before_bytes) / count
