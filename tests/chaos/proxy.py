"""A TCP proxy that misbehaves on command: one for each link of the system under test.

``freeze`` keeps the peers' TCP content (their bytes are acknowledged) and passes nothing on, like a
server or a proxy that hangs. ``black_hole`` and ``half_open`` drop the packets themselves, so that
not even a keep-alive is answered, like a broken route or a forgotten entry of a NAT: a packet
filter on the sockets does it, which Linux allows to everybody; elsewhere they only freeze.
"""

import asyncio
import ctypes
import random
import socket
import struct
import sys
from contextlib import suppress
from typing import Self

HOST = "127.0.0.1"
READ_BYTES = 65_536
TICK_S = 0.05
"""A throttled link passes on what the rate allows for so long."""

# <linux/filter.h>: one instruction, "return 0", keeps no byte of any packet.
_DROP_ALL = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0), 8)
_PROGRAM = struct.pack("@HP", 1, ctypes.addressof(_DROP_ALL))
_ATTACH_FILTER, _DETACH_FILTER = 26, 27


class Link:
    """``async with Link("relay-1 to redis", port) as link``: peers connect to ``link.port``.

    With several target ports each new connection goes to the next one, as behind a load balancer.
    Every method that changes the link may be called at any time and takes effect at once.
    """

    def __init__(self, name: str, *targets: int, receive_buffer_bytes: int | None = None) -> None:
        """``receive_buffer_bytes``: how much the proxy's sockets take in before they are read."""
        self.name = name
        self.port = 0
        self.targets = list(targets)
        """Ports; may be changed for connections to come."""
        self.connections = 0
        """How many were accepted so far."""
        self._turn = 0
        self._delay_s = 0.0
        self._bytes_per_s = 0.0
        self._refusing = False
        self._blind = False
        self._open = asyncio.Event()
        self._open.set()
        self._pairs: set[_Pair] = set()
        self._serving: asyncio.Task[None] | None = None
        self._receive_buffer_bytes = receive_buffer_bytes
        self._listener: socket.socket

    async def __aenter__(self) -> Self:
        self._listener = socket.create_server((HOST, 0), backlog=512)
        self.bound(self._listener)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._serving = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._serving is not None
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._listener.close()
        pairs = list(self._pairs)
        self.cut()
        await asyncio.gather(*(pair.task for pair in pairs), return_exceptions=True)

    @property
    def active(self) -> int:
        """Connections that are open now."""
        return len(self._pairs)

    # Faults

    def heal(self) -> None:
        """Pass on again. Connections that ``half_open`` has killed stay dead."""
        self._delay_s = self._bytes_per_s = 0.0
        self._refusing = False
        if self._blind:
            self._blind = False
            _see(self._listener)
            for pair in self._pairs:
                pair.see()
        self._open.set()

    def delay(self, seconds: float) -> None:
        """Pass each piece on so much later; half of the time at least."""
        self._delay_s = seconds

    def throttle(self, bytes_per_s: float) -> None:
        """Pass on no more than this, in each direction of each connection."""
        self._bytes_per_s = bytes_per_s

    def freeze(self) -> None:
        """Pass nothing on and close nothing; new connections are accepted and as silent."""
        self._open.clear()

    def cut(self) -> None:
        """Reset all present connections."""
        for pair in list(self._pairs):
            pair.abort()

    def refuse(self) -> None:
        """Reset all present connections, and new ones as soon as they come."""
        self._refusing = True
        self.cut()

    def half_open(self) -> None:
        """All present connections die without a word to either side; new ones are as usual."""
        for pair in self._pairs:
            pair.die()

    def black_hole(self) -> None:
        """Drop all packets, also those that would open a connection."""
        self._blind = True
        self._open.clear()
        _blind(self._listener)
        for pair in self._pairs:
            pair.blind()

    def lead_to(self, *targets: int) -> None:
        """From now on the link ends elsewhere: present connections are reset."""
        self.targets[:] = targets
        self.cut()

    # What the connections ask

    def bound(self, end: socket.socket) -> None:
        """Gives a socket the receive buffer of this link, which must come before it connects."""
        if self._receive_buffer_bytes is not None:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer_bytes)

    async def clearance(self, count_bytes: int) -> None:
        """Waits until a piece may pass."""
        await self._open.wait()
        if self._delay_s:
            await asyncio.sleep(self._delay_s * random.uniform(0.5, 1.0))
        if self._bytes_per_s:
            await asyncio.sleep(count_bytes / self._bytes_per_s)
        await self._open.wait()

    @property
    def piece_bytes(self) -> int:
        """How much to take at once."""
        if not self._bytes_per_s:
            return READ_BYTES
        return max(64, min(READ_BYTES, int(self._bytes_per_s * TICK_S)))

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(self._listener)
            self.connections += 1
            if self._refusing or not self.targets:
                _abort(client)
                continue
            target = self.targets[self._turn % len(self.targets)]
            self._turn += 1
            pair = _Pair(self, client, target)
            self._pairs.add(pair)
            pair.task.add_done_callback(lambda _, pair=pair: self._pairs.discard(pair))


class _Pair:
    """One connection through the proxy."""

    def __init__(self, link: Link, client: socket.socket, target: int) -> None:
        self._link = link
        self._sockets = [client]
        self._dead = False
        client.setblocking(False)
        self.task = asyncio.create_task(self._run(client, target))

    async def _run(self, client: socket.socket, target: int) -> None:
        loop = asyncio.get_running_loop()
        server = socket.socket()
        server.setblocking(False)
        self._link.bound(server)
        self._sockets.append(server)
        try:
            await self._link.clearance(0)
            await loop.sock_connect(server, (HOST, target))
            for end in self._sockets:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(client, server))
                group.create_task(self._pump(server, client))
        except* OSError:
            pass
        finally:
            for end in self._sockets:
                _abort(end)

    async def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            data = await loop.sock_recv(source, self._link.piece_bytes)
            await self._link.clearance(len(data))
            if self._dead:
                await asyncio.Event().wait()
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(sink, data)

    def abort(self) -> None:
        self.task.cancel()

    def die(self) -> None:
        self._dead = True
        self.blind()

    def blind(self) -> None:
        for end in self._sockets:
            _blind(end)

    def see(self) -> None:
        if not self._dead:
            for end in self._sockets:
                _see(end)


def _abort(end: socket.socket) -> None:
    """Close with a reset."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def _blind(end: socket.socket) -> None:
    if sys.platform == "linux" and end.fileno() >= 0:
        end.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, _PROGRAM)


def _see(end: socket.socket) -> None:
    # A connection that came with the listener's filter has it, too; one may have none.
    if sys.platform == "linux" and end.fileno() >= 0:
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
