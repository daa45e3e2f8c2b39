"""A master with a replica and three sentinels, a relay and two gateways over them."""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.embedded import EmbeddedRedis
from gateway.operate.status import read_status
from outbox.redis.connect import connect
from tests.integration.conftest import Stack, token
from tests.probe import until
from tests.processes import Process, Processes
from tests.redis_setups import Replicated, cut_replication, order, readers
from tests.redis_setups import until as until_true
from tests.traffic import Traffic


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[Replicated]:
    with Replicated(tmp_path) as replicated:
        yield replicated


@pytest.fixture
async def running(replicated: Replicated, migrated: str, processes: Processes) -> Stack:
    stack = Stack(migrated, replicated, processes)  # type: ignore[arg-type]
    stack.relay()
    await asyncio.gather(
        asyncio.to_thread(stack.gateway, "gateway-1"),
        asyncio.to_thread(stack.gateway, "gateway-2"),
    )
    return stack


def traffic_of(stack: Stack) -> Traffic:
    gateways: list[Process] = [stack.processes.all[f"gateway-{number}"] for number in (1, 2)]
    rooms = [f"orders:{secrets.token_hex(4)}" for _ in range(12)]
    return Traffic(stack.dsn, gateways, rooms, token(now=time.time()))


async def until_named(replicated: Replicated, server: EmbeddedRedis) -> None:
    """If their votes are split they wait for twice the time-out of a fail-over, which is 6 s."""
    await asyncio.to_thread(
        until_true, lambda: replicated.named() == {server.port}, "the sentinels agree", 60
    )


async def names_no_unknown_master(replicated: Replicated) -> None:
    stranger = connect(replicated.url.replace("/tidegate-master/", "/unknown/"))
    with pytest.raises(RedisConnectionError, match="named the master 'unknown'") as caught:
        await stranger.ping()
    assert "password" not in str(caught.value)
    await stranger.aclose()


async def test_a_replica_that_lags_by_many_entries_becomes_the_master(
    running: Stack, replicated: Replicated
) -> None:
    await names_no_unknown_master(replicated)
    async with traffic_of(running) as traffic:
        await traffic.more(100)
        master, replica = replicated.server("master"), replicated.server("slave")
        await asyncio.to_thread(cut_replication, replica)
        await traffic.more(300)
        master.kill()
        await until_named(replicated, replica)
        await traffic.more(200)
        await traffic.settle()

    async def sound() -> bool:
        """Gateways that had been lost with the tail report again after a while."""
        found = await read_status(running.dsn, replicated.url)
        return found.problems == () and len(found.gateways) == 2

    await until(sound, "the status says so")
    assert "buses refilled" in running.processes.all["relay"].text()


async def test_a_master_that_hung_comes_back_beside_its_successor(
    running: Stack, replicated: Replicated
) -> None:
    async with traffic_of(running) as traffic:
        await traffic.more(100)
        old, new = replicated.server("master"), replicated.server("slave")
        os.kill(old.pid, signal.SIGSTOP)
        await until_named(replicated, new)
        # It believes to be the master still, until the sentinels have told it otherwise.
        os.kill(old.pid, signal.SIGCONT)
        assert order(old, "ROLE")[0] == "master"
        await until(
            lambda: asyncio.to_thread(lambda: readers(new) == 2), "both gateways read the new one"
        )
        await traffic.more(200)
        assert readers(old) == 0
        await traffic.settle()
