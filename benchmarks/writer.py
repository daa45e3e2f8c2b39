"""Publishing at a pace: transactions of a number of messages, each with the moment of its sending.

Latency is from that moment, just before the one statement that inserts and commits, to the arrival
at the client: it includes the commit itself.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psycopg

from publisher import Message, RawJSON, publish_many

HEAD = '{"t":%d,"p":"%s"}'


def payload(size_bytes: int, sent_ns: int) -> bytes:
    """JSON of exactly this size (at least that of its moment) as ``load.c`` looks for it."""
    least = len(HEAD % (sent_ns, ""))
    return (HEAD % (sent_ns, "x" * (size_bytes - least))).encode()


@dataclass(frozen=True, slots=True)
class Pace:
    """What a writer did."""

    messages: int
    elapsed_s: float
    late_s: float
    """How far it was behind its timetable at worst."""

    @property
    def per_s(self) -> float:
        return self.messages / self.elapsed_s


class Writer:
    """One connection that publishes. ``size_bytes`` is that of each payload."""

    def __init__(self, dsn: str, size_bytes: int = 100) -> None:
        self.size_bytes = size_bytes
        self._connection = psycopg.connect(dsn, autocommit=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def commit(self, rooms: Sequence[str]) -> None:
        """Publish one message to each of these rooms, in one transaction."""
        text = RawJSON(payload(self.size_bytes, time.monotonic_ns()))
        publish_many(self._connection, [Message(room, text) for room in rooms])

    def keep_pace(
        self,
        messages_per_s: float,
        duration_s: float,
        rows: int,
        next_rooms: Callable[[int], Sequence[str]],
        stop: threading.Event | None = None,
    ) -> Pace:
        """Commit ``rows`` messages at a time; see the function of this name."""
        return keep_pace(
            messages_per_s, duration_s, rows, lambda count: self.commit(next_rooms(count)), stop
        )


def keep_pace(
    messages_per_s: float,
    duration_s: float,
    together: int,
    send: Callable[[int], None],
    stop: threading.Event | None = None,
) -> Pace:
    """Have ``together`` messages sent at a time, by a timetable that does not wait for anyone."""
    interval_s = together / messages_per_s
    ticks = max(1, round(duration_s / interval_s))
    late_s = 0.0
    done = 0
    start = time.monotonic()
    for tick in range(ticks):
        if stop is not None and stop.is_set():
            break
        wait_s = start + tick * interval_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        else:
            late_s = max(late_s, -wait_s)
        send(together)
        done += together
    # Up to where the next one would have been.
    elapsed_s = max(time.monotonic() - start, done / messages_per_s)
    return Pace(done, elapsed_s, late_s)
