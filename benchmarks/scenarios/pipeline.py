"""From the commit to the client, through everything, at several paces.

Latency from just before the statement that inserts and commits to the arrival at the client, with
Postgres, Redis, relay, gateway, writer and load on the cores of one machine; payloads of 100 B in
10 rooms, each client in all of them. At 5,000 a second a transaction has 10 rows, else one.
Nothing may be lost, come twice or out of order: each client checks it. CPU is that of the process,
in % of a core.
"""

from contextlib import ExitStack

from benchmarks.bench import Bench
from benchmarks.delivery import add_latency, flow, in_turn
from benchmarks.figures import Chart, Result, at_least
from benchmarks.load import Load
from benchmarks.processor import cpu_s
from benchmarks.writer import Writer

ROOMS = 10
CLIENTS = (1, 100)
PACES = ((100, 1), (1_000, 1), (5_000, 10))
"""Messages a second, rows of a transaction."""
TARGETS_MS = {100: (4.0, 15.0), 1_000: (4.0, 15.0), 5_000: (10.0, 25.0)}
DURATION_S = 6.0
WARM_S = 0.5


def run(bench: Bench, result: Result) -> None:
    with bench.spread():
        for clients in CLIENTS:
            bench.say(f"{clients} clients")
            with ExitStack() as stack:
                _measure(bench, result, clients, stack)
    result.charts.append(
        Chart(
            "From commit to client, p99",
            "messages/s",
            "ms",
            {
                f"{clients} clients": [
                    (pace, result.median(_case(pace, clients), "p99, ms")) for pace, _ in PACES
                ]
                for clients in CLIENTS
            },
            logarithmic_x=True,
        )
    )


def _measure(bench: Bench, result: Result, clients: int, stack: ExitStack) -> None:
    installed = stack.enter_context(bench.servers.installation())
    relay = installed.relay(bench.cores.all)
    gateway = installed.gateway(bench.cores.server)
    load = stack.enter_context(Load(gateway.port, bench.cores.load, rooms=ROOMS, each=ROOMS))
    load.open(clients)
    writer = stack.enter_context(Writer(installed.dsn))
    rooms = in_turn(load.rooms)
    for _ in bench.runs():
        for pace, rows in PACES:
            case = _case(pace, clients)
            flow(writer, load, pace, WARM_S, rows=rows, rooms=rooms, clients_per_room=clients)
            before_s = {pid: cpu_s(pid) for pid in (gateway.pid, relay.pid)}
            done, report = flow(
                writer,
                load,
                pace,
                bench.duration_s(DURATION_S),
                rows=rows,
                rooms=rooms,
                clients_per_room=clients,
            )
            used_s = {pid: cpu_s(pid) - before_s[pid] for pid in before_s}
            add_latency(result, case, report, *TARGETS_MS[pace])
            result.add(case, "sent/s", done.per_s, at_least(0.98 * pace))
            result.add(case, "deliveries/s", report["deliveries"] / done.elapsed_s)
            result.add(case, "gateway, % CPU", 100 * used_s[gateway.pid] / done.elapsed_s)
            result.add(case, "relay, % CPU", 100 * used_s[relay.pid] / done.elapsed_s)
            result.add(case, "writer late, ms", 1e3 * done.late_s)


def _case(pace: int, clients: int) -> str:
    return f"{pace:,}/s, {clients} client{'s' if clients > 1 else ''}"
