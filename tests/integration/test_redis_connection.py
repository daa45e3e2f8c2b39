"""A connection that broke looks the same on both event loops."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
import redis.exceptions
import uvloop

from outbox.redis.connect import connect
from tests.probe import until


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_write_to_a_closed_transport(
    redis_url: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def call(connection: Any, *command: str) -> None:
        await connection.send_command(*command)
        await connection.read_response()

    async def scenario() -> None:
        client = connect(redis_url)
        await client.set("key", "value")
        connection = cast(Any, client.connection_pool)._available_connections[0]
        transport = connection._writer.transport
        transport.abort()
        await until(lambda: cast(bool, transport.is_closing()), "the transport closes")
        await asyncio.sleep(0)
        with pytest.raises(redis.exceptions.ConnectionError):
            await call(connection, "GET", "key")
        assert await client.get("key") == b"value"
        await client.aclose()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())
