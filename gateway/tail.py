"""A client that prints a room's messages and checks that none is missing.

It speaks the Centrifuge client protocol as JSON, as any SDK does, and so shows what a client sees.
"""

import asyncio
import contextlib
import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

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
from gateway.jsontext import elements, members

OPEN_TIMEOUT_S: Final = 10.0
REPLY_TIMEOUT_S: Final = 10.0
PING_GRACE_S: Final = 10.0
"""What the SDKs give a server above its ping interval."""
FRAME_MAX_BYTES: Final = 67_108_864
BACKOFF_FIRST_S: Final = 0.5
BACKOFF_MAX_S: Final = 20.0

_CONNECT, _SUBSCRIBE = 1, 2


class TailFailed(Exception):
    """The gateway refused for good, or none answers at the start. One line."""


class _Lost(Exception):
    """The connection ended in a way that one comes back from. The text says why."""


class _Unreachable(_Lost):
    """There was no connection: what listens there is no gateway, or nothing does."""


@dataclass(frozen=True, slots=True)
class TailOptions:
    """What to follow and how."""

    url: str
    room: str
    token: Callable[[], str | None]
    """Asked for a token at each connection; None connects as an anonymous client."""
    token_fixed: bool = False
    """Whether it is the same each time, so that waiting does not mend one that has expired."""
    since: Position | None = None
    """Where to begin; None: at the present."""
    count: int | None = None
    """Stop after so many messages."""
    strict: bool = False
    """End when the gateway says that continuity was lost."""


class _Wrong(ValueError):
    """What the gateway sent is not the protocol."""


@dataclass(frozen=True, slots=True)
class _Publication:
    offset: int
    data: str
    tags: str


def _publication(text: str) -> _Publication:
    fields = members(text)
    return _Publication(
        _integer(fields.get("offset")), fields.get("data", "null"), fields.get("tags", "{}")
    )


def _integer(text: str | None) -> int:
    return int(text) if text is not None else 0


