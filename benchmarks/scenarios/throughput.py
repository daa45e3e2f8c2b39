"""How much one gateway core delivers before latency rises.

1,000 clients in one room, 100 B, ten rows a transaction: the pace is raised step by step until p99
(commit to client) is above 25 ms or the writer is more than 2 % behind its timetable. The gateway
is alone on its core; all else shares the load's, and may be what gives way first: the gateway's
CPU in the last good step tells. Latencies that overlap a stall of the load count here.
"""

from contextlib import ExitStack

from benchmarks.bench import Bench
from benchmarks.delivery import flow, in_turn
from benchmarks.figures import Chart, Result, at_least
from benchmarks.load import Load
from benchmarks.processor import cpu_s
from benchmarks.writer import Writer

CLIENTS = 1_000
ROWS = 10
FIRST_PER_S = 100
STEP = 1.3
STEPS_MAX = 12
DURATION_S = 3.0
P99_MS = 25.0
BEHIND = 0.98
CASE = "highest pace with p99 ≤ 25 ms"


def run(bench: Bench, result: Result) -> None:
    clients = bench.crowd(CLIENTS)
    curves: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        installed = stack.enter_context(bench.servers.installation())
        installed.relay(bench.cores.rest)
        gateway = installed.gateway(bench.cores.server)
        load = stack.enter_context(Load(gateway.port, bench.cores.load))
        load.open(clients)
        writer = stack.enter_context(Writer(installed.dsn))
        for number in bench.runs():
            best: dict[str, float] = {"deliveries/s": 0.0}
            curve = curves.setdefault(f"run {number}", [])
            for step in range(STEPS_MAX):
                per_s = FIRST_PER_S * STEP**step
                before_s = cpu_s(gateway.pid)
                pace, report = flow(
                    writer,
                    load,
                    per_s,
                    bench.duration_s(DURATION_S),
                    rows=ROWS,
                    rooms=in_turn(load.rooms),
                    clients_per_room=clients,
                )
                used_s = cpu_s(gateway.pid) - before_s
                delivered_per_s = report["deliveries"] / report["elapsed_ns"] * 1e9
                p99_ms = report.every_latency.percentile_ms(99)
                curve.append((delivered_per_s, p99_ms))
                bench.say(f"{delivered_per_s:,.0f} deliveries/s, p99 {p99_ms:.1f} ms")
                if p99_ms > P99_MS or pace.per_s < BEHIND * per_s:
                    break
                best = {
                    "deliveries/s": delivered_per_s,
                    "p50, ms": report.every_latency.percentile_ms(50),
                    "p99, ms": p99_ms,
                    "gateway, % CPU": 1e11 * used_s / report["elapsed_ns"],
                    "load, % CPU": 100 * report["cpu_ns"] / report["elapsed_ns"],
                    "deliveries per CPU second": report["deliveries"] / used_s,
                }
            for name, value in best.items():
                target = at_least(300_000) if name == "deliveries/s" else None
                result.add(CASE, name, value, target)
    result.charts.append(Chart("p99 as the pace rises", "deliveries/s", "ms", {**curves}))
