"""The peer: a plain Starlette application that awaits ``send_text`` for each client.

As a program (``python -m benchmarks.starlette_app``) it prints {"port":N} and takes texts on
standard input, ``send BYTES`` and then the text; each is sent to all clients.
"""

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from gateway.embedded.process import LOOPBACK

LINE_MAX_BYTES = 1 << 24
clients: set[WebSocket] = set()


async def endpoint(socket: WebSocket) -> None:
    await socket.accept()
    clients.add(socket)
    try:
        while True:
            await socket.receive_text()
    except WebSocketDisconnect:
        pass
    finally:
        clients.discard(socket)


async def broadcast() -> None:
    """Send what comes on standard input."""
    reader = asyncio.StreamReader(limit=LINE_MAX_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        text = (await reader.readexactly(int(line.split()[1]))).decode()
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
