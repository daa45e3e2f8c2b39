"""A raw client of the gateway's protocol: sends what it is told, checks all that it is sent.

Each publication must follow the one before it in its room, without a hole or a repetition; whatever
breaks this fails the test at its next step. Unlike an SDK it never acts by itself, except that it
answers pings (``pongs``).
"""

import asyncio
import json
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

TIMEOUT_S = 20.0
Position = tuple[int, str]
"""Offset and epoch."""


class Refused(Exception):
    """The reply was an error."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(str(error))
        self.code: int = error["code"]
        self.message: str = error["message"]
        self.temporary: bool = error.get("temporary", False)


class Client:
    """``async with Client(url) as client: await client.greet(token)``."""

    def __init__(
        self, url: str, *, receive_buffer_bytes: int | None = None, **options: Any
    ) -> None:
        self.pushes: list[dict[str, Any]] = []
        """All pushes in order, pings left out."""
        self.received: dict[str, list[dict[str, Any]]] = {}
        """Publications by room, those in replies to ``subscribe`` included."""
        self.positions: dict[str, Position] = {}
        self.evicted: dict[str, int] = {}
        self.pings = 0
        self.pongs = True
        self.frames = 0
        self._url = url
        self._receive_buffer_bytes = receive_buffer_bytes
        self._options: dict[str, Any] = {
            "ping_interval": None,
            "max_size": None,
            "max_queue": 1,
            "compression": None,
            "proxy": None,
            "close_timeout": 2,
            **options,
        }
        self._ids = 0
        self._joining: dict[int, str] = {}
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._changed = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        self._reader: asyncio.Task[None] | None = None
        self.socket: ClientConnection

    async def __aenter__(self) -> Self:
        options = self._options
        if self._receive_buffer_bytes is not None:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer_bytes)
            sock.setblocking(False)
            parts = urlsplit(self._url)
            await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
            options = {**options, "sock": sock}
        self.socket = await connect(self._url, **options)
        self._reader = asyncio.ensure_future(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._reader is not None
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        if self.socket.close_code is None:
            await self.socket.close()
        if kind is None and self._reader.done() and not self._reader.cancelled():
            self._check()

    # What a test does

    async def greet(self, token: str = "", **fields: Any) -> dict[str, Any]:
        """The ``connect`` command."""
        return await self.call("connect", token=token, **fields)

    async def call(self, method: str, **fields: Any) -> dict[str, Any]:
        """Sends a command and gives the reply's body. Raises Refused."""
        reply = await self.ask({method: fields})
        if "error" in reply:
            raise Refused(reply["error"])
        body: dict[str, Any] = reply[method]
        return body

    async def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Sends a command with the next id and gives the whole reply."""
        self._ids += 1
        future = asyncio.get_running_loop().create_future()
        self._waiting[self._ids] = future
        if "subscribe" in command:
            self._joining[self._ids] = command["subscribe"]["channel"]
        await self.send(json.dumps({"id": self._ids, **command}))
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.wait((future, self._running()), return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            self._check()
            raise AssertionError(f"closed before a reply to {command}: {self.socket.close_code}")
        reply: dict[str, Any] = future.result()
        return reply

    async def send(self, frame: str | bytes) -> None:
        await self.socket.send(frame)

    async def subscribe(self, room: str, since: Position | None = None) -> dict[str, Any]:
        fields: dict[str, Any] = {"channel": room, "recoverable": True, "positioned": True}
        if since is not None:
            fields |= {"recover": True, "offset": since[0], "epoch": since[1]}
        return await self.call("subscribe", **fields)

    async def until(self, ready: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Waits until ``ready``, looked at after each frame."""
        try:
            async with asyncio.timeout(timeout_s):
                while not ready():
                    self._check()
                    if self._running().done():
                        raise AssertionError(f"closed: {self.socket.close_code}; {self._state()}")
                    self._changed.clear()
                    waiting = asyncio.ensure_future(self._changed.wait())
                    await asyncio.wait(
                        (waiting, self._running()), return_when=asyncio.FIRST_COMPLETED
                    )
                    waiting.cancel()
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s} s; {self._state()}") from None
        self._check()

    async def until_offset(self, room: str, offset: int, timeout_s: float = TIMEOUT_S) -> None:
        await self.until(lambda: self.positions.get(room, (0, ""))[0] >= offset, timeout_s)
        assert self.positions[room][0] == offset

    async def until_closed(self, timeout_s: float = TIMEOUT_S) -> int:
        """The close code."""
        async with asyncio.timeout(timeout_s):
            await asyncio.wait((self._running(),))
        self._check()
        assert self.socket.close_code is not None
        return self.socket.close_code

    def stop_reading(self) -> None:
        """From now on frames stay where they are: with the kernel, then with the gateway."""
        self._reading.clear()

    def read_on(self) -> None:
        self._reading.set()

    def offsets(self, room: str) -> list[int]:
        return [publication["offset"] for publication in self.received.get(room, [])]

    def data(self, room: str) -> list[Any]:
        return [publication["data"] for publication in self.received.get(room, [])]

    # What it is sent

    def _state(self) -> str:
        return f"positions {self.positions}, evicted {self.evicted}"

    def _running(self) -> "asyncio.Task[None]":
        assert self._reader is not None
        return self._reader

    def _check(self) -> None:
        reader = self._running()
        if reader.done() and not reader.cancelled() and (error := reader.exception()):
            raise error

    async def _read(self) -> None:
        try:
            while True:
                await self._reading.wait()
                frame = await self.socket.recv()
                assert isinstance(frame, str)
                self.frames += 1
                for line in frame.split("\n"):
                    await self._told(json.loads(line))
                self._changed.set()
        except ConnectionClosed:
            return

    async def _told(self, said: dict[str, Any]) -> None:
        if not said:
            self.pings += 1
            if self.pongs:
                await self.send("{}")
        elif "push" in said:
            self._pushed(said["push"])
        else:
            if "subscribe" in said:
                self._subscribed(said["id"], said["subscribe"])
            self._waiting.pop(said["id"]).set_result(said)

    def _subscribed(self, id: int, reply: dict[str, Any]) -> None:
        room = self._joining.pop(id)
        self.positions[room] = (reply["offset"], reply["epoch"])
        for publication in reply.get("publications", ()):
            self._published(room, publication)

    def _pushed(self, push: dict[str, Any]) -> None:
        self.pushes.append(push)
        if "pub" in push:
            self._published(push["channel"], push["pub"])
        elif "unsubscribe" in push:
            self.evicted[push["channel"]] = push["unsubscribe"]["code"]

    def _published(self, room: str, publication: dict[str, Any]) -> None:
        offset, epoch = self.positions[room]
        assert publication["offset"] == offset + 1, (
            f"{room}: {publication['offset']} after {offset}"
        )
        self.positions[room] = (offset + 1, epoch)
        self.received.setdefault(room, []).append(publication)
