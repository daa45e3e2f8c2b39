"""The socket below the protocol: broken frames, slow and silent peers, origins, logs."""

import asyncio
import json
import re
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode

from gateway import codes
from outbox import keys
from outbox.redis.connect import connect
from tests.client import Client
from tests.integration.conftest import API_KEY, SECRET, Stack, token
from tests.processes import Process

RSV1 = 0x40
"""The bit of a first byte that says: this message is compressed."""


async def send_raw(client: Client, data: bytes, opcode: Opcode = Opcode.TEXT) -> None:
    """Sends a frame past the library's own checks."""
    protocol = client.socket.protocol
    client.socket.transport.write(Frame(opcode, data).serialize(mask=True))
    assert protocol is not None


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("", 3501),
        (" \n ", 3501),
        ("nonsense", 3501),
        ("{}", 3501),
        ("[]", 3501),
        ('{"id": 1}', 3501),
        ('{"id": 0, "connect": {}}', 3501),
        ('{"id": 1, "subscribe": {"channel": "early"}}', 3501),
        ('{"id": 1, "connect": {}, "rpc": {}}', 3501),
        ('{"id": 1, "connect": {}}\n{"id": 2, "connect": {}}', 3501),
        ('{"id": 1, "connect": {}}\n{"id": 2, "subscribe": {"channel": 7}}', 3501),
        ('{"id": 1, "connect": {"token": ' + "[" * 20_000 + "]" * 20_000 + "}}", 3501),
        (b"\x00\x01", 3501),
        ("x" * 70_000, 1009),
    ],
)
async def test_what_is_no_command_ends_the_connection_with_a_code(
    gateway: Process, frame: str | bytes, code: int
) -> None:
    async with Client(gateway.websocket_url) as client:
        await client.send(frame)
        # What was asked before the bad command may have been answered.
        client._waiting[1] = asyncio.get_running_loop().create_future()
        assert await client.until_closed() == code


@pytest.mark.parametrize(
    ("opcode", "data", "code"),
    [
        (Opcode.TEXT, b"\xff\xfe", 1007),
        (Opcode.TEXT, b'{"id": 1, "connect": {"token": "\xed\xa0\x80"}}', 1007),
        (Opcode.CONT, b"of nothing", 1002),
        (Opcode.PING, b"x" * 126, 1002),
        # Bits of extensions, of which none was agreed on; opcodes that do not exist.
        (RSV1 | Opcode.TEXT, b"{}", 1002),
        (RSV1 | Opcode.BINARY, b"{}", 1002),
        (RSV1 | Opcode.PING, b"", 1002),
        (0x20 | Opcode.TEXT, b"{}", 1002),
        (0x10 | Opcode.TEXT, b"{}", 1002),
        (0x3, b"{}", 1002),
        (0xB, b"", 1002),
    ],
)
async def test_what_is_no_websocket_frame_ends_the_connection_with_a_code(
    gateway: Process, opcode: int, data: bytes, code: int
) -> None:
    before = gateway.text()
    async with Client(gateway.websocket_url) as client:
        client.socket.transport.write(_masked(opcode, data))
        assert await client.until_closed() == code
    lines = [
        line
        for line in gateway.text()[len(before) :].splitlines()
        if "broke the WebSocket" in line or "invalid UTF-8" in line
    ]
    assert len(lines) == 1


def _masked(opcode: int, data: bytes) -> bytes:
    assert len(data) < 65_536
    size = bytes((0x80 | len(data),)) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2)
    return bytes((0x80 | opcode,)) + size + bytes(4) + data


async def test_an_unmasked_frame_is_refused(gateway: Process) -> None:
    async with Client(gateway.websocket_url) as client:
        client.socket.transport.write(b"\x81\x02{}")
        assert await client.until_closed() == 1002


async def test_compression_is_offered_in_vain(gateway: Process, shared: Stack, room: str) -> None:
    """A client that can do with and without it works without; nothing is ever inflated."""
    async with Client(gateway.websocket_url, compression="deflate") as client:
        assert client.socket.request is not None
        assert "permessage-deflate" in client.socket.request.headers["Sec-WebSocket-Extensions"]
        assert client.socket.response is not None
        assert "Sec-WebSocket-Extensions" not in client.socket.response.headers
        assert client.socket.protocol.extensions == []
        await client.greet(token(now=time.time()))
        await client.subscribe(room)
        shared.publish(room, "x" * 10_000)
        await client.until_offset(room, 1)
        assert client.data(room) == ["x" * 10_000]


