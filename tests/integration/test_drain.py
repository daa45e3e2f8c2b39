"""The end of a gateway: drain, several workers, what is left behind."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from outbox import keys
from outbox.redis.connect import connect
from outbox.sharding import shard_of
from tests.client import Client
from tests.integration.conftest import TENANT, Stack, token


@pytest.fixture
async def remote(stack: Stack) -> AsyncIterator[Any]:
    redis = connect(stack.redis.url)
    yield redis
    await redis.aclose()


async def until(ready: Any, timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while not await ready():
            await asyncio.sleep(0.02)


async def workers(remote: Any) -> set[int]:
    """Process ids of the workers that report themselves."""
    lines = await remote.hgetall(keys.GATEWAYS)
    return {json.loads(line)["pid"] for line in lines.values()}


async def test_a_drain_tells_clients_to_reconnect_and_leaves_nothing_behind(
    stack: Stack, remote: Any, room: str
) -> None:
    stack.relay()
    # One connection per second: time enough to look at it from outside.
    gateway = stack.gateway(TIDEGATE_DRAIN_CONNECTIONS_PER_S="1", TIDEGATE_DRAIN_TIMEOUT_S="10")
    clients = [Client(gateway.websocket_url) for _ in range(3)]
    for client in clients:
        await client.__aenter__()
        await client.greet(token(now=time.time()))
        await client.subscribe(room)
    stack.publish(room, 1)
    await clients[0].until_offset(room, 1)
    epoch = clients[0].positions[room][1]
    bus = keys.bus(epoch, shard_of(TENANT, room, 16, 4))
    assert len(await remote.xinfo_groups(bus)) == 1
    gateway.signal(signal.SIGTERM)

    async with httpx.AsyncClient() as http:

        async def draining() -> bool:
            answer = await http.get(f"{gateway.url}/readyz")
            return answer.status_code == 503 and answer.json()["draining"]

        await until(draining)
        assert (await http.get(f"{gateway.url}/healthz")).status_code == 200
        with pytest.raises(InvalidStatus) as caught:
            async with Client(gateway.websocket_url):
                pass
        assert caught.value.response.status_code == 503
    # Those who are still there go on receiving.
    stack.publish(room, 2)
    assert await asyncio.gather(*(c.until_closed() for c in clients)) == [3001] * 3
    assert max(c.positions[room][0] for c in clients) == 2
    for client in clients:
        await client.__aexit__(None, None, None)
    assert await asyncio.to_thread(gateway.wait, 20) == 0
    assert await remote.xinfo_groups(bus) == []
    assert await remote.hgetall(keys.GATEWAYS) == {}


async def test_hostile_peers_do_not_hold_up_the_end(stack: Stack, room: str) -> None:
    stack.relay()
    gateway = stack.gateway(TIDEGATE_CLIENT_BUFFER_BYTES="16384", TIDEGATE_DRAIN_TIMEOUT_S="2")
    async with (
        Client(gateway.websocket_url, receive_buffer_bytes=4096) as deaf,
        Client(gateway.websocket_url) as quick,
    ):
        for client in (deaf, quick):
            await client.greet(token(now=time.time()))
            await client.subscribe(room)
        deaf.stop_reading()
        for _ in range(10):
            await asyncio.to_thread(stack.publish, room, *["x" * 50_000] * 20)
        await quick.until_offset(room, 200)
        _, mute = await asyncio.open_connection("127.0.0.1", gateway.port)
        mute.write(b"GET /connection/websocket HTTP/1.1\r\n")
        await mute.drain()
        gateway.signal(signal.SIGTERM)
        assert await quick.until_closed() == 3001
        assert await asyncio.to_thread(gateway.wait, 20) == 0
        mute.transport.abort()
        deaf.socket.transport.abort()


async def test_two_workers_share_a_port_and_a_killed_one_is_replaced(
    stack: Stack, remote: Any, room: str
) -> None:
    stack.relay()
    gateway = stack.gateway("gateway", "--workers", "2")

    async def both() -> bool:
        return len(await workers(remote)) == 2

    await until(both)
    before = await workers(remote)
    killed = before.pop()
    os.kill(killed, signal.SIGKILL)

    async def replaced() -> bool:
        return bool(await workers(remote) - before - {killed})

    await until(replaced)
    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time()))
        await client.subscribe(room)
        stack.publish(room, 1)
        await client.until_offset(room, 1)
    living = await workers(remote) - {killed}
    gateway.kill()

    async def gone() -> bool:
        return not any(map(_alive, living))

    await until(gone)


async def test_two_workers_end_together(stack: Stack) -> None:
    gateway = stack.gateway("gateway", "--workers", "2")
    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time()))
        gateway.signal(signal.SIGTERM)
        assert await client.until_closed() == 3001
    assert await asyncio.to_thread(gateway.wait, 30) == 0


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
