"""Losing Redis in all ways, and losing commits: what a watching client notices of it."""

import asyncio
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
from outbox import database, keys
from outbox.redis.connect import connect
from outbox.sequence import Sequencer
from outbox.sharding import shard_of
from tests.client import Client
from tests.integration.conftest import TENANT, Stack, token
from tests.processes import Processes
from tests.traffic import SHUTDOWN


@pytest.fixture(scope="module")
def troubled(
    postgres: EmbeddedPostgres, _template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """A stack whose Redis suffers; it must always recover."""
    name = f"troubled_{secrets.token_hex(6)}"
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {_template}")
    with EmbeddedRedis() as redis:
        folder: Path = tmp_path_factory.mktemp("troubled")
        processes = Processes(folder / "processes")
        stack = Stack(postgres.dsn(name), redis, processes)
        try:
            stack.relay()
            stack.gateway()
            yield stack
        finally:
            processes.stop()
        processes.check_logs()


DYING_GATEWAY = """
import asyncio, signal, sys
from gateway import cli
from gateway.consumer import Consumer

run = Consumer.run

async def run_until_told(self):
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
    reading = asyncio.create_task(run(self))
    await told.wait()
    reading.cancel()
    raise RuntimeError("a mistake")

Consumer.run = run_until_told
sys.argv = ["tidegate", "gateway", "--port", sys.argv[1]]
sys.exit(cli.run())
"""
"""A gateway whose reader dies of a bug when it gets SIGUSR1."""


@pytest.fixture
async def client(troubled: Stack) -> AsyncIterator[Client]:
    gateway = troubled.processes.all["gateway"]
    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time()))
        yield client


@pytest.fixture
async def remote(troubled: Stack) -> AsyncIterator[Any]:
    redis = connect(troubled.redis.url)
    yield redis
    await redis.aclose()


async def epoch_of(remote: Any) -> str:
    """Waits for the relay to write it again, if an earlier test has wiped it out."""
    async with asyncio.timeout(20):
        while (epoch := await remote.get(keys.EPOCH)) is None:
            await asyncio.sleep(0.02)
    text: str = epoch.decode()
    return text


async def flush(stack: Stack, remote: Any, room: str) -> None:
    await remote.flushall()


async def delete_bus(stack: Stack, remote: Any, room: str) -> None:
    assert await remote.delete(keys.bus(await epoch_of(remote), shard_of(TENANT, room, 16, 4)))


async def kill_links(stack: Stack, remote: Any, room: str) -> None:
    await remote.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def unblock(stack: Stack, remote: Any, room: str) -> None:
    for line in await remote.client_list():
        await remote.execute_command("CLIENT", "UNBLOCK", line["id"], "ERROR")


async def destroy_groups(stack: Stack, remote: Any, room: str) -> None:
    bus = keys.bus(await epoch_of(remote), shard_of(TENANT, room, 16, 4))
    for group in await remote.xinfo_groups(bus):
        await remote.xgroup_destroy(bus, group["name"])


async def wrong_type(stack: Stack, remote: Any, room: str) -> None:
    shard = shard_of(TENANT, room, 16, 4)
    await remote.set(keys.room(await epoch_of(remote), shard, TENANT, room), "not a stream")


async def restart(stack: Stack, remote: Any, room: str) -> None:
    await asyncio.to_thread(stack.redis.restart)


@pytest.mark.parametrize(
    "fault", [flush, delete_bus, kill_links, unblock, destroy_groups, wrong_type, restart]
)
async def test_clients_do_not_notice(
    troubled: Stack, client: Client, remote: Any, room: str, fault: Any
) -> None:
    await client.subscribe(room)
    troubled.publish(room, 1, 2)
    await client.until_offset(room, 2)
    await fault(troubled, remote, room)
    await asyncio.to_thread(troubled.publish, room, 3, 4)
    await client.until_offset(room, 4, 40)
    troubled.publish(room, 5)
    await client.until_offset(room, 5)
    assert not client.evicted
    # One who was away meanwhile.
    async with Client(troubled.processes.all["gateway"].websocket_url) as other:
        await other.greet(token(now=time.time()))
        reply = await other.subscribe(room, (1, client.positions[room][1]))
        assert reply["recovered"] is True
        await other.until_offset(room, 5)


async def test_a_client_can_join_while_redis_is_away(
    troubled: Stack, client: Client, room: str
) -> None:
    troubled.redis.kill()
    try:
        reply = await client.subscribe(room, (0, ""))
        assert reply["recovered"] is True
        troubled.publish(room, 1)
    finally:
        await asyncio.to_thread(troubled.redis.restart)
    await client.until_offset(room, 1, 40)


async def test_a_bus_entry_that_cannot_be_read_is_filled_from_the_log(
    troubled: Stack, client: Client, remote: Any, room: str
) -> None:
    await client.subscribe(room)
    relay = troubled.processes.all["relay"]
    relay.stop()
    try:
        async with await database.connect(troubled.dsn) as connection:
            troubled.publish(room, 1, 2)
            batch = await Sequencer(connection).batch(range(16), 100)
        shard = shard_of(TENANT, room, 16, 4)
        bus = keys.bus(batch.epoch, shard)
        for message in batch.messages:
            await remote.xadd(bus, {"b": message.batch, "m": b"\xc1junk"}, f"{message.seq}-0")
        await client.until_offset(room, 2)
    finally:
        relay.restart()
    troubled.publish(room, 3)
    await client.until_offset(room, 3)


async def test_a_new_epoch_is_told_and_nothing_old_is_recovered(
    troubled: Stack, client: Client, remote: Any, room: str
) -> None:
    await client.subscribe(room)
    troubled.publish(room, 1)
    await client.until_offset(room, 1)
    before = client.positions[room]
    async with await database.connect(troubled.dsn) as connection:
        epoch = await Sequencer(connection).new_epoch()
    await remote.set(keys.EPOCH, epoch)
    troubled.publish("orders:other", 1)
    await client.until(lambda: client.evicted == {room: 2500})
    reply = await client.subscribe(room, before)
    assert (reply.get("recovered", False), reply["epoch"], reply["offset"]) == (False, epoch, 1)
    troubled.publish(room, 2)
    await client.until_offset(room, 2)


async def test_a_gateway_whose_reader_has_died_ends(
    stack: Stack, room: str, free_port: Callable[[], int]
) -> None:
    """It is not left to stand there with green probes and clients that wait."""
    stack.relay()
    port = free_port()
    gateway = stack.processes.start_python(
        "gateway", "-c", DYING_GATEWAY, str(port), **stack.settings
    )
    gateway.tracebacks_allowed = True
    gateway.port = port
    await asyncio.to_thread(gateway.wait_ready)
    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time()))
        await client.subscribe(room)
        stack.publish(room, 1)
        await client.until_offset(room, 1)
        gateway.signal(signal.SIGUSR1)
        assert await client.until_closed() == SHUTDOWN
    assert await asyncio.to_thread(gateway.wait, 20) == 1
    assert "background task died" in gateway.text()
    assert "a mistake" in gateway.text()
