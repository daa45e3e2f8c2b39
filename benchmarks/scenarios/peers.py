"""Delivery beside what else one would build from Postgres or Redis alone.

The same messages of 100 B to 1, 10 or 100 listeners of one channel, at 1,000 to 25,000 a second:
through Tidegate; by NOTIFY to a Starlette application that LISTENs and awaits send_text for each
client; and by Redis Pub/Sub to the same. Sent 10, 50 or 100 at a time: rows of a transaction, calls
of pg_notify in one statement, PUBLISH in one pipeline. Latency is from just before the sending,
lost is what had not come when nothing had come for 3 seconds after the last was sent. CPU is that
of the gateway or the application, in % of a core while messages came.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol

import psycopg
import redis

from benchmarks.bench import Bench
from benchmarks.broadcaster import Broadcaster
from benchmarks.delivery import in_turn
from benchmarks.figures import Result
from benchmarks.load import PREFIX, Load, Report
from benchmarks.processor import cpu_s
from benchmarks.starlette_app import CHANNEL
from benchmarks.writer import Writer, keep_pace, payload

ROOM = f"{PREFIX}0"
LISTENERS = (1, 10, 100)
PACES = ((1_000, 10), (10_000, 50), (25_000, 100))
"""Messages a second, and how many are sent at a time."""
SIZE_BYTES = 100
DURATION_S = 3.0
QUIET_S = 3.0
LONGEST_S = 60.0
LOOK_S = 0.1


class Peer(Protocol):
    """A way from the sender to the listeners."""

    pid: int
    load: Load

    def send(self, count: int) -> None:
        """Send so many messages."""
        ...


class TidegatePeer:
    """Outbox, relay, gateway."""

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        installed = stack.enter_context(bench.servers.installation())
        installed.relay(bench.cores.all)
        gateway = installed.gateway(bench.cores.server)
        self.pid = gateway.pid
        self.load = stack.enter_context(Load(gateway.port, bench.cores.load))
        self._writer = stack.enter_context(Writer(installed.dsn, SIZE_BYTES))
        self._rooms = in_turn([ROOM])

    def send(self, count: int) -> None:
        self._writer.commit(self._rooms(count))


class NotifyPeer:
    """pg_notify and LISTEN."""

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        dsn = bench.servers.postgres.dsn()
        application = stack.enter_context(Broadcaster(bench.cores.server, "notify", dsn))
        self.pid = application.pid
        self.load = _plain_load(application, bench, stack)
        self._texts = _texts()
        self._connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))

    def send(self, count: int) -> None:
        self._connection.execute(
            "SELECT pg_notify(%s, text) FROM unnest(%s::text[]) AS text",
            (CHANNEL, [next(self._texts) for _ in range(count)]),
        )


class PubSubPeer:
    """PUBLISH and SUBSCRIBE."""

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        url = bench.servers.redis.url
        application = stack.enter_context(Broadcaster(bench.cores.server, "pubsub", url))
        self.pid = application.pid
        self.load = _plain_load(application, bench, stack)
        self._texts = _texts()
        self._client = stack.enter_context(redis.Redis.from_url(url))

    def send(self, count: int) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for _ in range(count):
            pipeline.publish(CHANNEL, next(self._texts))
        pipeline.execute()


PEERS: dict[str, type[TidegatePeer] | type[NotifyPeer] | type[PubSubPeer]] = {
    "tidegate": TidegatePeer,
    "NOTIFY": NotifyPeer,
    "Pub/Sub": PubSubPeer,
}


def run(bench: Bench, result: Result) -> None:
    with bench.spread():
        for listeners in LISTENERS:
            for _ in bench.runs():
                for per_s, together in PACES:
                    measured = {
                        name: _measure(bench, name, per_s, together, listeners)
                        for name in bench.shuffled(*PEERS)
                    }
                    for peer in PEERS:
                        for name, value in measured[peer].items():
                            result.add(f"{per_s:,}/s x {listeners}, {peer}", name, value)


def _measure(
    bench: Bench, name: str, per_s: int, together: int, listeners: int
) -> dict[str, float]:
    # A fresh one each time: what one pace leaves behind is not the next's.
    with ExitStack() as stack:
        peer: Peer = PEERS[name](bench, stack)
        peer.load.open(listeners)
        peer.load.mark()
        before_s = cpu_s(peer.pid)
        pace = keep_pace(per_s, bench.duration_s(DURATION_S), together, peer.send)
        expected = pace.messages * listeners
        report = _settled(peer.load, expected)
        used_s = cpu_s(peer.pid) - before_s
    return {
        "p50, ms": report.every_latency.percentile_ms(50),
        "p99, ms": report.every_latency.percentile_ms(99),
        "lost, %": 100 * (1 - report["deliveries"] / expected),
        "sent/s": pace.per_s,
        "CPU, %": 100 * used_s / max(report.span_s, pace.elapsed_s),
    }


def _settled(load: Load, expected: int) -> Report:
    """What came in the end."""
    seen, changed = -1, time.monotonic()
    deadline = changed + LONGEST_S
    while True:
        report = load.report(holes_allowed=True)
        now = time.monotonic()
        if report["deliveries"] != seen:
            seen, changed = report["deliveries"], now
        if seen == expected or now - changed > QUIET_S or now > deadline:
            return report
        time.sleep(LOOK_S)


def _plain_load(application: Broadcaster, bench: Bench, stack: ExitStack) -> Load:
    return stack.enter_context(Load(application.port, bench.cores.load, path="/", plain=True))


def _texts() -> Iterator[str]:
    """Messages as the gateway writes them, each with the next offset."""
    offset = 0
    while True:
        offset += 1
        data = payload(SIZE_BYTES, time.monotonic_ns()).decode()
        yield f'{{"push":{{"channel":"{ROOM}","pub":{{"data":{data},"offset":{offset}}}}}}}'