async def test_a_compression_bomb_is_refused_at_its_first_byte(gateway: Process) -> None:
    """Twenty megabytes in twenty kilobytes, although no compression was agreed on."""
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    bomb = deflate.compress(b" " * 20_000_000) + deflate.flush(zlib.Z_SYNC_FLUSH)
    before_kib = peak_memory_kib(gateway.pid)
    async with Client(gateway.websocket_url) as client:
        client.socket.transport.write(_masked(RSV1 | Opcode.TEXT, bomb[:-4]))
        assert await client.until_closed() == 1002
    assert peak_memory_kib(gateway.pid) - before_kib < 10_000


def peak_memory_kib(pid: int) -> int:
    """The most memory that a process has had resident so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"^VmHWM:\s+(\d+) kB", status, re.M)[0])


async def test_a_fragmented_command_is_put_together(gateway: Process) -> None:
    async with Client(gateway.websocket_url) as client:
        client._waiting[1] = future = asyncio.get_running_loop().create_future()
        await client.socket.send(['{"id": 1, "con', "", 'nect": {"name": "', "ü", '"}}'])
        await client.until(future.done)


async def test_a_large_message_that_is_still_being_sent_is_refused_with_its_code(
    gateway: Process,
) -> None:
    async with Client(gateway.websocket_url) as client:
        sending = asyncio.ensure_future(client.send("x" * 20_000_000))
        assert await client.until_closed() == 1009
        await asyncio.gather(sending, return_exceptions=True)


async def test_a_peer_that_only_pings_gets_pongs(gateway: Process) -> None:
    async with Client(gateway.websocket_url) as client:
        waiter = await client.socket.ping(b"12")
        await asyncio.wait_for(waiter, 10)


@pytest.mark.parametrize(
    ("origin", "welcome"),
    [("https://evil.example", False), ("http://localhost", False), ("null", False), ("own", True)],
)
async def test_a_page_of_another_site_cannot_connect(
    gateway: Process, origin: str, welcome: bool
) -> None:
    if welcome:
        async with Client(gateway.websocket_url, origin=gateway.url) as client:
            await client.greet()
        return
    with pytest.raises(InvalidStatus) as caught:
        async with Client(gateway.websocket_url, origin=origin):
            pass
    assert caught.value.response.status_code == 403
    assert b"TIDEGATE_ALLOWED_ORIGINS" in caught.value.response.body


async def test_peers_that_vanish_in_the_handshake_leave_no_traceback(gateway: Process) -> None:
    host, port = "127.0.0.1", gateway.port
    request = (
        f"GET /connection/websocket?token={token(now=time.time())} HTTP/1.1\r\n"
        f"Host: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()
    for size in (10, len(request) - 2, len(request), len(request)):
        _, writer = await asyncio.open_connection(host, port)
        writer.write(request[:size])
        await writer.drain()
        writer.transport.abort()
    for junk in (b"\xff" * 500, b"\x81\x05abc", bytes((0x88, 0x80, 0, 0, 0, 0))):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request)
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        writer.write(junk)
        if junk[0] != 0x81:
            await asyncio.wait_for(reader.read(), 20)
        writer.transport.abort()
    async with Client(gateway.websocket_url) as client:
        await client.greet()


async def test_a_slow_client_gets_everything_once_and_disturbs_nobody(
    stack: Stack, room: str
) -> None:
    stack.relay()
    gateway = stack.gateway(TIDEGATE_CLIENT_BUFFER_BYTES="16384")
    async with (
        Client(gateway.websocket_url, receive_buffer_bytes=4096) as slow,
        Client(gateway.websocket_url) as quick,
    ):
        for client in (slow, quick):
            await client.greet(token(now=time.time()))
            await client.subscribe(room)
        slow.stop_reading()
        payload = "x" * 20_000
        for _ in range(20):
            await asyncio.to_thread(stack.publish, room, *[payload] * 20)
        await quick.until_offset(room, 400)
        assert len(slow.offsets(room)) < 400
        slow.read_on()
        await slow.until_offset(room, 400)
        stack.publish(room, "live again")
        await slow.until_offset(room, 401)
        await quick.until_offset(room, 401)


async def test_a_client_that_reads_nothing_is_closed_and_can_resume(
    stack: Stack, room: str
) -> None:
    stack.relay()
    gateway = stack.gateway(
        TIDEGATE_CLIENT_BUFFER_BYTES="16384", TIDEGATE_CLIENT_STALL_TIMEOUT_S="0.5"
    )
    redis = connect(stack.redis.url)
    async with Client(gateway.websocket_url, receive_buffer_bytes=65_536) as stalled:
        await stalled.greet(token(now=time.time()))
        await stalled.subscribe(room)
        stalled.stop_reading()
        await _until_connections(redis, 1)
        await asyncio.to_thread(stack.publish, room, *["x" * 20_000] * 400)
        await _until_connections(redis, 0)
        stalled.read_on()
        # 1006 if the gateway has cut the connection before the close frame was read.
        assert await stalled.until_closed() in (3008, 1006)
        got = stalled.positions[room]
        assert got[0] < 400
    await redis.aclose()
    async with Client(gateway.websocket_url) as again:
        await again.greet(token(now=time.time()))
        reply = await again.subscribe(room, got)
        assert reply["recovered"] is True
        await again.until_offset(room, 400)


async def _until_connections(redis: Any, count: int) -> None:
    """Until the only worker says that it has so many."""
    async with asyncio.timeout(20):
        while True:
            lines = await redis.hgetall(keys.GATEWAYS)
            if lines and sum(json.loads(line)["connections"] for line in lines.values()) == count:
                return
            await asyncio.sleep(0.02)


async def test_a_client_that_answers_no_ping_is_closed(stack: Stack) -> None:
    gateway = stack.gateway(TIDEGATE_PING_INTERVAL_S="1", TIDEGATE_PONG_TIMEOUT_S="0.5")
    async with (
        Client(gateway.websocket_url) as silent,
        Client(gateway.websocket_url) as alive,
        Client(gateway.websocket_url) as shy,
    ):
        await silent.greet()
        silent.pongs = False
        await alive.greet()
        assert await silent.until_closed() == 3012
        await alive.until(lambda: alive.pings >= 3)
        # It has said nothing: the time for that is over later.
        assert shy.socket.close_code is None


async def test_a_client_that_never_connects_is_closed(stack: Stack) -> None:
    gateway = stack.gateway(TIDEGATE_HANDSHAKE_TIMEOUT_S="0.3")
    async with Client(gateway.websocket_url) as silent:
        assert await silent.until_closed() == 3502


async def test_no_secret_and_no_payload_is_logged(shared: Stack, room: str) -> None:
    gateway = shared.processes.all["gateway"]
    secret = token("mallory", now=time.time())
    async with Client(f"{gateway.websocket_url}?token={secret}&cf=1") as client:
        await client.greet(secret)
        await client.subscribe(room)
        await client.call("publish", channel="chat:logs", data={"the": "payload-of-the-client"})
        shared.publish(room, {"the": "payload-of-the-row"})
        await client.until_offset(room, 1)
        await client.send('{"id": 9, "connect": {"token": "a-token-in-a-broken-frame", }')
        await client.until_closed()
    async with Client(gateway.websocket_url) as client:
        await client.send(json.dumps({"id": 1, "connect": {"token": secret[:-3] + "abc"}}))
        assert await client.until_closed() == 3500
    for process in shared.processes.all.values():
        text = process.text()
        for hidden in (secret, secret[:-3], SECRET, API_KEY, "payload-of", "a-token-in"):
            assert hidden not in text, process.name
        assert re.search(r":[^@/\s\[]{8,}@", text) is None


JUMP = """
import os, sys, time
real = time.time
time.time = lambda: real() + float(os.environ["JUMP_S"]) * os.path.exists(os.environ["JUMP_WHEN"])
from gateway.__main__ import main
sys.argv[0] = "tidegate"
main()
"""
"""A gateway on a machine whose time of day is set as soon as a file is there."""


@pytest.mark.parametrize("jump_s", [-3_600, 3_600])
async def test_a_machines_clock_that_is_set_disturbs_no_connection(
    stack: Stack, tmp_path: Path, jump_s: int
) -> None:
    now = tmp_path / "now"
    settings = {
        **stack.settings,
        "TIDEGATE_PING_INTERVAL_S": "1",
        "TIDEGATE_PONG_TIMEOUT_S": "0.9",
        "JUMP_S": str(jump_s),
        "JUMP_WHEN": str(now),
    }
    port = stack.processes.reserve_port()
    gateway = stack.processes.start_python(
        "gateway", "-c", JUMP, "gateway", "--port", str(port), **settings
    )
    gateway.port = port
    await asyncio.to_thread(gateway.wait_ready)
    async with Client(gateway.websocket_url) as client:
        began = time.monotonic()
        await client.greet(token(now=time.time(), ttl_s=6))
        await client.until(lambda: client.pings >= 1)
        now.touch()
        pings = client.pings
        await client.until(lambda: client.pings >= pings + 2)
        # What was left to its token at that time is what it gets.
        assert await client.until_closed() == codes.CONNECTION_EXPIRED.code
        assert 4 <= time.monotonic() - began <= 10
