"""Messages on their way from the writer to a load, and how long they took."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import cycle, islice
from random import Random
from typing import Self

from benchmarks.figures import Result, at_most
from benchmarks.load import Load, Report
from benchmarks.writer import Pace, Writer

ARRIVAL_TIMEOUT_S = 120.0
LONGEST_S = 3_600.0
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


class Background:
    """A writer that keeps its pace in a thread for as long as the block lasts."""

    def __init__(self, writer: Writer, messages_per_s: float, rows: int, rooms: NextRooms) -> None:
        self._stop = threading.Event()
        self._done: Future[Pace] = Future()
        self._thread = threading.Thread(
            target=self._write, args=(writer, messages_per_s, rows, rooms), daemon=True
        )

    def _write(self, writer: Writer, per_s: float, rows: int, rooms: NextRooms) -> None:
        try:
            pace = writer.keep_pace(per_s, LONGEST_S, rows, rooms, self._stop)
            self._done.set_result(pace)
        except BaseException as error:
            self._done.set_exception(error)

    @property
    def pace(self) -> Pace:
        """What it did; after the block. Raises what ended it."""
        return self._done.result(timeout=ARRIVAL_TIMEOUT_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


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
