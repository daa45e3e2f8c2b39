"""A client that prints a room's messages and checks that none is missing.

It speaks the Centrifuge client protocol as JSON, as any SDK does, and so shows what a client sees.
"""

import asyncio
import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw, Struct
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
    WebSocketException,
)

from gateway import codes
from gateway.continuity import Continuity, Position, Verdict

OPEN_TIMEOUT_S: Final = 10.0
REPLY_TIMEOUT_S: Final = 10.0
PING_GRACE_S: Final = 10.0
"""What the SDKs give a server above its ping interval."""
FRAME_MAX_BYTES: Final = 67_108_864
BACKOFF_FIRST_S: Final = 0.5
BACKOFF_MAX_S: Final = 20.0

_CONNECT, _SUBSCRIBE = 1, 2


class TailFailed(Exception):
    """The gateway refused for good, or cannot be reached at the start. One line."""


class _Lost(Exception):
    """The connection ended in a way that one comes back from. The text says why."""


@dataclass(frozen=True, slots=True)
class TailOptions:
    """What to follow and how."""

    url: str
    room: str
    token: Callable[[], str | None]
    """Asked for a token at each connection; None connects as an anonymous client."""
    since: Position | None = None
    """Where to begin; None: at the present."""
    count: int | None = None
    """Stop after so many messages."""
    strict: bool = False
    """End when the gateway says that continuity was lost."""


class _Code(Struct):
    code: int = 0
    reason: str = ""


class _Error(Struct):
    code: int = 0
    message: str = ""
    temporary: bool = False


class _Publication(Struct):
    offset: int = 0
    data: Raw = Raw(b"null")
    tags: Raw = Raw(b"{}")


class _Connected(Struct):
    ping: float = 0


class _Subscribed(Struct):
    epoch: str = ""
    offset: int = 0
    recovered: bool = False
    publications: list[_Publication] = msgspec.field(default_factory=list)


class _Push(Struct):
    channel: str = ""
    pub: _Publication | None = None
    unsubscribe: _Code | None = None
    disconnect: _Code | None = None


class _Said(Struct):
    """One line of a gateway: a reply or a push; a ping if nothing is set."""

    id: int = 0
    error: _Error | None = None
    connect: _Connected | None = None
    subscribe: _Subscribed | None = None
    push: _Push | None = None


_decode = msgspec.json.Decoder(_Said).decode
_encode = msgspec.json.Encoder().encode


