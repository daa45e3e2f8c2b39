"""The gateway with a window: ``python -m benchmarks.host gateway …`` is ``tidegate gateway …``.

On SIGUSR2 it does a full garbage collection and writes to the file that TIDEGATE's environment
does not know, ``BENCHMARK_PROBE``, how long that took and how many reads of history there were so
far in Redis and in Postgres. Nothing that a delivery passes through is touched.
"""

import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from outbox.log import Log
from outbox.streams import Streams

P = ParamSpec("P")
T = TypeVar("T")
reads: Counter[str] = Counter()


def counted(name: str, read: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """The same method, counting its calls."""

    @wraps(read)
    async def reading(*args: P.args, **kwargs: P.kwargs) -> T:
        reads[name] += 1
        return await read(*args, **kwargs)

    return reading


def show(*_: Any) -> None:
    """Write the figures, in one piece."""
    before_s = time.perf_counter()
    gc.collect()
    figures = {"gc_s": time.perf_counter() - before_s, "objects": len(gc.get_objects()), **reads}
    path = Path(os.environ["BENCHMARK_PROBE"])
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(figures))
    unfinished.rename(path)


def main() -> int:
    for owner, names, store in (
        (Streams, ("replay", "latest"), "redis"),
        (Log, ("page", "latest", "span"), "postgres"),
    ):
        for name in names:
            setattr(owner, name, counted(store, getattr(owner, name)))
    signal.signal(signal.SIGUSR2, show)
    from gateway.__main__ import main as run  # noqa: PLC0415  what is counted comes first

    return run()


if __name__ == "__main__":
    sys.exit(main())
