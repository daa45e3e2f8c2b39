"""Delivery beside what else one would pick, or build from Postgres or Redis alone.

The same messages of 100 B to 1, 10 or 100 listeners of one channel, at 1,000 to 25,000 a second,
sent 10, 50 or 100 at a time: through Tidegate (rows of a transaction); by NOTIFY (calls of
pg_notify in one statement) and by Redis Pub/Sub (a pipeline of PUBLISH) to a Starlette application
that awaits send_text for each client; by socket.io with its Redis Streams adapter (emits of one
process, clients at another); by NATS over WebSocket (a write of PUBs); by Centrifugo with its Redis
engine and history (one request of its API). Latency is from just before the sending, lost is what
had not come when nothing had come for 3 seconds after the last was sent. CPU is that of the process
that holds the connections, in % of a core while messages came; NATS and Centrifugo do the broker's
or the publisher's part in the same process.

Only Tidegate and NOTIFY send if and only if a transaction commits. Only Tidegate and Centrifugo let
a client resume; NOTIFY, Pub/Sub and NATS (as measured) keep nothing.

The rows "one room of many" compare CPU time per delivery at one point: one message at a time to
1,000 clients, the next when all have it, beside a loop over send() in C (as in "fanout"). The
application that awaits send_text is there without any broker.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack

from benchmarks.bench import Bench
from benchmarks.figures import Result
from benchmarks.load import Load, Report, Violation
from benchmarks.peers import centrifugo, nats, socketio
from benchmarks.peers.centrifugo import Centrifugo
from benchmarks.peers.nats import NATS
from benchmarks.peers.own import Notify, PubSub, SendText, Tidegate
from benchmarks.peers.peer import SIZE_BYTES, Peer
from benchmarks.peers.socketio import SocketIO
from benchmarks.processor import cpu_s
from benchmarks.program import ProgramFailed
from benchmarks.scenarios.fanout import FloorSubject, Subject, delivery_cost
from benchmarks.servers import NotReady
from benchmarks.writer import keep_pace

LISTENERS = (1, 10, 100)
PACES = ((1_000, 10), (10_000, 50), (25_000, 100))
"""Messages a second, and how many are sent at a time."""
WARM_S = 0.3
"""Sent before, at the same pace; counts for nothing."""
DURATION_S = 3.0
QUIET_S = 3.0
LONGEST_S = 60.0
LOOK_S = 0.1
MANY = 1_000
MANY_DELIVERIES = 100_000
LOSSES = ("holes", "closed")
"""What is a loss, which is a figure here, and no fault of the measurement."""
FIGURES = ("p50, ms", "p99, ms", "lost, %", "sent/s", "CPU, %")

PeerKind = Callable[[Bench, ExitStack], Peer]


def run(bench: Bench, result: Result) -> None:
    kinds: dict[str, PeerKind] = {kind.name: kind for kind in (Tidegate, Notify, PubSub)}
    for kind, module in ((SocketIO, socketio), (NATS, nats), (Centrifugo, centrifugo)):
        reason = module.lacking()
        if reason is None:
            kinds[kind.name] = kind
            result.notes.append(f"{kind.name} {module.version()}.")
        else:
            result.notes.append(f"{kind.name} was not measured: {reason}.")
    with bench.spread():
        for listeners in LISTENERS:
            for _ in bench.runs():
                for per_s, together in PACES:
                    _compare(bench, result, kinds, (per_s, together), listeners)
    for _ in bench.runs():
        _compare_costs(bench, result, {**kinds, SendText.name: SendText})


def _compare(
    bench: Bench,
    result: Result,
    kinds: dict[str, PeerKind],
    pace: tuple[int, int],
    listeners: int,
) -> None:
    measured = {}
    for name in bench.shuffled(*kinds):
        case = f"{pace[0]:,}/s x {listeners}, {name}"
        try:
            measured[name] = _measure(bench, kinds[name], *pace, listeners)
        except (Violation, ProgramFailed, NotReady, OSError) as error:
            if name == Tidegate.name:
                raise
            result.notes.append(f"{case}: {error}")
            measured[name] = dict.fromkeys(FIGURES, math.nan)
    for name in kinds:
        for figure, value in measured[name].items():
            result.add(f"{pace[0]:,}/s x {listeners}, {name}", figure, value)


def _measure(
    bench: Bench, kind: PeerKind, per_s: int, together: int, listeners: int
) -> dict[str, float]:
    # A fresh one each time: what one pace leaves behind is not the next's.
    with ExitStack() as stack:
        peer: Peer = kind(bench, stack)
        peer.load.open(listeners)
        warm = keep_pace(per_s, WARM_S, together, peer.send)
        _settled(peer.load, warm.messages * listeners)
        peer.load.mark()
        before_s = cpu_s(peer.pid)
        pace = keep_pace(per_s, bench.duration_s(DURATION_S), together, peer.send)
        expected = pace.messages * listeners
        report = _settled(peer.load, expected)
        used_s = cpu_s(peer.pid) - before_s
    return dict(
        zip(
            FIGURES,
            (
                report.every_latency.percentile_ms(50),
                report.every_latency.percentile_ms(99),
                100 * (1 - report["deliveries"] / expected),
                pace.per_s,
                100 * used_s / max(report.span_s, pace.elapsed_s),
            ),
            strict=True,
        )
    )


def _settled(load: Load, expected: int) -> Report:
    """What came in the end."""
    seen, changed = -1, time.monotonic()
    deadline = changed + LONGEST_S
    while True:
        report = load.report(allowed=LOSSES)
        now = time.monotonic()
        if report["deliveries"] != seen:
            seen, changed = report["deliveries"], now
        if seen == expected or now - changed > QUIET_S or now > deadline:
            return report
        time.sleep(LOOK_S)


class _PeerSubject:
    """A peer, told to send as ``fanout`` tells its subjects."""

    def __init__(self, peer: Peer) -> None:
        self.pid = peer.pid
        self.load = peer.load
        self._peer = peer

    def tick(self, per_tick: int, size_bytes: int) -> None:
        assert size_bytes == SIZE_BYTES
        self._peer.send(per_tick)


def _compare_costs(bench: Bench, result: Result, kinds: dict[str, PeerKind]) -> None:
    clients = bench.crowd(MANY)
    ticks = max(5, bench.work(MANY_DELIVERIES) // clients)
    case = f"one room of {clients:,}, {{}}"
    costs_us: dict[str, float] = {}
    for name in bench.shuffled("send()", *kinds):
        try:
            with ExitStack() as stack:
                subject: Subject
                if name == "send()":
                    subject = FloorSubject(bench, clients, stack)
                else:
                    subject = _PeerSubject(kinds[name](bench, stack))
                    subject.load.open(clients)
                costs_us[name] = delivery_cost(subject, clients, ticks, 1, SIZE_BYTES).server_us
        except (Violation, ProgramFailed, NotReady, OSError) as error:
            if name in (Tidegate.name, "send()"):
                raise
            result.notes.append(f"{case.format(name)}: {error}")
            costs_us[name] = math.nan
    for name in ("send()", *kinds):
        result.add(case.format(name), "CPU per delivery, µs", costs_us[name])
        result.add(case.format(name), "x send()", costs_us[name] / costs_us["send()"])
