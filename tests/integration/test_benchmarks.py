"""The benchmarks measure what they say: exact counts, violations noticed, a report at the end.

No figure is looked at: how fast it is depends on the machine.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import native
from benchmarks.floor import Floor
from benchmarks.load import Load, Protocol, Violation
from benchmarks.peers import centrifugo, nats, socketio
from benchmarks.scenarios import PEERS, SCENARIOS
from benchmarks.writer import payload
from gateway.protocols.centrifuge_json import CentrifugeJSON
from gateway.room import encode
from outbox.message import Message
from tests.conftest import SOURCE
from tests.requirements import lacking

ROOT = Path(__file__).parents[2]
ROOM = "room:0"
CLIENTS = 20
ANYWHERE = frozenset(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _compiler() -> None:
    try:
        native.compiler()
    except native.NoCompiler as error:
        lacking("cc", str(error))


class Wire:
    """Clients of a server that sends just what the test says."""

    def __init__(self, stack: ExitStack, protocol: Protocol = "plain") -> None:
        self._floor = stack.enter_context(Floor(ANYWHERE))
        load = Load(self._floor.port, ANYWHERE, path="/", protocol=protocol)
        self.load = stack.enter_context(load)
        self._floor.accept(CLIENTS)
        self.load.begin(CLIENTS)
        self._floor.accepted()
        if protocol == "plain":
            self.load.opened()

    def send(self, *offsets: int, size_bytes: int = 100, room: str = ROOM) -> None:
        """Messages to each client, joined as the gateway joins those of one read."""
        text = payload(size_bytes, time.monotonic_ns())
        messages = [
            Message(0, 0, "default", room, offset, "", "1", None, text, False, 0)
            for offset in offsets
        ]
        self._floor.send(encode(CentrifugeJSON(), room, messages))

    def send_bytes(self, frames: bytes) -> None:
        self._floor.send(frames)

    def report_until_violation(self) -> None:
        """What is sent beside messages is not counted, so that nothing tells of its arrival."""
        while True:
            self.load.report()


@pytest.fixture
def wire_of() -> Iterator[Callable[[Protocol], Wire]]:
    with ExitStack() as stack:
        yield lambda protocol: Wire(stack, protocol)


@pytest.fixture
def wire(wire_of: Callable[[Protocol], Wire]) -> Wire:
    return wire_of("plain")


def test_all_deliveries_are_counted(wire: Wire) -> None:
    wire.send(1)
    wire.send(2, 3, 4)
    wire.send(5)
    wire.load.reach(5 * CLIENTS)
    report = wire.load.report()
    assert report["deliveries"] == 5 * CLIENTS
    assert report["open"] == CLIENTS
    assert (report["lowest"], report["highest"]) == (5, 5)
    assert len(report.every_latency) == 5 * CLIENTS
    assert report.every_latency.percentile_ms(100) < 60_000
    assert len(report.joins) == CLIENTS


def test_frames_of_every_size_and_in_pieces(wire: Wire) -> None:
    wire.load.mark()
    sizes = (64, 100, 300, 65_000, 66_000, 1_000_000)
    for offset, size_bytes in enumerate(sizes, 1):
        wire.send(offset, size_bytes=size_bytes)
    wire.load.reach(len(sizes) * CLIENTS)
    assert wire.load.report()["bytes"] > sum(sizes) * CLIENTS


def test_a_mark_begins_anew(wire: Wire) -> None:
    wire.send(1)
    wire.load.reach(CLIENTS)
    wire.load.mark()
    wire.send(2)
    wire.load.reach(CLIENTS)
    report = wire.load.report()
    assert (report["deliveries"], report["highest"]) == (CLIENTS, 2)


@pytest.mark.parametrize(
    ("offsets", "what"),
    [((1, 3), "holes"), ((1, 1), "duplicates"), ((2,), "holes"), ((1, 2, 3, 2), "duplicates")],
)
def test_a_break_of_the_order_is_noticed(wire: Wire, offsets: tuple[int, ...], what: str) -> None:
    wire.send(*offsets)
    wire.load.reach(len(offsets) * CLIENTS)
    with pytest.raises(Violation, match=rf"\b{CLIENTS} {what}\b"):
        wire.load.report()


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        (b"\x81\x0bnot a reply", "errors"),
        (b'\x81\x27{"push":{"channel":"other:1","pub":{}}}', "strange"),
        (b"\x88\x02\x0b\xb9", "close frame 3001"),
    ],
)
def test_what_is_not_expected_is_noticed(wire: Wire, frames: bytes, what: str) -> None:
    wire.send_bytes(frames)
    with pytest.raises(Violation, match=what):
        wire.report_until_violation()


def test_those_who_pause_get_it_when_they_read_on(wire: Wire) -> None:
    wire.load.pause(5)
    wire.send(1)
    wire.load.reach(CLIENTS - 5)
    report = wire.load.report()
    assert (report["lowest"], report["highest"]) == (0, 1)
    wire.load.unpause()
    wire.load.reach(CLIENTS)
    assert wire.load.report()["lowest"] == 1


def text_of(offset: int) -> bytes:
    """A message as the peers send it."""
    frame = encode(CentrifugeJSON(), ROOM, [message_at(offset)])
    return frame[frame.index(b"{") :]


def message_at(offset: int) -> Message:
    text = payload(100, time.monotonic_ns())
    return Message(0, 0, "default", ROOM, offset, "", "1", None, text, False, 0)


def framed(data: bytes, opcode: int = 1) -> bytes:
    assert len(data) < 65_536
    size = bytes([len(data)]) if len(data) < 126 else b"\x7e" + len(data).to_bytes(2, "big")
    return bytes([0x80 | opcode]) + size + data


def test_who_is_greeted_is_there(wire_of: Callable[[Protocol], Wire]) -> None:
    wire = wire_of("greeted")
    assert wire.load.report()["open"] == 0
    wire.send_bytes(framed(b"{}"))
    wire.load.opened()
    wire.send(1, 2)
    wire.load.reach(2 * CLIENTS)
    report = wire.load.report()
    assert (report["open"], report["deliveries"], report["pings"]) == (CLIENTS, 2 * CLIENTS, 0)


def test_events_of_socketio(wire_of: Callable[[Protocol], Wire]) -> None:
    wire = wire_of("socketio")
    wire.send_bytes(framed(b'0{"sid":"a","upgrades":[],"pingInterval":25000}'))
    wire.send_bytes(framed(b'40{"sid":"b"}'))
    wire.load.opened()
    wire.send_bytes(framed(b"2") + framed(b'42["news",%b]' % text_of(1)))
    wire.load.reach(CLIENTS)
    report = wire.load.report()
    assert (report["deliveries"], report["pings"], report["highest"]) == (CLIENTS, CLIENTS, 1)
    wire.send_bytes(framed(b'44{"message":"no"}'))
    with pytest.raises(Violation, match=f"{CLIENTS} strange.*44"):
        wire.report_until_violation()


def nats_message(offset: int) -> bytes:
    text = text_of(offset)
    return b"MSG %b 1 %d\r\n%b\r\n" % (ROOM.encode(), len(text), text)


@pytest.mark.parametrize("size", [1, 7, 100, 60_000])
def test_messages_of_nats_in_frames_that_end_anywhere(
    wire_of: Callable[[Protocol], Wire], size: int
) -> None:
    wire = wire_of("nats")
    wire.send_bytes(framed(b'INFO {"server_id":"a"}\r\nPONG\r\n', 2))
    wire.load.opened()
    stream = b"PING\r\n" + b"".join(map(nats_message, range(1, 6))) + b"PING\r\n" + nats_message(6)
    for start in range(0, len(stream), size):
        wire.send_bytes(framed(stream[start : start + size], 2))
    wire.load.reach(6 * CLIENTS)
    report = wire.load.report()
    assert (report["deliveries"], report["pings"]) == (6 * CLIENTS, 2 * CLIENTS)
    assert (report["lowest"], report["highest"]) == (6, 6)


def test_an_error_of_nats_is_noticed(wire_of: Callable[[Protocol], Wire]) -> None:
    wire = wire_of("nats")
    wire.send_bytes(framed(b"-ERR 'Authorization Violation'\r\n", 2))
    with pytest.raises(Violation, match=f"{CLIENTS} errors.*Authorization Violation"):
        wire.report_until_violation()


def test_losses_may_be_allowed(wire: Wire) -> None:
    wire.send(1, 3)
    wire.load.reach(2 * CLIENTS)
    assert wire.load.report(allowed=["holes"])["holes"] == CLIENTS
    with pytest.raises(Violation, match="holes"):
        wire.load.report(allowed=["closed"])


@pytest.mark.parametrize("module", [socketio, nats, centrifugo])
def test_a_peer_says_what_it_lacks(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(centrifugo, "PROGRAM", tmp_path / "centrifugo")
    reason = module.lacking()
    assert re.search(r"Node\.js is not|nats-server is not|no Go toolchain", reason)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(native.NoCompiler, match=r"no-such-compiler.*apt-get install gcc"):
        native.compiler()


@pytest.mark.parametrize("name", [*SCENARIOS, *PEERS])
def test_each_scenario_tells_what_it_measures(name: str) -> None:
    scenario = importlib.import_module(f"benchmarks.scenarios.{name}")
    assert scenario.__doc__
    assert callable(scenario.run)


def run_benchmarks(*arguments: str, output: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks", *arguments),
            *("--servers", SOURCE, "--output", str(output)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_a_report_is_made(tmp_path: Path) -> None:
    names = ("fanout", "resume", "storage")
    done = run_benchmarks(*names, "--smoke", "--seed", "7", output=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(tmp_path / "report.md") in done.stdout
    said = json.loads((tmp_path / "report.json").read_text())
    assert said["facts"]["seed"] == "7"
    # Though the benchmark has bound itself to fewer by then.
    assert said["facts"]["cores"] == str(len(ANYWHERE))
    assert [scenario["name"] for scenario in said["scenarios"]] == [*names]
    for scenario in said["scenarios"]:
        assert scenario["notes"] == []
        assert scenario["figures"]
        for figure in scenario["figures"]:
            assert len(figure["samples"]) == 1
            assert figure["median"] is not None
    page = (tmp_path / "report.md").read_text()
    assert all(f"## {name}" in page for name in names)
