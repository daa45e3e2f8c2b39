"""What faults do to processes."""

import signal
import sys
from pathlib import Path

import pytest

from tests.processes import Processes, catches


@pytest.mark.skipif(sys.platform != "linux", reason="signals are looked up in /proc")
def test_whether_a_process_has_come_so_far_as_to_mind_a_signal(tmp_path: Path) -> None:
    processes = Processes(tmp_path / "processes")
    program = "import signal; {} print('there', flush=True); signal.pause()"
    handler = "signal.signal(signal.SIGTERM, lambda *_: exit(0));"
    try:
        for name, setup in (("minds", handler), ("does not", "")):
            process = processes.start_python(name, "-c", program.format(setup))
            process.wait_log("there")
            assert catches(process.pid, signal.SIGTERM) is bool(setup)
    finally:
        processes.stop()
