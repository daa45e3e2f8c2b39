"""A client that speaks the Centrifuge protocol without an SDK, and so sees each frame itself.

It keeps its positions and resumes from them, as an SDK does, but it checks nothing and leaves out
nothing: whatever the gateway sends to it stands in its diary.
"""

import asyncio
import itertools
import json
import random
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from outbox import tasks
from tests.sdk.client import MAX_DELAY_MS, MIN_DELAY_MS, TIMEOUT_S, Diary, Said


class RawClient:
    """Has the part of ``tests.sdk.client.Client`` that resuming needs."""

    def __init__(self, url: str, token: str, seed: int) -> None:
        self.diary = Diary()
        self._url = url
        self._token = token
        self._random = random.Random(seed)
        self._positions: dict[str, tuple[int, str]] = {}
        self._wanted: dict[str, None] = {}
        self._held: set[str] = set()
        self._pending: dict[int, tuple[str, str]] = {}
        self._ids = itertools.count(1)
        self._socket: ClientConnection | None = None
        self._greeted = False
        self._running: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        assert self._running is None
        self._running = asyncio.create_task(self._run())

    async def disconnect(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await tasks.end((running,))
            if not running.cancelled():
                running.result()

    async def close(self) -> None:
        await self.disconnect()

    async def subscribe(self, channel: str, since: tuple[int, str] | None = None) -> None:
        self._wanted[channel] = None
        if since is not None:
            self._positions[channel] = since
        # What comes until the server has let it go moves the position.
        if self._greeted and not self._is_leaving(channel):
            await self._send(self._subscribe(channel))

    async def unsubscribe(self, channel: str) -> None:
        del self._wanted[channel]
        if self._greeted:
            await self._send(self._command("unsubscribe", channel))

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                async with connect(
                    self._url, ping_interval=None, max_size=None, proxy=None, close_timeout=1
                ) as self._socket:
                    await self._send(self._greeting())
                    while True:
                        frame = await self._frame(self._socket)
                        for line in frame.split("\n"):
                            failures = 0
                            await self._told(json.loads(line))
            except (OSError, TimeoutError, InvalidHandshake):
                failures += 1
            except ConnectionClosed as closed:
                self._diary_close(closed.rcvd.code if closed.rcvd else 1006)
            finally:
                self._interrupt()
            longest_ms = min(MAX_DELAY_MS, MIN_DELAY_MS * 2**failures)
            await asyncio.sleep(self._random.uniform(0, longest_ms / 1000))

    async def _frame(self, socket: ClientConnection) -> str:
        """The next frame. Raises ConnectionClosed; TimeoutError makes a new connection, too."""
        return str(await socket.recv())

    def _diary_close(self, code: int) -> None:
        self.diary.add(Said("closed", "", {"code": code}))
        if 3500 <= code < 4000 or 4500 <= code < 5000:
            self.diary.add(Said("disconnected", "", {"code": code, "reason": "closed for good"}))

    def _interrupt(self) -> None:
        self._socket, self._greeted = None, False
        self._pending.clear()
        for channel in self._held:
            self.diary.add(Said("subscribing", channel, {"code": 1, "reason": "closed"}))
        self._held.clear()

    # Commands

    def _greeting(self) -> str:
        """The connect command, in half of the cases with all subscribes in the same frame."""
        number = next(self._ids)
        self._pending[number] = ("connect", "")
        lines = [json.dumps({"id": number, "connect": {"token": self._token}})]
        self._together = self._random.random() < 0.5
        if self._together:
            self._greeted = True
            lines += [self._subscribe(channel) for channel in self._wanted]
        return "\n".join(lines)

    def _is_leaving(self, channel: str) -> bool:
        return ("unsubscribe", channel) in self._pending.values()

    def _subscribe(self, channel: str) -> str:
        fields: dict[str, Any] = {"recoverable": True, "positioned": True}
        if position := self._positions.get(channel):
            fields |= {"recover": True, "offset": position[0], "epoch": position[1]}
        return self._command("subscribe", channel, **fields)

    def _command(self, name: str, channel: str, **fields: Any) -> str:
        number = next(self._ids)
        self._pending[number] = (name, channel)
        return json.dumps({"id": number, name: {"channel": channel, **fields}})

    async def _send(self, *lines: str) -> None:
        socket = self._socket
        if socket is None or not lines:
            return
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await socket.send("\n".join(lines))
        except ConnectionClosed:
            return  # the reader sees it too, and comes back

    # What the gateway says

    async def _told(self, said: dict[str, Any]) -> None:
        if not said:
            await self._send("{}")
        elif "push" in said:
            await self._pushed(said["push"])
        elif "connect" in said:
            del self._pending[said["id"]]
            self.diary.add(Said("connected", "", {"id": said["connect"]["client"]}))
            if not self._together:
                self._greeted = True
                await self._send(*map(self._subscribe, self._wanted))
        else:
            await self._answered(*self._pending.pop(said["id"]), said)

    async def _answered(self, name: str, channel: str, said: dict[str, Any]) -> None:
        if error := said.get("error"):
            self.diary.add(Said("error", channel, error))
            if name == "subscribe" and self._is_leaving(channel):
                return  # The server gave it up.
            if not (error.get("temporary") or error["code"] < 100):
                self.diary.add(
                    Said("disconnected", "", {"code": error["code"], "reason": error["message"]})
                )
            elif name == "connect":
                assert self._socket is not None
                await self._socket.close()
            elif name == "subscribe" and channel in self._wanted:
                await asyncio.sleep(self._random.uniform(0, MAX_DELAY_MS / 1000))
                await self._send(self._subscribe(channel))
        elif name == "unsubscribe":
            self._held.discard(channel)
            self.diary.add(Said("unsubscribed", channel, {"code": 0, "reason": "left"}))
            if channel in self._wanted:
                await self._send(self._subscribe(channel))
        elif name == "subscribe":
            await self._subscribed(channel, said["subscribe"])

    async def _subscribed(self, channel: str, reply: dict[str, Any]) -> None:
        position = {"offset": reply["offset"], "epoch": reply["epoch"]}
        self._positions[channel] = (reply["offset"], reply["epoch"])
        self._held.add(channel)
        self.diary.add(
            Said(
                "subscribed",
                channel,
                {
                    "recoverable": reply.get("recoverable", False),
                    "was_recovering": reply.get("was_recovering", False),
                    "recovered": reply.get("recovered", False),
                    "position": position,
                },
            )
        )
        for publication in reply.get("publications", ()):
            self._published(channel, publication)

    async def _pushed(self, push: dict[str, Any]) -> None:
        channel = push["channel"]
        if "pub" in push:
            self._published(channel, push["pub"])
        elif ended := push.get("unsubscribe"):
            self._held.discard(channel)
            event = "subscribing" if ended["code"] >= 2500 else "unsubscribed"
            self.diary.add(Said(event, channel, ended))
            if ended["code"] >= 2500:
                await self._send(self._subscribe(channel))

    def _published(self, channel: str, publication: dict[str, Any]) -> None:
        _, epoch = self._positions.get(channel, (0, ""))
        self._positions[channel] = (publication["offset"], epoch)
        self.diary.add(
            Said(
                "publication",
                channel,
                {
                    "offset": publication["offset"],
                    "data": publication["data"],
                    "tags": publication.get("tags", {}),
                },
            )
        )
