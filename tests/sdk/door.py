"""One address in front of several gateways, as a load balancer is: clients need not know them.

Each new connection goes to the gateway after the last one, so whoever comes back comes back on
another gateway. If that one refuses, the connection is cut and the next goes one further.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Self, cast

HOST = "127.0.0.1"


class Door:
    """``async with Door(ports) as door: …``"""

    def __init__(self, ports: Sequence[int], first: int = 0) -> None:
        """``first``: index of the gateway that the first connection goes to."""
        self.visits: list[int] = []
        """Index of the gateway of each connection that was made."""
        self.port = 0
        self._ports = ports
        self._next = first
        self._ends: set[_End] = set()
        self._dialling: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    @property
    def url(self) -> str:
        return f"ws://{HOST}:{self.port}/connection/websocket"

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._dialling, return_exceptions=True)
        while self._ends:
            await asyncio.sleep(0)

    def cut(self) -> None:
        """Cut all connections, without a word to either side."""
        for task in self._dialling:
            task.cancel()
        for end in list(self._ends):
            end.abort()

    def _accept(self) -> "_End":
        return _End(self._ends, self._dial)

    def _dial(self, client: "_End") -> None:
        task = asyncio.create_task(self._connect(client))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    async def _connect(self, client: "_End") -> None:
        index = self._next
        self._next = (index + 1) % len(self._ports)
        loop = asyncio.get_running_loop()
        try:
            _, gateway = await loop.create_connection(
                lambda: _End(self._ends, None), HOST, self._ports[index]
            )
        except OSError:
            client.abort()
            return
        except asyncio.CancelledError:
            client.abort()
            raise
        self.visits.append(index)
        gateway.join(client)
        client.join(gateway)


class _End(asyncio.Protocol):
    """One of the two sockets of a connection."""

    def __init__(self, ends: "set[_End]", dial: "Callable[[_End], None] | None") -> None:
        self._ends = ends
        self._dial = dial
        self._peer: _End | None = None
        self._gone = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ends.add(self)
        if self._dial is not None:
            self._transport.pause_reading()
            self._dial(self)

    def join(self, peer: "_End") -> None:
        self._peer = peer
        if peer._gone:
            self.abort()
        elif self._dial is not None and not self._gone:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._peer is not None:
            self._peer._transport.write(data)

    def pause_writing(self) -> None:
        if self._peer is not None and not self._peer._gone:
            self._peer._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._peer is not None and not self._peer._gone:
            self._peer._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        self._ends.discard(self)
        if self._peer is not None and not self._peer._gone:
            if exc is None:
                self._peer._transport.close()
            else:
                self._peer.abort()

    def abort(self) -> None:
        if not self._gone:
            self._transport.abort()
