"""Everything at once.

Fan-out (1,000 clients in one room, 20 messages a second) and many small rooms (500 of 4 clients,
1,000 messages a second, ten rows a transaction), first each alone; then both together, while 500
clients of 10 rooms go away and return 20 messages behind, and others come and go, as fast as they
can. p99 of both, together and alone, in the same run.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.bench import Bench
from benchmarks.delivery import Background, NextRooms, at_random, flow, in_turn
from benchmarks.figures import Result, at_most
from benchmarks.load import Load
from benchmarks.writer import Writer

FANOUT_CLIENTS, FANOUT_PER_S = 1_000, 20
ROOMS, ROOM_CLIENTS, ROOMS_PER_S, ROWS = 500, 4, 1_000, 10
RETURNING, RETURNING_ROOMS, BEHIND = 500, 10, 20
COMING = 100
DURATION_S = 6.0


@dataclass(frozen=True, slots=True)
class Stream:
    """One of the two loads whose latency is looked at."""

    load: Load
    writer: Writer
    per_s: float
    rows: int
    rooms: NextRooms
    clients_per_room: int


def run(bench: Bench, result: Result) -> None:
    with ExitStack() as stack:
        installed = stack.enter_context(bench.servers.installation())
        installed.relay(bench.cores.rest)
        gateway = installed.gateway(bench.cores.server)

        def load(prefix: str, rooms: int) -> Load:
            return stack.enter_context(
                Load(gateway.port, bench.cores.load, rooms=rooms, prefix=prefix)
            )

        def writer() -> Writer:
            return stack.enter_context(Writer(installed.dsn))

        fanout, small = load("large:", 1), load("small:", bench.crowd(ROOMS))
        fanout_clients = bench.crowd(FANOUT_CLIENTS)
        fanout.open(fanout_clients)
        small.open(len(small.rooms) * ROOM_CLIENTS)
        returning, coming = load("back:", RETURNING_ROOMS), load("new:", 1)
        returning.open(bench.crowd(RETURNING, RETURNING_ROOMS))
        streams = {
            "fan-out": Stream(
                fanout, writer(), FANOUT_PER_S, 1, in_turn(fanout.rooms), fanout_clients
            ),
            "small rooms": Stream(
                small,
                writer(),
                ROOMS_PER_S,
                ROWS,
                at_random(small.rooms, bench.random),
                ROOM_CLIENTS,
            ),
        }
        missed = writer()
        for _ in bench.runs():
            _compare(bench, result, streams, returning, coming, missed)


def _compare(
    bench: Bench,
    result: Result,
    streams: dict[str, Stream],
    returning: Load,
    coming: Load,
    missed: Writer,
) -> None:
    alone_ms: dict[str, float] = {}
    for name, stream in streams.items():
        _, report = flow(
            stream.writer,
            stream.load,
            stream.per_s,
            bench.duration_s(DURATION_S),
            rows=stream.rows,
            rooms=stream.rooms,
            clients_per_room=stream.clients_per_room,
        )
        alone_ms[name] = report.every_latency.percentile_ms(99)

    stop = threading.Event()
    with ThreadPoolExecutor(2) as pool, ExitStack() as writing:
        for stream in streams.values():
            stream.load.mark()
        backgrounds = {
            name: writing.enter_context(
                Background(stream.writer, stream.per_s, stream.rows, stream.rooms)
            )
            for name, stream in streams.items()
        }
        work = [
            pool.submit(_repeat, stop, lambda: _return(returning, missed)),
            pool.submit(_repeat, stop, lambda: _come(coming)),
        ]
        stop.wait(bench.duration_s(DURATION_S))
        stop.set()
        returns, comings = (done.result() for done in work)
    for name, stream in streams.items():
        stream.load.reach(backgrounds[name].pace.messages * stream.clients_per_room)
        together_ms = stream.load.report().every_latency.percentile_ms(99)
        result.add(name, "p99 alone, ms", alone_ms[name])
        result.add(name, "p99 together, ms", together_ms)
        result.add(name, "ratio", together_ms / alone_ms[name], at_most(2))
    result.add("meanwhile", f"times that {RETURNING} came back", returns)
    result.add("meanwhile", f"times that {COMING} came", comings)


def _repeat(stop: threading.Event, work: Callable[[], None]) -> int:
    """Do it at least once, until told to stop; how often."""
    times = 0
    while not times or not stop.is_set():
        work()
        times += 1
    return times


def _return(load: Load, writer: Writer) -> None:
    load.drop()
    before = load.report()["recovered"]
    for _ in range(BEHIND):
        writer.commit(load.rooms)
    load.mark()
    load.resume()
    report = load.report()
    load.reach(report["open"] * BEHIND)
    assert load.report()["recovered"] - before == report["open"]


def _come(load: Load) -> None:
    load.open(COMING)
    load.drop()
