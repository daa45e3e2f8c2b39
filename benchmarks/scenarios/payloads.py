"""Large and small payloads.

1,000 clients in one room get messages of 64 B to 100 KB, two under way at a time: as fast as they
go. Meanwhile 100 clients of another room get 20 messages a second; their p99.
"""

import time
from contextlib import ExitStack

from benchmarks.bench import Bench
from benchmarks.delivery import Background, in_turn
from benchmarks.figures import Result
from benchmarks.load import Load
from benchmarks.processor import cpu_s
from benchmarks.writer import Writer

CLIENTS = 1_000
MESSAGES = {64: 400, 1_024: 400, 10_240: 150, 102_400: 30}
"""By size."""
UNDER_WAY = 2
OTHERS = 100
OTHERS_PER_S = 20
TIMEOUT_S = 120.0


def run(bench: Bench, result: Result) -> None:
    clients = bench.crowd(CLIENTS)
    with ExitStack() as stack:
        installed = stack.enter_context(bench.servers.installation())
        installed.relay(bench.cores.rest)
        gateway = installed.gateway(bench.cores.server)
        load = stack.enter_context(Load(gateway.port, bench.cores.load))
        load.open(clients)
        others = stack.enter_context(Load(gateway.port, bench.cores.load, prefix="other:"))
        others.open(OTHERS)
        writer = stack.enter_context(Writer(installed.dsn))
        calm = stack.enter_context(Writer(installed.dsn))
        for _ in bench.runs():
            for size_bytes, wanted in MESSAGES.items():
                case = f"{size_bytes:,} B to {clients:,} clients"
                messages = bench.work(wanted, UNDER_WAY + 2)
                writer.size_bytes = size_bytes
                load.mark()
                others.mark()
                before_s, started = cpu_s(gateway.pid), time.monotonic()
                with Background(
                    calm, OTHERS_PER_S, rows=1, rooms=in_turn(others.rooms)
                ) as background:
                    for sent in range(1, messages + 1):
                        writer.commit(load.rooms)
                        if sent >= UNDER_WAY:
                            load.reach(clients * (sent - UNDER_WAY + 1), TIMEOUT_S)
                    load.reach(clients * messages, TIMEOUT_S)
                    elapsed_s = time.monotonic() - started
                    used_s = cpu_s(gateway.pid) - before_s
                others.reach(background.pace.messages * OTHERS)
                report = load.report()
                assert report["deliveries"] == clients * messages
                result.add(case, "MB/s", report["bytes"] / elapsed_s / 1e6)
                result.add(case, "deliveries/s", report["deliveries"] / elapsed_s)
                result.add(case, "gateway, % CPU", 100 * used_s / elapsed_s)
                result.add(case, "gateway, ms CPU per MB", 1e9 * used_s / report["bytes"])
                p99_ms = others.report().every_latency.percentile_ms(99)
                result.add(case, "others' p99, ms", p99_ms)
