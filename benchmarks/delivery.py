"""Messages on their way from the writer to a load, and how long they took."""

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from random import Random

from benchmarks.figures import Result, at_most
from benchmarks.load import Load, Report
from benchmarks.writer import Pace, Writer

ARRIVAL_TIMEOUT_S = 120.0
NextRooms = Callable[[int], Sequence[str]]


def in_turn(rooms: Sequence[str]) -> NextRooms:
    """One room after another."""
    forever = cycle(rooms)
    return lambda count: list(islice(forever, count))


def at_random(rooms: Sequence[str], random: Random) -> NextRooms:
    """Any room, each as likely."""
    return lambda count: random.choices(rooms, k=count)


def flow(
    writer: Writer,
    load: Load,
    messages_per_s: float,
    duration_s: float,
    *,
    rows: int,
    rooms: NextRooms,
    clients_per_room: int,
) -> tuple[Pace, Report]:
    """Publish at a pace and wait until every client has everything.

    Raises Violation, or ProgramFailed if something does not arrive.
    """
    load.mark()
    pace = writer.keep_pace(messages_per_s, duration_s, rows, rooms)
    expected = pace.messages * clients_per_room
    load.reach(expected, ARRIVAL_TIMEOUT_S)
    report = load.report()
    assert report["deliveries"] == expected
    return pace, report


def add_latency(
    result: Result,
    case: str,
    report: Report,
    p50_ms: float | None = None,
    p99_ms: float | None = None,
) -> None:
    """Latencies without those that overlapped a stall of the load, which are told beside them."""
    latency = report.latency if len(report.latency) else report.every_latency
    for percent, limit_ms in ((50, p50_ms), (99, p99_ms)):
        target = None if limit_ms is None else at_most(limit_ms)
        result.add(case, f"p{percent}, ms", latency.percentile_ms(percent), target)
    result.add(case, "p99 with those set apart, ms", report.every_latency.percentile_ms(99))
    result.add(case, "set apart, %", report.set_apart_percent)
