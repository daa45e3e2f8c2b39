"""Clients that stop reading.

1,000 clients in one room, 8 KB a message, 50 messages a second. First all read; then 20 of them
stop, with small receive buffers. The others' latency, with and without, in the same run; how much
the gateway's memory grew meanwhile; and how long the 20 take to have everything when they read on,
by how many reads of history in Redis and Postgres together: above 0, their buffers had been full.
"""

import time
from contextlib import ExitStack

from benchmarks.bench import Bench
from benchmarks.delivery import in_turn
from benchmarks.figures import Result, at_most
from benchmarks.load import Load
from benchmarks.processor import rss_bytes
from benchmarks.writer import Writer

CLIENTS = 1_000
SLOW = 20
SIZE_BYTES = 8_192
PER_S = 50
DURATION_S = 15.0
"""6 MB for each client: more than the kernel's buffers (2.6 MB on loopback) and the gateway's."""
BUFFER_BYTES = 1_048_576
"""The gateway's ceiling for each client."""
TIMEOUT_S = 120.0
STORES = ("redis", "postgres")


def run(bench: Bench, result: Result) -> None:
    clients = bench.crowd(CLIENTS, SLOW + 10)
    for _ in bench.runs():
        with ExitStack() as stack:
            _measure(bench, result, clients, stack)


def _measure(bench: Bench, result: Result, clients: int, stack: ExitStack) -> None:
    case = f"{SLOW} of {clients:,} clients do not read"
    installed = stack.enter_context(bench.servers.installation())
    installed.relay(bench.cores.rest)
    gateway = installed.gateway(bench.cores.server, TIDEGATE_CLIENT_BUFFER_BYTES=str(BUFFER_BYTES))
    load = stack.enter_context(Load(gateway.port, bench.cores.load, narrow=SLOW))
    load.open(clients)
    writer = stack.enter_context(Writer(installed.dsn, SIZE_BYTES))
    rooms = in_turn(load.rooms)
    duration_s = bench.duration_s(DURATION_S)

    load.mark()
    pace = writer.keep_pace(PER_S, duration_s, 1, rooms)
    load.reach(pace.messages * clients, TIMEOUT_S)
    healthy = load.report()
    before_bytes = rss_bytes(gateway.pid)

    load.pause(SLOW)
    load.mark()
    pace = writer.keep_pace(PER_S, duration_s, 1, rooms)
    load.reach(pace.messages * (clients - SLOW), TIMEOUT_S)
    disturbed = load.report()
    grown_bytes = rss_bytes(gateway.pid) - before_bytes

    before = gateway.probe()
    load.mark()
    load.unpause()
    started = time.monotonic()
    load.reach(pace.messages * SLOW, TIMEOUT_S)
    caught_up_s = time.monotonic() - started
    report = load.report()
    assert report["lowest"] == report["highest"], "a client does not have everything"

    calm_ms, busy_ms = (r.latency.percentile_ms(99) for r in (healthy, disturbed))
    result.add(case, "others' p99 while all read, ms", calm_ms)
    result.add(case, "while they do not, ms", busy_ms)
    result.add(case, "ratio", busy_ms / calm_ms, at_most(1.2))
    result.add(case, "set apart, %", disturbed.set_apart_percent)
    limit_mb = (SLOW * 2 * BUFFER_BYTES) / 1e6
    result.add(case, "memory grown, MB", grown_bytes / 1e6, at_most(limit_mb))
    result.add(case, "until they have all, s", caught_up_s)
    reads = sum(gateway.probe().get(store, 0) - before.get(store, 0) for store in STORES)
    result.add(case, "reads of history", reads)
