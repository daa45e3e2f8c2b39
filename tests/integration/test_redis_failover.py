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


async def test_another_server_answers_and_the_next_one_lags_by_many_entries(
    servers: tuple[EmbeddedRedis, EmbeddedRedis], migrated: str, processes: Processes
) -> None:
    first, second = servers
    async with Link("redis", first.port) as link:
        running = await asyncio.to_thread(start, migrated, Address(link.port), processes)
        async with running as traffic:
            await traffic.more(100)
            # Connections stay open, and lead to a server that refuses every write.
            link.targets[:] = [second.port]
            order(second, "REPLICAOF", "NO", "ONE")
            order(first, "REPLICAOF", "127.0.0.1", second.port)
            await until_read(second)
            await traffic.more(200)
            assert readers(first) == 0

            # Back again, with a part of the entries missing.
            order(first, "REPLICAOF", "NO", "ONE")
            await traffic.more(300)
            link.lead_to(first.port)
            await traffic.more(200)
            await traffic.settle()
    relay = processes.all["relay"].text()
    assert "read only replica" in relay
    assert "buses refilled" in relay


async def until_read(server: EmbeddedRedis) -> None:
    await until(
        lambda: asyncio.to_thread(lambda: readers(server) == 1), "the gateway reads this server"
    )


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
            await until_read(new)
            await traffic.more(1)
            assert time.monotonic() - died_at_s < FOUND_WITHIN_S
            await traffic.more(200)
            await traffic.settle()
