"""Everybody returns at once.

5,000 clients of 50 rooms lose their gateway; 200 messages are published to each room; a new
gateway, which knows none of them, takes all clients back, each with its position. Each checks that
it is told "recovered" and gets all 200, once and in order. Meanwhile 100 clients of another room
get 20 messages a second: their p99 before and during the return. Reads of history are those of the
gateway in Redis and Postgres together.
"""

import time
from contextlib import ExitStack

from benchmarks.bench import Bench
from benchmarks.delivery import Background, flow, in_turn
from benchmarks.figures import Result, at_most
from benchmarks.load import Load
from benchmarks.processor import cpu_s
from benchmarks.writer import Writer

CLIENTS = 5_000
ROOMS = 50
BEHIND = 200
OTHERS = 100
OTHERS_PER_S = 20
OTHERS_S = 3.0
TOGETHER = 1_000
"""Clients that are on their way in at one time."""
TIMEOUT_S = 300.0


def run(bench: Bench, result: Result) -> None:
    clients = bench.crowd(CLIENTS, ROOMS) // ROOMS * ROOMS
    for _ in bench.runs():
        with ExitStack() as stack:
            _measure(bench, result, clients, stack)


def _measure(bench: Bench, result: Result, clients: int, stack: ExitStack) -> None:
    case = f"{clients:,} clients, {BEHIND} messages behind"
    installed = stack.enter_context(bench.servers.installation())
    installed.relay(bench.cores.rest)
    gateway = installed.gateway(bench.cores.server)
    load = stack.enter_context(Load(gateway.port, bench.cores.load, rooms=ROOMS, opening=TOGETHER))
    load.open(clients)
    load.drop()
    gateway.process.kill()
    with Writer(installed.dsn) as missed:
        for _ in range(BEHIND):
            missed.commit(load.rooms)
    gateway = installed.gateway(bench.cores.server, gateway.port)

    others = stack.enter_context(Load(gateway.port, bench.cores.load, prefix="other:"))
    others.open(OTHERS)
    writer = stack.enter_context(Writer(installed.dsn))
    _, calm = flow(
        writer,
        others,
        OTHERS_PER_S,
        bench.duration_s(OTHERS_S),
        rows=1,
        rooms=in_turn(others.rooms),
        clients_per_room=OTHERS,
    )
    before = gateway.probe()
    before_s, started = cpu_s(gateway.pid), time.monotonic()
    load.mark()
    others.mark()
    with Background(writer, OTHERS_PER_S, rows=1, rooms=in_turn(others.rooms)) as background:
        load.resume(TIMEOUT_S)
        load.reach(clients * BEHIND, TIMEOUT_S)
        elapsed_s = time.monotonic() - started
        used_s = cpu_s(gateway.pid) - before_s
    others.reach(background.pace.messages * OTHERS)
    busy, report, after = others.report(), load.report(), gateway.probe()
    assert report.messages == clients * BEHIND
    assert report["recovered"] == clients

    reads = sum(after.get(s, 0) - before.get(s, 0) for s in ("redis", "postgres"))
    calm_ms, busy_ms = (r.every_latency.percentile_ms(99) for r in (calm, busy))
    result.add(case, "until all have all, s", elapsed_s)
    result.add(case, "history reads", reads, at_most(200))
    result.add(case, "others' p99 before, ms", calm_ms)
    result.add(case, "others' p99 meanwhile, ms", busy_ms)
    result.add(case, "ratio", busy_ms / calm_ms, at_most(2))
    result.add(case, "gateway, ms CPU per client", 1e3 * used_s / clients)
    result.add(case, "p99 of a return, s", report.joins.percentile_ms(99) / 1e3)
