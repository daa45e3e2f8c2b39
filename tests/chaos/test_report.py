"""What a report says, and that a bad run cannot look like a good one."""

import json
from dataclasses import replace

import pytest

from tests.chaos.report import Delivery, Injected, Report, Stall, calm, sort_of, stall_of
from tests.chaos.schedule import Fault
from tests.chaos.trial import Verdict
from tests.oracle import Fault as Wrong
from tests.oracle import Violation

FREEZE = Fault(10.0, "freeze", "relay-2 to redis", 5.0, 1)
GOOD = Verdict(100, 400, 7, 1, (), ())
REPORT = Report(
    seed=7,
    duration_s=60.0,
    injected=(Injected(FREEZE, 10.1, 15.2),),
    deliveries=(Delivery(1.0, 1.01), Delivery(11.0, 14.0), Delivery(16.0, 16.5)),
    reconnects=3,
    recoveries=9,
    not_recovered=0,
    prepared=2,
    restarts=1,
    verdict=GOOD,
    troubles=(),
)


def test_stalls() -> None:
    assert stall_of(REPORT.injected[0], REPORT.deliveries) == Stall(3.0, pytest.approx(1.3))
    assert REPORT.stalls() == {"freeze of relay to redis": (1, Stall(3.0, pytest.approx(1.3)))}
    assert calm(REPORT.deliveries, REPORT.injected) == pytest.approx(0.01)


def test_sorts_of_targets() -> None:
    assert sort_of("gateway-12 to postgres") == "gateway to postgres"
    assert sort_of("relay-1") == "relay"
    assert sort_of("some clients") == "some clients"


def test_a_good_run() -> None:
    assert REPORT.good
    assert "**Good.**" in REPORT.markdown()
    assert json.loads(REPORT.json())["good"] is True


@pytest.mark.parametrize(
    "bad",
    [
        replace(REPORT, troubles=("relay-1 has ended with 1",)),
        replace(REPORT, verdict=replace(GOOD, unsettled=("client-1 lacks a message",))),
        replace(
            REPORT,
            verdict=replace(
                GOOD, violations=(Violation(Wrong.HOLE, ("acme", "orders:1"), "client-1", "5"),)
            ),
        ),
    ],
)
def test_a_bad_run(bad: Report) -> None:
    assert not bad.good
    assert "**VIOLATIONS.**" in bad.markdown()
    assert "## What was wrong" in bad.markdown()
    assert json.loads(bad.json())["good"] is False
