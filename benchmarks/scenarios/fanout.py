"""Messages of one room to many clients: the gateway beside a C loop and Starlette's send_text.

CPU time of the server process per delivery, user and system, with all clients in one room. A tick
is one transaction of 1 or 8 messages; the next follows when every client has all of it. The floor
is one thread in C that calls send() for each client with the same bytes (one frame a tick); the
peer is a Starlette application that awaits send_text for each client and message. All three are
alone on a core of their own and serve the same load client; they take turns in each run, in random
order. The gateway's CPU time includes the reading of the stream.

On one machine a send wakes the receiver, if it sleeps, and that is charged to the sender: this is
most of the floor. In the cases marked "unwoken" the load looks for arrivals each 0.2 ms instead, so
that what is left is what a server pays whose clients are elsewhere; they have no targets.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, Protocol

from benchmarks.bench import Bench
from benchmarks.broadcaster import Broadcaster
from benchmarks.figures import Result, at_most
from benchmarks.floor import Floor
from benchmarks.load import PREFIX, Load
from benchmarks.processor import cpu_s
from benchmarks.servers import TENANT
from benchmarks.writer import Writer, payload
from gateway.protocols.centrifuge_json import CentrifugeJSON
from gateway.room import encode
from outbox.message import Message

ROOM = f"{PREFIX}0"
CLIENTS = (1_000, 5_000)
SIZES_BYTES = (100, 1_024)
PER_TICK = (1, 8)
DELIVERIES = 200_000
"""In one run of one subject."""
TARGETS = {1: (1.3, 0.6), 8: (1.7, 0.12)}
"""Messages a tick → most that the gateway may cost as a multiple of the floor and of the peer."""
WARM_TICKS = 3
LOOK_US = 200
_PROTOCOL = CentrifugeJSON()


class Subject(Protocol):
    """What is measured."""

    pid: int
    load: Load

    def tick(self, per_tick: int, size_bytes: int) -> None:
        """Have so many messages sent to every client."""
        ...


class GatewaySubject:
    """The whole pipeline; its gateway is what is measured."""

    def __init__(self, bench: Bench, clients: int, stack: ExitStack) -> None:
        installed = stack.enter_context(bench.servers.installation())
        installed.relay(bench.cores.rest)
        gateway = installed.gateway(bench.cores.server)
        self.pid = gateway.pid
        self.load = stack.enter_context(Load(gateway.port, bench.cores.load))
        self.load.open(clients)
        self._writer = stack.enter_context(Writer(installed.dsn))

    def tick(self, per_tick: int, size_bytes: int) -> None:
        self._writer.size_bytes = size_bytes
        self._writer.commit([ROOM] * per_tick)


class _Encoded:
    """Messages as the gateway would encode them, for those who cannot."""

    def __init__(self) -> None:
        self._offset = 0

    def messages(self, per_tick: int, size_bytes: int) -> list[Message]:
        text = payload(size_bytes, time.monotonic_ns())
        first = self._offset + 1
        self._offset += per_tick
        return [
            Message(0, 0, TENANT, ROOM, offset, "", "12345", None, text, False, 0)
            for offset in range(first, first + per_tick)
        ]


class FloorSubject:
    """The loop in C."""

    def __init__(self, bench: Bench, clients: int, stack: ExitStack) -> None:
        self._floor = stack.enter_context(Floor(bench.cores.server))
        self._encoded = _Encoded()
        self.pid = self._floor.pid
        self.load = _load(self._floor.port, "plain", bench, stack)
        self._floor.accept(clients)
        self.load.open(clients)
        self._floor.accepted()

    def tick(self, per_tick: int, size_bytes: int) -> None:
        messages = self._encoded.messages(per_tick, size_bytes)
        self._floor.send(encode(_PROTOCOL, ROOM, messages))


class SendTextSubject:
    """The Starlette application."""

    def __init__(self, bench: Bench, clients: int, stack: ExitStack) -> None:
        self._broadcaster = stack.enter_context(Broadcaster(bench.cores.server))
        self._encoded = _Encoded()
        self.pid = self._broadcaster.pid
        self.load = _load(self._broadcaster.port, "greeted", bench, stack)
        self.load.open(clients)

    def tick(self, per_tick: int, size_bytes: int) -> None:
        messages = self._encoded.messages(per_tick, size_bytes)
        self._broadcaster.send(
            [_PROTOCOL.deliver(ROOM, _PROTOCOL.publication(message)) for message in messages]
        )


def _load(port: int, protocol: Literal["plain", "greeted"], bench: Bench, stack: ExitStack) -> Load:
    return stack.enter_context(Load(port, bench.cores.load, path="/", protocol=protocol))


def run(bench: Bench, result: Result) -> None:
    for wanted in CLIENTS:
        clients = bench.crowd(wanted)
        bench.say(f"{clients} clients")
        with ExitStack() as stack:
            subjects: dict[str, Subject] = {
                "gateway": GatewaySubject(bench, clients, stack),
                "send()": FloorSubject(bench, clients, stack),
                "send_text": SendTextSubject(bench, clients, stack),
            }
            for _ in bench.runs():
                for look_us in (0, LOOK_US):
                    for subject in subjects.values():
                        subject.load.look(look_us)
                    for size_bytes in SIZES_BYTES[:1] if look_us else SIZES_BYTES:
                        for per_tick in PER_TICK:
                            case = (
                                f"{clients:,} clients, {size_bytes:,} B, {per_tick} a tick"
                                f"{', unwoken' if look_us else ''}"
                            )
                            costs = _costs(bench, subjects, clients, size_bytes, per_tick)
                            targets = (None, None) if look_us else TARGETS[per_tick]
                            _compare(result, case, costs, targets)


def _costs(
    bench: Bench, subjects: dict[str, Subject], clients: int, size_bytes: int, per_tick: int
) -> "dict[str, Cost]":
    """Of each subject, measured in random order."""
    ticks = max(5, bench.work(DELIVERIES) // (clients * per_tick))
    return {
        name: delivery_cost(subjects[name], clients, ticks, per_tick, size_bytes)
        for name in bench.shuffled(*subjects)
    }


def _compare(
    result: Result,
    case: str,
    costs: "dict[str, Cost]",
    limits: tuple[float | None, float | None],
) -> None:
    cost_us = {name: costs[name].server_us for name in ("gateway", "send()", "send_text")}
    for name, us in cost_us.items():
        result.add(case, f"{name}, µs", us)
    for name, limit in zip(("send()", "send_text"), limits, strict=True):
        target = None if limit is None else at_most(limit)
        result.add(case, f"x {name}", cost_us["gateway"] / cost_us[name], target)
    result.add(case, "load, µs", costs["gateway"].load_us)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time per delivery."""

    server_us: float
    load_us: float


def delivery_cost(
    subject: Subject, clients: int, ticks: int, per_tick: int, size_bytes: int
) -> Cost:
    """What the deliveries of so many ticks cost. Each client gets each message."""
    for _ in range(WARM_TICKS):
        subject.load.mark()
        subject.tick(per_tick, size_bytes)
        subject.load.reach(clients * per_tick)
    subject.load.mark()
    before_s = cpu_s(subject.pid)
    for tick in range(1, ticks + 1):
        subject.tick(per_tick, size_bytes)
        subject.load.reach(clients * per_tick * tick)
    used_s = cpu_s(subject.pid) - before_s
    report = subject.load.report()
    assert report["deliveries"] == clients * per_tick * ticks
    deliveries = report["deliveries"]
    return Cost(1e6 * used_s / deliveries, report["cpu_ns"] / 1e3 / deliveries)
