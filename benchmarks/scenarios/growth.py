"""What a delivery costs as the work grows.

CPU of the gateway per delivery, with 100 to 10,000 clients in one room (100 B, one message a tick,
the next when all have it). Then CPU of the gateway per message with 100 to 100,000 rooms of one
client each (at most 1,000 connections, in up to 100 rooms each), at 1,000 messages a second to
rooms at random, ten rows a transaction; and what a room with its one subscription holds in memory.
"""

from contextlib import ExitStack

from benchmarks.bench import Bench
from benchmarks.delivery import at_random, flow
from benchmarks.figures import Chart, Result, at_most
from benchmarks.load import Load
from benchmarks.processor import cpu_s, rss_bytes
from benchmarks.scenarios.fanout import GatewaySubject, delivery_cost
from benchmarks.writer import Writer

CLIENTS = (100, 300, 1_000, 3_000, 10_000)
DELIVERIES = 100_000
SIZE_BYTES = 100
ROOMS = (100, 1_000, 10_000, 100_000)
CONNECTIONS = 1_000
PER_S = 1_000
ROWS = 10
DURATION_S = 4.0
OPEN_TIMEOUT_S = 900.0
PATIENCE_S = "60"
"""Each room is asked for in the log once: a hundred joins of a connection wait for each other."""
FLAT = 1.2
"""The largest may cost so many times what the smallest costs."""


def run(bench: Bench, result: Result) -> None:
    _clients(bench, result)
    _rooms(bench, result)


def _clients(bench: Bench, result: Result) -> None:
    points = list(dict.fromkeys(bench.crowd(count) for count in CLIENTS))
    name = "µs CPU per delivery"
    for clients in points:
        bench.say(f"{clients:,} clients")
        with ExitStack() as stack:
            subject = GatewaySubject(bench, clients, stack)
            ticks = max(5, bench.work(DELIVERIES) // clients)
            for _ in bench.runs():
                cost = delivery_cost(subject, clients, ticks, 1, SIZE_BYTES)
                result.add(_clients_case(clients), name, cost.server_us)
    _compare(result, [(clients, _clients_case(clients)) for clients in points], name, "clients")


def _rooms(bench: Bench, result: Result) -> None:
    points = list(dict.fromkeys(bench.crowd(count) for count in ROOMS))
    name = "µs CPU per message"
    held_bytes: dict[int, int] = {}
    for rooms in points:
        bench.say(f"{rooms:,} rooms")
        with ExitStack() as stack:
            installed = stack.enter_context(bench.servers.installation())
            installed.relay(bench.cores.rest)
            gateway = installed.gateway(bench.cores.server, TIDEGATE_LOG_TIMEOUT_S=PATIENCE_S)
            connections = min(rooms, bench.crowd(CONNECTIONS))
            before_bytes = rss_bytes(gateway.pid)
            load = stack.enter_context(
                Load(
                    gateway.port,
                    bench.cores.load,
                    rooms=rooms,
                    each=rooms // connections,
                    opening=2,
                )
            )
            load.open(connections, OPEN_TIMEOUT_S)
            held_bytes[rooms] = rss_bytes(gateway.pid) - before_bytes
            writer = stack.enter_context(Writer(installed.dsn, SIZE_BYTES))
            choose = at_random(load.rooms, bench.random)
            for _ in bench.runs():
                before_s = cpu_s(gateway.pid)
                pace, _ = flow(
                    writer,
                    load,
                    PER_S,
                    bench.duration_s(DURATION_S),
                    rows=ROWS,
                    rooms=choose,
                    clients_per_room=1,
                )
                cost_us = 1e6 * (cpu_s(gateway.pid) - before_s) / pace.messages
                result.add(_rooms_case(rooms), name, cost_us)
    _compare(result, [(rooms, _rooms_case(rooms)) for rooms in points], name, "rooms")
    # Between the two largest the connections are as many.
    fewer, most = points[-2:]
    each_bytes = (held_bytes[most] - held_bytes[fewer]) / (most - fewer)
    result.add(_rooms_case(most), "memory per room, bytes", each_bytes)


def _clients_case(clients: int) -> str:
    return f"{clients:,} clients, one room"


def _rooms_case(rooms: int) -> str:
    return f"{rooms:,} rooms, one client each"


def _compare(result: Result, points: list[tuple[int, str]], name: str, x: str) -> None:
    """The last beside the first, and a chart."""
    (_, first), (_, last) = points[0], points[-1]
    ratio = result.median(last, name) / result.median(first, name)
    result.add(last, "x of the first", ratio, at_most(FLAT))
    line = [(float(number), result.median(case, name)) for number, case in points]
    result.charts.append(Chart(f"{name} as {x} grow", x, "µs", {x: line}, logarithmic_x=True))
