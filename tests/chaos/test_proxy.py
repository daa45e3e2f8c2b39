"""The faults of a link, seen from both of its ends."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.chaos.proxy import HOST, Link

SILENCE_S = 0.3
"""Long enough for a piece to pass, were it to."""


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """The port of a server that sends back what it is sent."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, HOST, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


class Peer:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answers(self, within_s: float = 10.0, data: bytes = b"x") -> bool:
        """Whether what is sent comes back in time."""
        self.writer.write(data)
        try:
            async with asyncio.timeout(within_s):
                return await self.reader.readexactly(len(data)) == data
        except TimeoutError:
            return False

    async def is_reset(self) -> bool:
        async with asyncio.timeout(10):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True


@asynccontextmanager
async def peer(link: Link) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection(HOST, link.port)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()


async def test_pass(echo: int) -> None:
    async with Link("link", echo) as link, peer(link) as one, peer(link) as two:
        assert await one.answers(data=b"a" * 3_000_000)
        assert await two.answers()
        assert link.connections == link.active == 2
        one.writer.write_eof()
        assert await one.reader.read() == b""


async def test_freeze(echo: int) -> None:
    async with Link("link", echo) as link, peer(link) as one:
        assert await one.answers()
        link.freeze()
        assert not await one.answers(SILENCE_S)
        async with peer(link) as two:
            assert not await two.answers(SILENCE_S)
            link.heal()
            assert await one.reader.readexactly(1) == b"x"
            assert await two.reader.readexactly(1) == b"x"
            assert await two.answers()


async def test_delay_and_throttle(echo: int) -> None:
    loop = asyncio.get_running_loop()
    async with Link("link", echo) as link, peer(link) as one:
        link.delay(0.2)
        began = loop.time()
        assert await one.answers()
        assert loop.time() - began >= 0.2
        link.heal()
        link.throttle(10_000)
        began = loop.time()
        assert await one.answers(data=b"a" * 5_000)
        assert loop.time() - began >= 0.5


async def test_cut_and_refuse(echo: int) -> None:
    async with Link("link", echo) as link:
        async with peer(link) as one:
            assert await one.answers()
            link.cut()
            assert await one.is_reset()
        async with peer(link) as one:
            assert await one.answers()
            link.refuse()
            assert await one.is_reset()
        async with peer(link) as one:
            assert await one.is_reset()
        link.heal()
        async with peer(link) as one:
            assert await one.answers()


async def test_half_open(echo: int) -> None:
    async with Link("link", echo) as link, peer(link) as one:
        assert await one.answers()
        link.half_open()
        async with peer(link) as two:
            assert await two.answers()
            assert not await one.answers(SILENCE_S)
            link.heal()
            assert not await one.answers(SILENCE_S)


@pytest.mark.skipif(sys.platform != "linux", reason="packets can be dropped on Linux only")
async def test_black_hole(echo: int) -> None:
    loop = asyncio.get_running_loop()
    async with Link("link", echo) as link, peer(link) as one:
        assert await one.answers()
        link.black_hole()
        with socket.socket() as late:
            late.setblocking(False)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(SILENCE_S):
                    await loop.sock_connect(late, (HOST, link.port))
        assert not await one.answers(SILENCE_S)
        link.heal()
        # The kernel sends again what was not acknowledged.
        async with asyncio.timeout(20):
            assert await one.reader.readexactly(1) == b"x"
        assert await one.answers()


@pytest.mark.skipif(sys.platform != "linux", reason="packets can be dropped on Linux only")
async def test_a_dropped_packet_is_not_acknowledged(echo: int) -> None:
    async with Link("link", echo) as link, peer(link) as one:
        assert await one.answers()
        end = one.writer.get_extra_info("socket")
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 500)
        link.half_open()
        one.writer.write(b"x")
        with pytest.raises(TimeoutError):
            await one.reader.read(1)


async def test_other_targets(echo: int) -> None:
    async with (
        Link("inner", echo) as first,
        Link("inner", echo) as second,
        Link("outer", first.port, second.port) as link,
    ):
        async with peer(link) as one, peer(link) as two:
            assert await one.answers()
            assert await two.answers()
            assert first.connections == second.connections == 1
            link.lead_to(second.port)
            assert await one.is_reset()
        async with peer(link) as one:
            assert await one.answers()
        assert second.connections == 2
