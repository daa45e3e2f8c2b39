"""The peer: a plain Starlette application that awaits ``send_text`` for each client.

As a program (``python -m benchmarks.starlette_app SOURCE``) it prints {"port":N} when it can be
connected to, and {"event":"listening"} when its source can be written to; each text is sent to all
clients. A client is told {} when it is one of them. Sources: ``stdin``, lines ``send BYTES`` with
the text behind; ``notify``, LISTEN in the Postgres of BENCHMARK_ADDRESS; ``pubsub``, SUBSCRIBE in
that Redis.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import redis.asyncio
import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from gateway.embedded.process import LOOPBACK

LINE_MAX_BYTES = 1 << 24
CHANNEL = "news"
ADDRESS = os.environ.get("BENCHMARK_ADDRESS", "")
clients: set[WebSocket] = set()


async def endpoint(socket: WebSocket) -> None:
    await socket.accept()
    clients.add(socket)
    try:
        # The handshake was over before: only from now on does it get everything.
        await socket.send_text("{}")
        while True:
            await socket.receive_text()
    except WebSocketDisconnect:
        pass
    finally:
        clients.discard(socket)


def listening() -> None:
    """Tell that from now on nothing is missed."""
    print(json.dumps({"event": "listening"}), flush=True)


async def standard_input() -> AsyncIterator[str]:
    reader = asyncio.StreamReader(limit=LINE_MAX_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    listening()
    while line := await reader.readline():
        yield (await reader.readexactly(int(line.split()[1]))).decode()


async def notifications() -> AsyncIterator[str]:
    connection = await psycopg.AsyncConnection.connect(ADDRESS, autocommit=True)
    await connection.execute(f"LISTEN {CHANNEL}")
    listening()
    async for notification in connection.notifies():
        yield notification.payload


async def published() -> AsyncIterator[str]:
    async with redis.asyncio.Redis.from_url(ADDRESS).pubsub() as subscription:
        await subscription.subscribe(CHANNEL)
        async for message in subscription.listen():
            if message["type"] == "subscribe":
                listening()
            elif message["type"] == "message":
                yield message["data"].decode()


SOURCES: dict[str, Callable[[], AsyncIterator[str]]] = {
    "stdin": standard_input,
    "notify": notifications,
    "pubsub": published,
}


async def broadcast() -> None:
    """Send what the source brings."""
    async for text in SOURCES[sys.argv[1]]():
        for client in list(clients):
            await client.send_text(text)


@asynccontextmanager
async def lifespan(_: Starlette) -> Any:
    task = asyncio.create_task(broadcast())
    yield
    task.cancel()


app = Starlette(routes=[WebSocketRoute("/", endpoint)], lifespan=lifespan)


def main() -> None:
    # As `uvicorn app` runs it, but for the pings: the gateway is measured without, too.
    config = uvicorn.Config(
        app, LOOPBACK, 0, ws_ping_interval=None, log_level="warning", access_log=False
    )
    sock = config.bind_socket()
    sock.listen(config.backlog)
    print(json.dumps({"port": sock.getsockname()[1]}), flush=True)
    uvicorn.Server(config).run([sock])


if __name__ == "__main__":
    main()
