"""Coming: handshake, token and subscription.

Clients that open a connection, authenticate with a token of their own (JWT, HS256) and subscribe
to one of 50 rooms; the two commands in one frame, as SDKs send them. Clients for each second of
the gateway's CPU time; then by the clock, and how long each takes from the TCP connect to the
reply to its subscription.
"""

from benchmarks.bench import Bench
from benchmarks.figures import Result, at_least
from benchmarks.load import Load
from benchmarks.processor import cpu_s

CLIENTS = 3_000
ROOMS = 50
TOGETHER = (1, 64)
"""Clients that are on their way in at one time."""
WARM = 50


def run(bench: Bench, result: Result) -> None:
    count = bench.work(CLIENTS, 20)
    with bench.servers.installation() as installed:
        installed.relay(bench.cores.rest)
        gateway = installed.gateway(bench.cores.server)
        tokens = [installed.token(f"user-{number}") for number in range(count + WARM)]
        for _ in bench.runs():
            for together in TOGETHER:
                case = f"{together} at a time"
                with Load(
                    gateway.port, bench.cores.load, rooms=ROOMS, tokens=tokens, opening=together
                ) as load:
                    load.open(WARM)
                    load.mark()
                    before_s = cpu_s(gateway.pid)
                    load.open(count)
                    used_s = cpu_s(gateway.pid) - before_s
                    report = load.report()
                assert report["open"] == count + WARM
                elapsed_s = report["elapsed_ns"] / 1e9
                result.add(case, "clients per CPU second", count / used_s, at_least(2_000))
                result.add(case, "clients/s", count / elapsed_s)
                result.add(case, "p50, ms", report.joins.percentile_ms(50))
                result.add(case, "p99, ms", report.joins.percentile_ms(99))
