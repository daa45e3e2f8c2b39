"""What ``gateway.transport`` relies on in uvicorn, held by a server of its own in this process."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol

import gateway.transport
from gateway.transport import HubProtocol, Server, socket_of

BUFFER_BYTES = 16_384


@dataclass
class Served:
    """The application's side of one connection."""

    port: int
    sockets: list[HubProtocol] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    received: list[object] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    def filled(self) -> None:
        self.told.append("filled")

    def drained(self) -> None:
        self.told.append("drained")

    def closed(self) -> None:
        self.told.append("closed")

    async def run(self, websocket: WebSocket) -> None:
        await websocket.accept()
        found = socket_of(websocket.scope)
        self.sockets.append(found)
        found.listen(self)
        self.opened.set()
        try:
            while (message := await websocket.receive())["type"] != "websocket.disconnect":
                self.received.append(message.get("text"))
        except WebSocketDisconnect:
            pass
        finally:
            self.ended.set()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/"

    async def raw(self) -> socket.socket:
        """A peer that has done the handshake and reads nothing more."""
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        peer.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(peer, ("127.0.0.1", self.port))
        await loop.sock_sendall(
            peer,
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        )
        answer = await loop.sock_recv(peer, 4_096)
        assert answer.startswith(b"HTTP/1.1 101 ")
        await self.opened.wait()
        return peer

    def fill(self) -> HubProtocol:
        (server,) = self.sockets
        while not server.full:
            server.write(b"\x81\x7e\x03\xe8" + b"x" * 1_000)
        # The kernel takes what it can before this is more than a moment's state.
        for _ in range(8_000):
            server.write(b"\x81\x7e\x03\xe8" + b"x" * 1_000)
        return server


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(gateway.transport, "CLOSE_TIMEOUT_S", 0.2)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    served = Served(listening.getsockname()[1])
    app = Starlette(routes=[WebSocketRoute("/", served.run)])
    server = Server(app, 65_536, BUFFER_BYTES)
    serving = asyncio.ensure_future(server.serve(listening))
    while not server._server.started:
        await asyncio.sleep(0.01)
    yield served
    server.stop()
    await serving


async def until(ready: object) -> None:
    async with asyncio.timeout(20):
        while not ready():  # type: ignore[operator]
            await asyncio.sleep(0.01)


def masked(opcode: Opcode, data: bytes = b"", fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


async def test_the_attributes_are_there(served: Served) -> None:
    async with connect(served.url):
        await served.opened.wait()
        (server,) = served.sockets
        assert isinstance(server.conn, ServerProtocol)
        assert isinstance(server.queue, asyncio.Queue)
        assert isinstance(server.writable, asyncio.Event)
        assert server.frames == []
        assert server.curr_msg_data_type in ("text", "bytes")
        assert (server.close_sent, server.disconnected, server.read_paused) == (False,) * 3
        assert server.close_timer is None
        assert server.handshake_complete
        for name in (
            *("handle_connect", "handle_close", "handle_cont", "handle_ping", "eof_received"),
            *("handle_parser_exception", "send_receive_event_to_app", "connection_lost"),
            *("pause_writing", "resume_writing"),
        ):
            assert name in vars(WebSocketsSansIOProtocol), name


async def test_frames_go_past_the_application_and_the_buffer_is_reported(served: Served) -> None:
    async with connect(served.url, max_size=None, max_queue=1, close_timeout=0.1) as client:
        await served.opened.wait()
        server = served.fill()
        await until(lambda: served.told == ["filled"])
        assert server.transport.get_write_buffer_limits()[1] == BUFFER_BYTES
        assert not server.writable.is_set()
        while served.told[-1] != "drained":
            assert await client.recv() == "x" * 1_000
        assert server.writable.is_set()
        await client.send("still here")
        await until(lambda: served.received == ["still here"])
    await until(lambda: served.told[-1] == "closed")
    await served.ended.wait()


async def test_a_close_is_sent_and_the_application_ends(served: Served) -> None:
    async with connect(served.url) as client:
        await served.opened.wait()
        (server,) = served.sockets
        server.close(3001, "shutdown")
        server.write(b"\x81\x01x")
        await served.ended.wait()
        await client.wait_closed()
        assert (client.close_code, client.close_reason) == (3001, "shutdown")
    await until(lambda: server.disconnected)
    assert server.close_timer is None


@pytest.mark.parametrize("end", ["server", "peer", "half", "broken", "answered"])
async def test_a_peer_that_does_not_read_is_cut_whatever_it_does(served: Served, end: str) -> None:
    peer = await served.raw()
    server = served.fill()
    loop = asyncio.get_running_loop()
    if end in ("server", "answered"):
        server.close(3008, "slow")
    if end in ("peer", "answered"):
        await loop.sock_sendall(peer, masked(Opcode.CLOSE, b"\x03\xe8"))
    if end == "half":
        peer.shutdown(socket.SHUT_WR)
    if end == "broken":
        await loop.sock_sendall(peer, b"\xff\xff")
    await until(lambda: server.disconnected)
    assert served.told[-1] == "closed"
    await served.ended.wait()
    peer.close()


async def test_a_peer_that_pings_and_does_not_read_makes_nothing_grow(served: Served) -> None:
    peer = await served.raw()
    server = served.fill()
    await until(lambda: server.full)
    before = server.buffered_bytes()
    loop = asyncio.get_running_loop()
    for _ in range(500):
        await loop.sock_sendall(peer, masked(Opcode.PING, b"p" * 100) * 20)
    await loop.sock_sendall(peer, masked(Opcode.TEXT, b"done"))
    await until(lambda: served.received == ["done"])
    assert server.buffered_bytes() <= before
    peer.close()


async def test_empty_fragments_take_no_memory(served: Served) -> None:
    peer = await served.raw()
    (server,) = served.sockets
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(peer, masked(Opcode.TEXT, b"a", fin=False))
    await loop.sock_sendall(peer, masked(Opcode.CONT, b"", fin=False) * 5_000)
    await loop.sock_sendall(peer, masked(Opcode.CONT, b"b", fin=False))
    await until(lambda: len(server.frames) >= 2)
    assert len(server.frames) == 2
    await loop.sock_sendall(peer, masked(Opcode.CONT, b""))
    await until(lambda: served.received == ["ab"])
    peer.close()
