"""Memory of idle connections, and how long a full garbage collection stops the gateway.

RSS of a gateway before and after so many idle connections, each with one subscription, came to 100
rooms; per connection. Each run has a fresh gateway that has seen a hundred clients before. Then
one full collection of Python's garbage collector, which stops the gateway. Buffers in the kernel
are not in it.
"""

from benchmarks.bench import Bench
from benchmarks.figures import Result, at_most
from benchmarks.load import Load
from benchmarks.processor import rss_bytes

CONNECTIONS = 10_000
ROOMS = 100
BEFORE = 100
"""Connections that are there when RSS is taken first: code and caches are loaded."""


def run(bench: Bench, result: Result) -> None:
    count = bench.crowd(CONNECTIONS)
    case = f"{count:,} connections"
    for _ in bench.runs():
        with bench.servers.installation() as installed:
            installed.relay(bench.cores.rest)
            gateway = installed.gateway(bench.cores.server)
            with Load(gateway.port, bench.cores.load, rooms=ROOMS) as load:
                load.open(BEFORE)
                before_bytes = rss_bytes(gateway.pid)
                load.open(count)
                assert load.report()["open"] == BEFORE + count
                each_bytes = (rss_bytes(gateway.pid) - before_bytes) / count
                found = gateway.probe()
        result.add(case, "RSS each, bytes", each_bytes, at_most(6 * 1024))
        result.add(case, "full collection, ms", 1e3 * found["gc_s"], at_most(100))
        result.add(case, "objects that it visits", found["objects"])
        result.add(case, "RSS before, MB", before_bytes / 1e6)
