"""One address behind which another server answers: by DNS, a load balancer, a managed service."""

import asyncio
import secrets
import time
from collections.abc import Iterator

import pytest

from gateway.embedded import EmbeddedRedis
from tests.chaos.proxy import Link
from tests.integration.conftest import Stack, token
from tests.probe import until
from tests.processes import Processes
from tests.redis_setups import PASSWORD, order, readers
from tests.traffic import Traffic

FOUND_WITHIN_S = 12.0
"""The stated bound is 10."""


class Address:
    """What stands in the URL."""

    def __init__(self, port: int) -> None:
        self.url = f"redis://:{PASSWORD}@127.0.0.1:{port}/0"


def server(**settings: str) -> EmbeddedRedis:
    return EmbeddedRedis(settings={"masterauth": PASSWORD, **settings}, password=PASSWORD)


@pytest.fixture
def servers() -> Iterator[tuple[EmbeddedRedis, EmbeddedRedis]]:
    with server() as first, server(replicaof=f"127.0.0.1 {first.port}") as second:
        yield first, second


def start(dsn: str, address: Address, processes: Processes) -> Traffic:
    stack = Stack(dsn, address, processes)  # type: ignore[arg-type]
    stack.relay()
    rooms = [f"orders:{secrets.token_hex(4)}" for _ in range(12)]
    return Traffic(dsn, [stack.gateway()], rooms, token(now=time.time()))


async def test_a_demoted_server_that_stays_connected_is_left(
    servers: tuple[EmbeddedRedis, EmbeddedRedis], migrated: str, processes: Processes
) -> None:
    old, new = servers
    async with Link("redis", old.port) as link:
        running = await asyncio.to_thread(start, migrated, Address(link.port), processes)
        async with running as traffic:
            await traffic.more(100)
            # Connections stay open, and lead to a server that refuses every write.
            link.targets[:] = [new.port]
            order(new, "REPLICAOF", "NO", "ONE")
            order(old, "REPLICAOF", "127.0.0.1", new.port)
            await until(
                lambda: asyncio.to_thread(lambda: readers(new) == 1), "it reads the new one"
            )
            await traffic.more(200)
            await traffic.settle()
            assert readers(old) == 0


async def test_the_successor_lags_by_many_entries(
    servers: tuple[EmbeddedRedis, EmbeddedRedis], migrated: str, processes: Processes
) -> None:
    old, new = servers
    async with Link("redis", old.port) as link:
        running = await asyncio.to_thread(start, migrated, Address(link.port), processes)
        async with running as traffic:
            await traffic.more(100)
            order(new, "REPLICAOF", "NO", "ONE")
            await traffic.more(400)
            link.lead_to(new.port)
            link.cut()
            await traffic.more(200)
            await traffic.settle()
    assert "buses refilled" in processes.all["relay"].text()


async def test_a_server_that_loads_an_old_dump(migrated: str, processes: Processes) -> None:
    slow = {"key-load-delay": "10000", "loading-process-events-interval-bytes": "1024"}
    with server(**slow) as one:
        running = await asyncio.to_thread(start, migrated, Address(one.port), processes)
        async with running as traffic:
            await traffic.more(100)
            order(one, "MSET", *(word for number in range(200) for word in (number, "x")))
            order(one, "SAVE")
            await traffic.more(100)
            one.kill()
            loading = asyncio.create_task(asyncio.to_thread(one.restart))
            await traffic.more(200)
            await loading
            await traffic.settle()
    assert "loading the dataset" in processes.all["relay"].text()


async def test_links_that_die_in_silence_are_given_up(
    servers: tuple[EmbeddedRedis, EmbeddedRedis], migrated: str, processes: Processes
) -> None:
    old, new = servers
    async with Link("redis", old.port) as link:
        running = await asyncio.to_thread(start, migrated, Address(link.port), processes)
        async with running as traffic:
            await traffic.more(100)
            order(new, "REPLICAOF", "NO", "ONE")
            link.targets[:] = [new.port]
            link.half_open()
            died_at_s = time.monotonic()
            await until(
                lambda: asyncio.to_thread(lambda: readers(new) == 1), "it reads the new one"
            )
            await traffic.more(200)
            assert time.monotonic() - died_at_s < FOUND_WITHIN_S
            await traffic.settle()
