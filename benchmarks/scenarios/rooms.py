"""Many small rooms.

Each client is in one room, messages of 100 B go to rooms at random, ten rows a transaction; all on
the cores of one machine. Then the same at twice the pace: latency may rise, nothing may be lost.
"""

from contextlib import ExitStack

from benchmarks.bench import Bench
from benchmarks.delivery import add_latency, at_random, flow
from benchmarks.figures import Result, at_least
from benchmarks.load import Load
from benchmarks.processor import cpu_s
from benchmarks.writer import Writer

SHAPES = ((500, 8, 2_500), (2_000, 2, 5_000))
"""Rooms, clients of each, messages sent a second."""
FACTORS = (1, 2)
ROWS = 10
DURATION_S = 5.0
WARM_S = 0.5
P50_MS, P99_MS = 10.0, 40.0


def run(bench: Bench, result: Result) -> None:
    with bench.spread():
        for rooms, clients, per_s in SHAPES:
            with ExitStack() as stack:
                _measure(bench, result, bench.crowd(rooms), clients, per_s, stack)


def _measure(
    bench: Bench, result: Result, rooms: int, clients: int, base_per_s: int, stack: ExitStack
) -> None:
    installed = stack.enter_context(bench.servers.installation())
    installed.relay(bench.cores.all)
    gateway = installed.gateway(bench.cores.server)
    load = stack.enter_context(Load(gateway.port, bench.cores.load, rooms=rooms))
    load.open(rooms * clients)
    writer = stack.enter_context(Writer(installed.dsn))
    choose = at_random(load.rooms, bench.random)
    for _ in bench.runs():
        for factor in FACTORS:
            per_s = base_per_s * factor
            case = f"{rooms:,} rooms x {clients} clients, {per_s:,}/s"
            flow(writer, load, per_s, WARM_S, rows=ROWS, rooms=choose, clients_per_room=clients)
            before_s = cpu_s(gateway.pid)
            pace, report = flow(
                writer,
                load,
                per_s,
                bench.duration_s(DURATION_S),
                rows=ROWS,
                rooms=choose,
                clients_per_room=clients,
            )
            used_s = cpu_s(gateway.pid) - before_s
            limits = (P50_MS, P99_MS) if factor == 1 else (None, None)
            add_latency(result, case, report, *limits)
            target = at_least(0.98 * per_s) if factor == 1 else None
            result.add(case, "sent/s", pace.per_s, target)
            result.add(case, "gateway, µs CPU per message", 1e6 * used_s / pace.messages)