def _code(text: str) -> tuple[int, str]:
    """Code and words of an error, an unsubscribe or a disconnect."""
    fields = members(text)
    words = fields.get("message") or fields.get("reason") or '""'
    return _integer(fields.get("code")), str(json.loads(words))


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
        self.began = False
        """Whether there has been a subscription."""
        self._reached = False
        """Whether there has been a connection."""
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
                if isinstance(lost, _Unreachable) and not self._reached:
                    raise TailFailed(
                        f"no gateway answers at {self._shown_url} ({lost}): is one running? give "
                        "its address with --url"
                    ) from None
                delay_s = backoff_s(self._attempt, random.random())
                self._warn(
                    f"connection lost: {lost}; reconnecting in {delay_s:.1f} s"
                    if self.began
                    else f"{lost}; trying again in {delay_s:.1f} s"
                )
                await asyncio.sleep(delay_s)
                self._attempt += 1
                if self.began:
                    self.continuity.reconnected()

    @property
    def _shown_url(self) -> str:
        """Without its query, which may hold a token."""
        return self._options.url.partition("?")[0]

    async def _connection(self) -> None:
        """One connection, from its handshake to its end."""
        connected = False
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
                connected = self._reached = True
                ping_s = await self._greet(socket)
                while not self._enough:
                    for said in await _lines(socket, ping_s + PING_GRACE_S):
                        await self._heard(socket, said)
        except InvalidURI:
            raise TailFailed(
                f"{self._shown_url} is not a WebSocket URL: ws://host:port/…"
            ) from None
        except InvalidStatus as error:
            status = error.response.status_code
            if status < 500 and status not in (408, 425, 429):
                raise TailFailed(f"{self._shown_url} answers HTTP status {status}") from None
            raise _Lost(f"HTTP status {status}") from None
        except InvalidHandshake as error:
            raise _Unreachable(f"no WebSocket handshake: {error}") from None
        except ConnectionClosed as error:
            if error.rcvd is None:
                raise _Lost("no close frame") from None
            raise _ended(codes.CloseCode(error.rcvd.code, error.rcvd.reason)) from None
        except TimeoutError:
            raise (_Lost if connected else _Unreachable)("the gateway is silent") from None
        except ValueError as error:
            raise TailFailed(f"the gateway sent what is not the protocol: {error}") from None
        except (OSError, WebSocketException) as error:
            number = getattr(error, "errno", None)
            reason = (os.strerror(number) if number else str(error)) or type(error).__name__
            raise (_Lost if connected else _Unreachable)(reason) from None

    async def _greet(self, socket: ClientConnection) -> float:
        """Connect and ask for the subscription; the gateway's ping interval, inf for none."""
        token = self._options.token()
        body = {"name": "tidegate-tail"} | ({"token": token} if token else {})
        await socket.send(json.dumps({"id": _CONNECT, "connect": body}))
        for said in await _lines(socket, REPLY_TIMEOUT_S):
            if "error" in said:
                raise self._refused("connect", said["error"])
            if "connect" in said:
                subscribe: dict[str, object] = {
                    "channel": self._options.room,
                    "recoverable": True,
                    "positioned": True,
                }
                if held := self.continuity.position:
                    subscribe |= {"recover": True, "epoch": held.epoch, "offset": held.offset}
                await socket.send(json.dumps({"id": _SUBSCRIBE, "subscribe": subscribe}))
                ping_s = float(members(said["connect"]).get("ping", 0))
                return ping_s or math.inf
        raise TailFailed("the gateway's first answer is not one to connect")

    async def _heard(self, socket: ClientConnection, said: dict[str, str]) -> None:
        if "error" in said:
            asked = "subscribe" if _integer(said.get("id")) == _SUBSCRIBE else "connect"
            raise self._refused(asked, said["error"])
        if "subscribe" in said:
            self._subscribed(members(said["subscribe"]))
        elif "push" in said:
            self._pushed(members(said["push"]))
        elif not said:
            await socket.send("{}")

    def _refused(self, command: str, text: str) -> Exception:
        code = codes.ErrorCode(*_code(text), temporary=members(text).get("temporary") == "true")
        told = f"{command} refused with {code.code} ({code.message})"
        if code.code == codes.TOKEN_EXPIRED.code and self._options.token_fixed:
            return TailFailed(f"{told}: give a fresh token with --token")
        return _Lost(told) if code.retried else TailFailed(told)

    def _pushed(self, push: dict[str, str]) -> None:
        if "disconnect" in push:
            raise _ended(codes.CloseCode(*_code(push["disconnect"])))
        if json.loads(push.get("channel", '""')) != self._options.room:
            return
        if "unsubscribe" in push:
            code = codes.UnsubscribeCode(*_code(push["unsubscribe"]))
            text = f"unsubscribed with {code.code} ({code.reason})"
            raise _Lost(text) if code.resubscribe else TailFailed(text)
        if "pub" in push:
            self._arrived(_publication(push["pub"]))

    def _subscribed(self, reply: dict[str, str]) -> None:
        self.began, self._attempt = True, 0
        told = self.continuity.subscribed(
            str(json.loads(reply.get("epoch", '""'))),
            _integer(reply.get("offset")),
            reply.get("recovered") == "true",
        )
        if told:
            self._warn(told)
            if self._options.strict:
                raise TailFailed("stopped, since --strict was given")
        for text in elements(reply.get("publications", "[]")):
            self._arrived(_publication(text))

    def _arrived(self, publication: _Publication) -> None:
        if self._enough:
            return
        held = self.continuity.position
        if held is None:
            raise _Wrong("a message before the subscription")
        verdict = self.continuity.arrived(publication.offset)
        if verdict is Verdict.REPEATED:
            self._warn(f"repeated: offset {publication.offset} after {held}")
        elif verdict is Verdict.HOLE:
            raise _Lost(f"a hole: offset {publication.offset} after {held}")
        else:
            line = (
                f'{{"offset":{publication.offset},"data":{publication.data},'
                f'"tags":{publication.tags}}}\n'
            )
            self._write(line.encode())
            self._enough = self.continuity.tally.messages == self._options.count


def backoff_s(attempt: int, fraction: float) -> float:
    """How long to wait before reconnecting: up to 0.5 s, doubling to 20 s, of it at least half."""
    longest = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(attempt, 16))
    return longest * (0.5 + 0.5 * fraction)


async def _lines(socket: ClientConnection, timeout_s: float) -> list[dict[str, str]]:
    """The next frame: each of its lines is a reply or a push, as its members; none: a ping."""
    async with asyncio.timeout(None if math.isinf(timeout_s) else timeout_s):
        frame = await socket.recv(decode=True)
    return [members(line) for line in frame.split("\n") if line]


def _ended(close: codes.CloseCode) -> Exception:
    text = f"closed with {close.code} ({close.reason or 'no reason'})"
    return _Lost(text) if close.reconnect else TailFailed(text)


def _is_loopback(url: str) -> bool:
    with contextlib.suppress(ValueError):
        return urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
    return False