class Tail:
    """Follows one room until it is stopped, has enough, or may not go on."""

    def __init__(
        self,
        options: TailOptions,
        write: Callable[[bytes], None],
        warn: Callable[[str], None],
    ) -> None:
        """``write`` gets each message as a JSON line, ``warn`` each line for the user."""
        self.continuity = Continuity(options.since)
        self._options = options
        self._write = write
        self._warn = warn
        self._enough = False
        self._began = False
        self._attempt = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Follow until ``stop`` is set or enough was seen. Raises TailFailed."""
        following = asyncio.ensure_future(self._follow())
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            for task in (following, stopping):
                task.cancel()
            await asyncio.gather(following, stopping, return_exceptions=True)

    def summary(self) -> str:
        """One line: what was seen, and where to resume."""
        tally = self.continuity.tally
        position = self.continuity.position
        last = position.offset if position else 0
        span = f", offsets {tally.first}…{last}" if tally.first is not None else ""
        return (
            f"{tally.messages} messages of {self._options.room}{span}; "
            f"{tally.missing} missing, {tally.repeated} repeated, "
            f"{tally.lost} times not recovered, {tally.reconnects} reconnects"
            + (f"; resume with --since {position}" if position else "")
        )

    async def _follow(self) -> None:
        while not self._enough:
            try:
                await self._connection()
            except _Lost as lost:
                if not self._began:
                    raise TailFailed(
                        f"cannot follow {self._options.room} at {self._options.url}: {lost}"
                    ) from None
                delay_s = backoff_s(self._attempt, random.random())  # noqa: S311  spreads load
                self._warn(f"connection lost: {lost}; reconnecting in {delay_s:.1f} s")
                await asyncio.sleep(delay_s)
                self._attempt += 1
                self.continuity.reconnected()

    async def _connection(self) -> None:
        """One connection, from its handshake to its end."""
        try:
            async with connect(
                self._options.url,
                open_timeout=OPEN_TIMEOUT_S,
                close_timeout=1,
                ping_interval=None,  # The gateway pings, in the protocol above.
                max_size=FRAME_MAX_BYTES,
                compression=None,
                proxy=None if _is_loopback(self._options.url) else True,
            ) as socket:
                ping_s = await self._greet(socket)
                while not self._enough:
                    for said in await _lines(socket, ping_s + PING_GRACE_S):
                        await self._heard(socket, said)
        except InvalidURI:
            raise TailFailed(
                f"{self._options.url} is not a WebSocket URL: ws://host:port/…"
            ) from None
        except InvalidStatus as error:
            status = error.response.status_code
            if status < 500 and status not in (408, 425, 429):
                raise TailFailed(f"{self._options.url} answers HTTP status {status}") from None
            raise _Lost(f"HTTP status {status}") from None
        except InvalidHandshake as error:
            raise _Lost(f"no WebSocket handshake: {error}") from None
        except ConnectionClosed as error:
            if error.rcvd is None:
                raise _Lost("no close frame") from None
            raise _ended(codes.CloseCode(error.rcvd.code, error.rcvd.reason)) from None
        except TimeoutError:
            raise _Lost("the gateway is silent") from None
        except (OSError, WebSocketException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise _Lost(reason) from None

    async def _greet(self, socket: ClientConnection) -> float:
        """Connect and ask for the subscription; the gateway's ping interval, inf for none."""
        token = self._options.token()
        body = {"name": "tidegate-tail"} | ({"token": token} if token else {})
        await socket.send(_encode({"id": _CONNECT, "connect": body}).decode())
        for said in await _lines(socket, REPLY_TIMEOUT_S):
            if said.error:
                raise _refused("connect", said.error)
            if said.connect:
                subscribe: dict[str, object] = {
                    "channel": self._options.room,
                    "recoverable": True,
                    "positioned": True,
                }
                if held := self.continuity.position:
                    subscribe |= {"recover": True, "epoch": held.epoch, "offset": held.offset}
                command = {"id": _SUBSCRIBE, "subscribe": subscribe}
                await socket.send(_encode(command).decode())
                return said.connect.ping or math.inf
        raise TailFailed("the gateway's first answer is not one to connect")

    async def _heard(self, socket: ClientConnection, said: _Said) -> None:
        if said.error:
            raise _refused("subscribe" if said.id == _SUBSCRIBE else "connect", said.error)
        if said.subscribe:
            self._subscribed(said.subscribe)
            return
        if said.push is None:
            if not said.id:
                await socket.send("{}")
            return
        if said.push.unsubscribe:
            code = codes.UnsubscribeCode(said.push.unsubscribe.code, said.push.unsubscribe.reason)
            text = f"unsubscribed with {code.code} ({code.reason})"
            raise _Lost(text) if code.resubscribe else TailFailed(text)
        if said.push.disconnect:
            close = codes.CloseCode(said.push.disconnect.code, said.push.disconnect.reason)
            raise _ended(close)
        if said.push.pub and said.push.channel == self._options.room:
            self._publication(said.push.pub)

    def _subscribed(self, reply: _Subscribed) -> None:
        self._began, self._attempt = True, 0
        told = self.continuity.subscribed(reply.epoch, reply.offset, reply.recovered)
        if told:
            self._warn(told)
            if self._options.strict:
                raise TailFailed("stopped, since --strict was given")
        for publication in reply.publications:
            self._publication(publication)

    def _publication(self, publication: _Publication) -> None:
        if self._enough:
            return
        held = self.continuity.position
        verdict = self.continuity.arrived(publication.offset)
        if verdict is Verdict.REPEATED:
            self._warn(f"repeated: offset {publication.offset} after {held}")
        elif verdict is Verdict.HOLE:
            raise _Lost(f"a hole: offset {publication.offset} after {held}")
        else:
            self._write(
                b'{"offset":%d,"data":%b,"tags":%b}\n'
                % (publication.offset, bytes(publication.data), bytes(publication.tags))
            )
            self._enough = self.continuity.tally.messages == self._options.count


def backoff_s(attempt: int, fraction: float) -> float:
    """How long to wait before reconnecting: up to 0.5 s, doubling to 20 s, of it at least half."""
    longest = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(attempt, 16))
    return longest * (0.5 + 0.5 * fraction)


async def _lines(socket: ClientConnection, timeout_s: float) -> list[_Said]:
    async with asyncio.timeout(None if math.isinf(timeout_s) else timeout_s):
        frame = await socket.recv()
    try:
        text = frame if isinstance(frame, str) else frame.decode()
        return [_decode(line) for line in text.split("\n") if line]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TailFailed(f"the gateway sent what is not the protocol: {error}") from None


def _refused(command: str, error: _Error) -> Exception:
    code = codes.ErrorCode(error.code, error.message, error.temporary)
    text = f"{command} refused with {code.code} ({code.message})"
    return _Lost(text) if code.retried else TailFailed(text)


def _ended(close: codes.CloseCode) -> Exception:
    text = f"closed with {close.code} ({close.reason or 'no reason'})"
    return _Lost(text) if close.reconnect else TailFailed(text)


def _is_loopback(url: str) -> bool:
    with contextlib.suppress(ValueError):
        return urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
    return False
