"""The benchmarks measure what they say: exact counts, violations noticed, a report at the end.

No figure is looked at: how fast it is depends on the machine.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks import native
from benchmarks.floor import Floor
from benchmarks.load import Load, Violation
from benchmarks.scenarios import SCENARIOS
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

    def __init__(self, stack: ExitStack) -> None:
        self._floor = stack.enter_context(Floor(ANYWHERE))
        self.load = stack.enter_context(Load(self._floor.port, ANYWHERE, path="/", protocol="plain"))
        self._floor.accept(CLIENTS)
        self.load.open(CLIENTS)
        self._floor.accepted()

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
def wire() -> Iterator[Wire]:
    with ExitStack() as stack:
        yield Wire(stack)


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


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(native.NoCompiler, match=r"no-such-compiler.*apt-get install gcc"):
        native.compiler()


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_scenario_tells_what_it_measures(name: str) -> None:
    scenario = importlib.import_module(f"benchmarks.scenarios.{name}")
    assert scenario.__doc__
    assert callable(scenario.run)


def test_a_report_is_made(tmp_path: Path) -> None:
    names = ("fanout", "resume")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks", *names, "--smoke", "--seed", "7"),
            *("--servers", SOURCE, "--output", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(tmp_path / "report.md") in done.stdout
    said = json.loads((tmp_path / "report.json").read_text())
    assert said["facts"]["seed"] == "7"
    assert [scenario["name"] for scenario in said["scenarios"]] == [*names]
    for scenario in said["scenarios"]:
        assert scenario["notes"] == []
        assert scenario["figures"]
        for figure in scenario["figures"]:
            assert len(figure["samples"]) == 1
            assert figure["median"] is not None
    page = (tmp_path / "report.md").read_text()
    assert all(f"## {name}" in page for name in names)
