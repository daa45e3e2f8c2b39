"""On what was measured: the machine and the versions of all that took part."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psycopg
import redis

from benchmarks.native import compiler

PACKAGES = (
    *("tidegate", "uvicorn", "uvloop", "starlette", "websockets", "httptools"),
    *("psycopg", "redis", "hiredis", "msgspec", "msgpack", "joserfc"),
)


def facts(dsn: str, redis_url: str, cores: int) -> dict[str, str]:
    """What to know of this run, by name. ``cores``: how many it may use."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT version(), current_setting('fsync')").fetchone()
    assert row is not None
    with redis.Redis.from_url(redis_url) as client:
        server = client.info("server")
    redis_name = server.get("server_name", "redis")
    redis_version = server.get(f"{redis_name}_version", server["redis_version"])
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "processor": _processor(),
        "cores": str(cores),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "load average at the start": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "compiler": _first_line([*compiler(), "--version"]),
        "postgres server": f"{row[0].split(',')[0]}, fsync {row[1]}",
        "redis server": f"{redis_name} {redis_version}",
        **{f"package {name}": _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    said = _first_line(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"])
    return said or "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0]
