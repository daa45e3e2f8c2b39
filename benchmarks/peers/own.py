"""What one builds from Postgres or Redis alone, and Tidegate itself."""

from contextlib import ExitStack
from itertools import islice

import psycopg
import redis

from benchmarks.bench import Bench
from benchmarks.broadcaster import Broadcaster
from benchmarks.delivery import in_turn
from benchmarks.load import Load
from benchmarks.peers.peer import ROOM, SIZE_BYTES, texts
from benchmarks.starlette_app import CHANNEL
from benchmarks.writer import Writer


class Tidegate:
    """Outbox, relay, gateway."""

    name = "tidegate"

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        installed = stack.enter_context(bench.servers.installation())
        installed.relay(bench.cores.all)
        gateway = installed.gateway(bench.cores.server)
        self.pid = gateway.pid
        self.load = stack.enter_context(Load(gateway.port, bench.cores.load))
        self._writer = stack.enter_context(Writer(installed.dsn, SIZE_BYTES))
        self._rooms = in_turn([ROOM])

    def send(self, count: int) -> None:
        self._writer.commit(self._rooms(count))


class SendText:
    """A Starlette application that is told the texts by a pipe."""

    name = "send_text"

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        self._application = stack.enter_context(Broadcaster(bench.cores.server))
        self.pid = self._application.pid
        self.load = _load(self._application, bench, stack)
        self._texts = texts()

    def send(self, count: int) -> None:
        self._application.send([text.encode() for text in islice(self._texts, count)])


class Notify:
    """pg_notify and LISTEN."""

    name = "NOTIFY"

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        dsn = bench.servers.postgres.dsn()
        application = stack.enter_context(Broadcaster(bench.cores.server, "notify", dsn))
        self.pid = application.pid
        self.load = _load(application, bench, stack)
        self._texts = texts()
        self._connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))

    def send(self, count: int) -> None:
        self._connection.execute(
            "SELECT pg_notify(%s, text) FROM unnest(%s::text[]) AS text",
            (CHANNEL, list(islice(self._texts, count))),
        )


class PubSub:
    """PUBLISH and SUBSCRIBE."""

    name = "Pub/Sub"

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        url = bench.servers.redis.url
        application = stack.enter_context(Broadcaster(bench.cores.server, "pubsub", url))
        self.pid = application.pid
        self.load = _load(application, bench, stack)
        self._texts = texts()
        self._client = stack.enter_context(redis.Redis.from_url(url))

    def send(self, count: int) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for text in islice(self._texts, count):
            pipeline.publish(CHANNEL, text)
        pipeline.execute()


def _load(application: Broadcaster, bench: Bench, stack: ExitStack) -> Load:
    load = Load(application.port, bench.cores.load, path="/", protocol="greeted")
    return stack.enter_context(load)
