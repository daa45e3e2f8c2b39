"""The relay: from the outbox to the log to the streams.

The outbox is filled before, 100 rows a transaction, in 1,000 rooms of 8 tenants, so that all
shards have some; then one relay starts. From the first message that is on a stream until all are.
Postgres and Redis share all cores with it. Messages a second by the clock, and for each second of
CPU time of the relay, of Postgres and of Redis.
"""

import time

import psycopg
import redis

from benchmarks.bench import Bench
from benchmarks.figures import Result, at_least
from benchmarks.processor import cpu_of_family_s, cpu_s
from benchmarks.servers import Installation, wait_until
from benchmarks.writer import payload
from outbox import keys

MESSAGES = 200_000
PER_TRANSACTION = 100
TENANTS = 8
ROOMS = 125
"""Of each tenant."""
SIZE_BYTES = 100
TIMEOUT_S = 300.0
FILL = """
INSERT INTO tidegate.outbox (tenant, room, payload)
SELECT 'tenant' || n %% %(tenants)s, 'room:' || n / %(tenants)s %% %(rooms)s, %(payload)s
FROM generate_series(%(first)s::int, %(last)s::int) AS n
"""


def run(bench: Bench, result: Result) -> None:
    messages = bench.work(MESSAGES, 1_000)
    case = f"{messages:,} messages of {SIZE_BYTES} B"
    with bench.spread():
        for _ in bench.runs():
            with bench.servers.installation() as installed:
                fill(installed, messages)
                _measure(bench, result, case, installed, messages)


def fill(installed: Installation, messages: int) -> None:
    """Commit so many messages to the outbox."""
    text = payload(SIZE_BYTES, 10**15).decode()
    with psycopg.connect(installed.dsn, autocommit=True) as connection:
        for first in range(0, messages, PER_TRANSACTION):
            last = min(first + PER_TRANSACTION, messages) - 1
            connection.execute(
                FILL,
                {
                    "tenants": TENANTS,
                    "rooms": ROOMS,
                    "payload": text,
                    "first": first,
                    "last": last,
                },
            )
        connection.execute("VACUUM ANALYZE tidegate.outbox")


class _Mark:
    """A moment: how far the relay is, and what it and its servers have used."""

    def __init__(self, messages: int, relay: int, postgres: int, redis_server: int) -> None:
        self.at_s = time.monotonic()
        self.messages = messages
        self.relay_s = cpu_s(relay)
        self.postgres_s = cpu_of_family_s(postgres)
        self.redis_s = cpu_s(redis_server)


def _measure(
    bench: Bench, result: Result, case: str, installed: Installation, messages: int
) -> None:
    postgres, server = bench.servers.postgres.pid, bench.servers.redis.pid
    with redis.Redis.from_url(installed.redis_url) as client:
        epoch = installed.query("SELECT epoch FROM tidegate.meta")
        shards = installed.query("SELECT shards FROM tidegate.meta")

        def appended() -> int:
            pipeline = client.pipeline(transaction=False)
            for shard in range(shards):
                pipeline.xinfo_stream(keys.bus(epoch, shard))
            answers = pipeline.execute(raise_on_error=False)
            return sum(
                int(str(answer["last-generated-id"].decode()).partition("-")[0])
                for answer in answers
                if isinstance(answer, dict)
            )

        relay = installed.relay(bench.cores.all)
        wait_until(lambda: appended() > 0, "the first message on a stream", TIMEOUT_S)
        start = _Mark(appended(), relay.pid, postgres, server)
        wait_until(lambda: appended() == messages, "the last message on a stream", TIMEOUT_S)
        end = _Mark(messages, relay.pid, postgres, server)
    moved = end.messages - start.messages
    result.add(case, "messages/s", moved / (end.at_s - start.at_s), at_least(20_000))
    result.add(
        case,
        "per CPU second of the relay",
        moved / (end.relay_s - start.relay_s),
        at_least(40_000),
    )
    result.add(case, "of Postgres", moved / (end.postgres_s - start.postgres_s))
    result.add(case, "of Redis", moved / (end.redis_s - start.redis_s))
