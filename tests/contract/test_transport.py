"""What ``gateway.transport`` relies on in uvicorn, held by a server of its own in this process."""

import asyncio
import gc
import random
import socket
import struct
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from httptools import HttpParserUpgrade
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode

import gateway.websocket
from gateway.frames import text_frame
from gateway.transport import EXTENSION, HandshakeProtocol, Server, take_over
from gateway.websocket import WebSocket as Socket

BUFFER_BYTES = 16_384
MESSAGE_MAX_BYTES = 65_536
REQUEST = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@dataclass
class Served:
    """The application's side of one connection."""

    port: int
    server: Server
    sockets: list[Socket] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    let_in: asyncio.Event = field(default_factory=asyncio.Event)
    """Clear: the application has not decided yet."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    watch: Callable[[WebSocket], object] = lambda websocket: None

    def filled(self) -> None:
        self.told.append("filled")

    def drained(self) -> None:
        self.told.append("drained")

    def closed(self) -> None:
        self.told.append("closed")

    def received(self, text: str) -> None:
        self.texts.append(text)
        if text == "hold":
            self.sockets[0].hold()

    def refused(self) -> None:
        self.told.append("refused")

    def lost(self) -> None:
        self.told.append("lost")
        self.ended.set()

    async def run(self, websocket: WebSocket) -> None:
        self.asked.set()
        await self.let_in.wait()
        try:
            await websocket.accept()
        except (WebSocketDisconnect, OSError):
            self.told.append("gone")
            self.ended.set()
            return
        self.watch(websocket)
        found = take_over(websocket.scope, MESSAGE_MAX_BYTES, BUFFER_BYTES)
        if found is None:
            self.told.append("gone")
            self.ended.set()
            return
        self.sockets.append(found)
        found.listen(self)
        self.opened.set()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/"

    async def plain(self) -> socket.socket:
        """A peer that has sent nothing yet."""
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        peer.setblocking(False)
        await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", self.port))
        return peer

    async def raw(self) -> socket.socket:
        """A peer that has done the handshake and reads nothing more."""
        peer = await self.plain()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(peer, REQUEST)
        answer = await loop.sock_recv(peer, 4_096)
        assert answer.startswith(b"HTTP/1.1 101 ")
        await self.opened.wait()
        return peer

    def fill(self) -> Socket:
        (server,) = self.sockets
        while not server.full:
            server.write(b"\x81\x7e\x03\xe8" + b"x" * 1_000)
        # The kernel takes what it can before this is more than a moment's state.
        for _ in range(8_000):
            server.write(b"\x81\x7e\x03\xe8" + b"x" * 1_000)
        return server


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(gateway.websocket, "CLOSE_TIMEOUT_S", 0.2)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    app = Starlette()
    server = Server(app)
    served = Served(listening.getsockname()[1], server)
    app.router.routes.append(WebSocketRoute("/", served.run))
    served.let_in.set()
    serving = asyncio.ensure_future(server.serve(listening))
    while not server._server.started:
        await asyncio.sleep(0.01)
    yield served
    served.let_in.set()
    server.stop()
    await serving


async def until(ready: object) -> None:
    async with asyncio.timeout(20):
        while not ready():  # type: ignore[operator]
            await asyncio.sleep(0.01)


def masked(opcode: Opcode, data: bytes = b"", fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


async def test_what_is_relied_on_is_there(served: Served) -> None:
    for of, names in {
        HttpToolsProtocol: ("data_received", "handle_websocket_upgrade"),
        WebSocketsSansIOProtocol: ("data_received", "handle_connect", "run_asgi"),
    }.items():
        for name in names:
            assert name in vars(of), name
    assert HttpParserUpgrade(5).args == (5,)
    handshakes: list[HandshakeProtocol] = []
    served.watch = lambda websocket: handshakes.append(websocket.scope["extensions"][EXTENSION])
    async with connect(served.url):
        await served.opened.wait()
        (handshake,) = handshakes
        (server,) = served.sockets
        assert handshake.handshake_initiated
        assert handshake.handshake_complete
        assert not handshake.disconnected
        assert handshake.connections == {server}


async def test_nothing_is_left_of_the_handshake(served: Served) -> None:
    left: list[weakref.ref[HandshakeProtocol]] = []
    served.watch = lambda websocket: left.append(
        weakref.ref(websocket.scope["extensions"][EXTENSION])
    )
    gc.disable()
    try:
        async with connect(served.url):
            await served.opened.wait()
            await until(lambda: left[0]() is None)
    finally:
        gc.enable()


async def test_frames_go_past_the_application_and_the_buffer_is_reported(served: Served) -> None:
    async with connect(served.url, max_size=None, max_queue=1, close_timeout=0.1) as client:
        await served.opened.wait()
        server = served.fill()
        await until(lambda: served.told == ["filled"])
        assert server.transport.get_write_buffer_limits()[1] == BUFFER_BYTES
        waiting = asyncio.create_task(server.room_to_write())
        while served.told[-1] != "drained":
            assert not waiting.done()
            assert await client.recv() == "x" * 1_000
        await waiting
        await client.send("still here")
        await until(lambda: served.texts == ["still here"])
    await served.ended.wait()
    assert served.told[-2:] == ["closed", "lost"]


@pytest.mark.parametrize("merging", [False, True])
async def test_frames_keep_their_order_whichever_way_they_go(served: Served, merging: bool) -> None:
    async with connect(served.url, max_size=None) as client:
        await served.opened.wait()
        (server,) = served.sockets
        server.merge(merging)
        pick = random.Random(7)
        texts = [str(i) * pick.choice((1, 10, 20_000)) for i in range(400)]
        spilled = 0
        for text in texts:
            frame = text_frame(text.encode())
            if pick.random() < 0.2:
                server.write(frame)
                continue
            try:
                sent = server.send(frame)
            except OSError:
                sent = 0
            if sent != len(frame):
                spilled += 1
                server.spill(frame, sent)
        assert merging or spilled
        assert [await client.recv() for _ in texts] == texts
        server.merge(False)
        assert server.send(text_frame(b"at last")) == 9
        assert server.buffered_bytes() == 0
        assert await client.recv() == "at last"


async def test_a_close_is_sent_and_the_application_ends(served: Served) -> None:
    async with connect(served.url) as client:
        await served.opened.wait()
        (server,) = served.sockets
        server.close(3001, "shutdown")
        assert served.told == ["closed"]
        server.write(b"\x81\x01x")
        await client.wait_closed()
        assert (client.close_code, client.close_reason) == (3001, "shutdown")
    await served.ended.wait()
    assert served.told == ["closed", "lost"]
    assert server._cut_timer is None


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
    await served.ended.wait()
    assert served.told[-2:] == ["closed", "lost"]
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
    await until(lambda: served.texts == ["done"])
    assert server.buffered_bytes() <= before
    peer.close()


async def test_empty_fragments_take_no_memory(served: Served) -> None:
    peer = await served.raw()
    (server,) = served.sockets
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(peer, masked(Opcode.TEXT, b"a", fin=False))
    await loop.sock_sendall(peer, masked(Opcode.CONT, b"", fin=False) * 5_000)
    await loop.sock_sendall(peer, masked(Opcode.CONT, b"b", fin=False))
    await until(lambda: server._parser._fragments == b"ab")
    await loop.sock_sendall(peer, masked(Opcode.CONT, b""))
    await until(lambda: served.texts == ["ab"])
    peer.close()


async def test_what_comes_while_held_waits_and_keeps_its_order(served: Served) -> None:
    async with connect(served.url) as client:
        await served.opened.wait()
        (server,) = served.sockets
        for text in ("a", "hold", "b", "c"):
            await client.send(text)
        await until(lambda: "hold" in served.texts)
        await client.send("d")
        server.release()
        await until(lambda: len(served.texts) == 5)
        assert served.texts == ["a", "hold", "b", "c", "d"]
        server.hold()
        for _ in range(3):
            await client.send("unheard")
        server.close(3000, "enough")
        await client.wait_closed()
        assert client.close_code == 3000
    await served.ended.wait()
    assert "unheard" not in served.texts


@pytest.mark.parametrize("behind_the_request", [True, False])
async def test_frames_that_come_early_are_kept(served: Served, behind_the_request: bool) -> None:
    served.let_in.clear()
    loop = asyncio.get_running_loop()
    early = masked(Opcode.TEXT, b"first") + masked(Opcode.TEXT, b"second")
    peer = await served.plain()
    if behind_the_request:
        await loop.sock_sendall(peer, REQUEST + early[:-3])
        await served.asked.wait()
    else:
        await loop.sock_sendall(peer, REQUEST)
        await served.asked.wait()
        await loop.sock_sendall(peer, early[:-3])
    await loop.sock_sendall(peer, early[-3:])
    served.let_in.set()
    await until(lambda: len(served.texts) == 2)
    assert served.texts == ["first", "second"]
    peer.close()


async def test_a_peer_that_sends_much_before_it_is_answered_is_cut(served: Served) -> None:
    served.let_in.clear()
    peer = await served.plain()
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(peer, REQUEST)
    await served.asked.wait()
    with suppress(ConnectionError):
        await loop.sock_sendall(peer, b"x" * 3_000_000)
        while await loop.sock_recv(peer, 65_536):
            pass
    served.let_in.set()
    await served.ended.wait()
    assert served.told == ["gone"]
    peer.close()


async def test_a_peer_that_goes_before_it_is_answered_leaves_nothing(served: Served) -> None:
    served.let_in.clear()
    peer = await served.plain()
    await asyncio.get_running_loop().sock_sendall(peer, REQUEST)
    await served.asked.wait()
    (handshake,) = served.server._server.server_state.connections
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    await until(lambda: handshake.disconnected)  # type: ignore[union-attr]
    served.let_in.set()
    await served.ended.wait()
    assert served.told == ["gone"]
    assert not served.server._server.server_state.connections


async def test_a_server_that_ends_closes_those_that_are_left(served: Served) -> None:
    async with connect(served.url) as client:
        await served.opened.wait()
        served.server.stop()
        await client.wait_closed()
        assert client.close_code == 1012
    await served.ended.wait()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\xc1\x81\x00\x00\x00\x00x", 1002),
        (b"\x81\x01x", 1002),
        (b"\x83\x80\x00\x00\x00\x00", 1002),
        (b"\x09\x80\x00\x00\x00\x00", 1002),
        (b"\x80\x80\x00\x00\x00\x00", 1002),
        (b"\x88\x81\x00\x00\x00\x00x", 1002),
        (b"\x88\x82\x00\x00\x00\x00\x03\xed", 1002),
        (b"\x88\x83\x00\x00\x00\x00\x03\xe8\xff", 1007),
        (b"\x81\x81\x00\x00\x00\x00\xff", 1007),
        (b"\x01\x81\x00\x00\x00\x00\xc3\x80\x81\x00\x00\x00\x00\x28", 1007),
        (b"\x81\xff\x00\x00\x00\x00\x00\x01\x00\x01", 1009),
    ],
)
async def test_a_broken_frame_is_answered_with_its_code(
    served: Served, data: bytes, code: int
) -> None:
    peer = await served.raw()
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(peer, data)
    answer = b""
    while chunk := await loop.sock_recv(peer, 4_096):
        answer += chunk
    assert answer[:1] == b"\x88"
    assert int.from_bytes(answer[2:4]) == code
    peer.close()
    await served.ended.wait()
