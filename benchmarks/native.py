"""The C programs, compiled when they are needed."""

import os
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

SOURCES = Path(__file__).parent / "c"
PROGRAMS = {
    "floor": ("floor.c",),
    "load": ("load.c", "sockets.c", "centrifuge.c", "socketio.c", "nats.c", "tally.c"),
}
FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra")
COMPILE_TIMEOUT_S = 120


class NoCompiler(Exception):
    """There is no C compiler. One line with the remedy."""


def compiler() -> list[str]:
    """The command of the C compiler: ``$CC``, else ``cc``. Raises NoCompiler."""
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    path = shutil.which(command[0])
    if path is None:
        raise NoCompiler(
            f"no C compiler ({command[0]}) found: install one with the system's package manager "
            "(Debian: apt-get install gcc libc6-dev) or name one in CC"
        )
    return [path, *command[1:]]


@cache
def compiled(name: str) -> Path:
    """A program of ``PROGRAMS``, made once for this process. Raises NoCompiler."""
    program = Path(_folder()) / name
    done = subprocess.run(
        [*compiler(), *FLAGS, "-o", program, *(SOURCES / source for source in PROGRAMS[name])],
        capture_output=True,
        text=True,
        timeout=COMPILE_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise NoCompiler(f"{name} cannot be compiled: {done.stderr.strip()[:2000]}")
    return program


@cache
def _folder() -> str:
    folder = mkdtemp(prefix="tidegate-bench-")
    import atexit  # noqa: PLC0415  only where a folder was made

    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
