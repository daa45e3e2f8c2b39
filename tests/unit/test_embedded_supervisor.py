"""The supervisor with processes that do nothing, live and die."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.embedded.process import ChildProcess
from gateway.embedded.supervisor import NotReady, ProcessState, Supervisor, UnknownProcess
from tests.processes import wait_until

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]


class Watch:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.supervisor = Supervisor(self.lines.append)
        self.children: list[ChildProcess] = []

    def add(
        self, name: str, command: list[str], ready: Callable[[], bool] = lambda: True
    ) -> ChildProcess:
        child = ChildProcess(command)
        self.children.append(child)
        self.supervisor.add(name, "test", child, ready=ready)
        return child

    def state(self, name: str) -> ProcessState:
        return next(state for state in self.supervisor.states if state.name == name)


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.supervisor.stop_watching()
    for child in watch.children:
        child.kill()


def test_what_dies_is_started_again(watch: Watch) -> None:
    watch.add("one", SLEEPER)
    watch.supervisor.wait_ready(10)
    before = watch.state("one")
    assert (before.status, before.starts) == ("running", 1)
    watch.supervisor.crash("one")
    wait_until(lambda: watch.state("one").starts == 2)
    watch.supervisor.wait_ready(10)
    assert watch.state("one").pid != before.pid
    assert len(watch.lines) == 1
    assert watch.lines[0].startswith("one ended with signal 9; starts again in 0.")


def test_what_is_killed_stays_down_until_restarted(watch: Watch) -> None:
    watch.add("one", SLEEPER)
    watch.add("two", SLEEPER)
    watch.supervisor.kill("one")
    watch.supervisor.crash("two")
    # The other one's return shows that the supervisor has looked in the meantime.
    wait_until(lambda: watch.state("two").starts == 2)
    assert watch.state("one").status == "killed"
    assert watch.state("one").starts == 1
    watch.supervisor.wait_ready(10)
    watch.supervisor.restart("one")
    watch.supervisor.wait_ready(10)
    assert watch.state("one").status == "running"


def test_restart_of_one_that_runs(watch: Watch) -> None:
    child = watch.add("one", SLEEPER)
    pid = child.pid
    watch.supervisor.restart("one")
    watch.supervisor.wait_ready(10)
    assert child.pid != pid
    assert watch.lines == []


def test_ready_when_it_says_so(watch: Watch, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    watch.add("one", SLEEPER, ready=sign.exists)
    with pytest.raises(NotReady, match=r"one was not ready within 0\.3 s"):
        watch.supervisor.wait_ready(0.3)
    assert watch.state("one").status == "starting"
    sign.touch()
    watch.supervisor.wait_ready(10)
    assert watch.state("one").status == "running"


def test_one_that_never_stays_up(watch: Watch) -> None:
    watch.add("one", [sys.executable, "-c", "raise SystemExit(3)"], ready=lambda: False)
    with pytest.raises(NotReady, match="one ended 4 times"):
        watch.supervisor.wait_ready(30)
    assert watch.lines[0].startswith("one ended with status 3; starts again in ")


def test_unknown_name_is_told_with_the_known_ones(watch: Watch) -> None:
    watch.add("one", SLEEPER)
    with pytest.raises(UnknownProcess, match="no process 'three': there are one"):
        watch.supervisor.kill("three")


def test_a_stopped_process_can_be_restarted(watch: Watch) -> None:
    child = watch.add("one", SLEEPER)
    child.signal(signal.SIGSTOP)
    watch.supervisor.restart("one")
    watch.supervisor.wait_ready(10)
