"""Several gateway processes on one port.

2,000 clients in one room, 100 B, one message and eight messages a tick: CPU per delivery of one
gateway process, and of two workers together (`tidegate gateway --workers 2`), which share the port
and the same core here. What each worker must do for itself, like reading the stream, is done twice.
"""

from contextlib import ExitStack
from typing import cast

import redis

from benchmarks.bench import Bench
from benchmarks.figures import Result, at_most
from benchmarks.load import Load
from benchmarks.processor import cpu_of_family_s, pin
from benchmarks.servers import Installation, wait_until
from benchmarks.writer import Writer
from outbox import keys

CLIENTS = 2_000
WORKERS = {"one worker": 1, "two workers": 2}
PER_TICK = (1, 8)
DELIVERIES = 200_000
WARM_TICKS = 3


class Workers:
    """A gateway of so many processes, with its clients in a room of their own."""

    def __init__(
        self, bench: Bench, installed: Installation, workers: int, clients: int, stack: ExitStack
    ) -> None:
        with redis.Redis.from_url(installed.redis_url) as client:
            wanted = cast(int, client.hlen(keys.GATEWAYS)) + workers
            gateway = installed.gateway(bench.cores.server, TIDEGATE_WORKERS=str(workers))
            wait_until(lambda: client.hlen(keys.GATEWAYS) == wanted, "start of all workers")
        pin(gateway.pid, bench.cores.server)
        self.pid = gateway.pid
        self.load = stack.enter_context(
            Load(gateway.port, bench.cores.load, prefix=f"of-{workers}:")
        )
        self.load.open(clients)
        self.writer = stack.enter_context(Writer(installed.dsn))

    def tick(self, per_tick: int) -> None:
        """Publish so many messages to the clients' room."""
        self.writer.commit(self.load.rooms * per_tick)


def run(bench: Bench, result: Result) -> None:
    clients = bench.crowd(CLIENTS)
    with ExitStack() as stack:
        installed = stack.enter_context(bench.servers.installation())
        installed.relay(bench.cores.rest)
        gateways = {
            name: Workers(bench, installed, count, clients, stack)
            for name, count in WORKERS.items()
        }
        for _ in bench.runs():
            for per_tick in PER_TICK:
                ticks = max(5, bench.work(DELIVERIES) // (clients * per_tick))
                cost_us = {
                    name: _cost_us(gateways[name], clients, ticks, per_tick)
                    for name in bench.shuffled(*WORKERS)
                }
                case = f"{clients:,} clients, {per_tick} a tick"
                for name in WORKERS:
                    result.add(case, f"{name}, µs", cost_us[name])
                one, two = (cost_us[name] for name in WORKERS)
                result.add(case, "ratio", two / one, at_most(1.1))


def _cost_us(workers: Workers, clients: int, ticks: int, per_tick: int) -> float:
    for _ in range(WARM_TICKS):
        workers.load.mark()
        workers.tick(per_tick)
        workers.load.reach(clients * per_tick)
    workers.load.mark()
    before_s = cpu_of_family_s(workers.pid)
    for tick in range(1, ticks + 1):
        workers.tick(per_tick)
        workers.load.reach(clients * per_tick * tick)
    used_s = cpu_of_family_s(workers.pid) - before_s
    report = workers.load.report()
    assert report["deliveries"] == clients * per_tick * ticks
    return 1e6 * used_s / report["deliveries"]
