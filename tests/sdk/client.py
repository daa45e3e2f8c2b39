"""What the tests want of a client, whatever SDK is behind it."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

MIN_DELAY_MS = 20
MAX_DELAY_MS = 500
TIMEOUT_S = 20.0

Tokens: TypeAlias = Callable[[], Awaitable[str]]
"""The application's side of a token refresh."""


@dataclass(frozen=True, slots=True)
class Said:
    """One event as the SDK gave it to the application."""

    event: str
    """connecting, connected, disconnected, error; of a subscription also subscribing, subscribed,
    unsubscribed, publication."""
    channel: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True, slots=True)
class Publication:
    """A message, from a delivery or from history."""

    offset: int
    data: Any
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class History:
    """Answer to ``history``."""

    offset: int
    epoch: str
    publications: tuple[Publication, ...]


class Refused(Exception):
    """The server answered a command with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code} {message}")
        self.code = code


class Diary:
    """The events of one client, in order, with a way to wait for what they must come to."""

    def __init__(self) -> None:
        self.said: list[Said] = []
        self.last: dict[str, int] = {}
        """The highest offset received of each channel."""
        self._times: list[float] = []
        self._changed = asyncio.Event()

    def add(self, said: Said) -> None:
        self.said.append(said)
        self._times.append(time.time())
        if said.event == "publication":
            self.last[said.channel] = max(said.offset, self.last.get(said.channel, 0))
        self._changed.set()

    def of(self, channel: str, event: str) -> list[Said]:
        """The events of one kind; channel "" for those of the connection."""
        return [s for s in self.said if s.channel == channel and s.event == event]

    def timed(self) -> list[tuple[float, Said]]:
        """All events with their times, in seconds since 1970."""
        return list(zip(self._times, self.said, strict=True))

    def publications(self, channel: str) -> list[Publication]:
        return [Publication(s.offset, s.data, s.tags) for s in self.of(channel, "publication")]

    def offsets(self, channel: str) -> list[int]:
        return [s.offset for s in self.of(channel, "publication")]

    async def wait(self, ready: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Wait until ``ready``, which is looked at after each event."""
        try:
            async with asyncio.timeout(timeout_s):
                while not ready():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            tail = "\n".join(str(said) for said in self.said[-20:])
            raise AssertionError(f"not within {timeout_s} s; the last events:\n{tail}") from None

    async def count(self, channel: str, event: str, times: int = 1) -> Said:
        """Wait until an event has come so many times; the last of these."""
        await self.wait(lambda: len(self.of(channel, event)) >= times)
        return self.of(channel, event)[times - 1]


class Client(Protocol):
    """A client of a stock SDK."""

    diary: Diary

    async def connect(self) -> None:
        """Start to connect; does not wait for it."""
        ...

    async def disconnect(self) -> None: ...

    async def subscribe(self, channel: str, since: tuple[int, str] | None = None) -> None:
        """Start to subscribe, or subscribe again; ``since``: offset and epoch to resume from."""
        ...

    async def unsubscribe(self, channel: str) -> None: ...

    async def publish(self, channel: str, data: Any) -> None:
        """Raises Refused."""
        ...

    async def history(
        self,
        channel: str,
        limit: int,
        since: tuple[int, str] | None = None,
        reverse: bool = False,
    ) -> History:
        """Raises Refused."""
        ...

    async def close(self) -> None: ...


OpenClient: TypeAlias = Callable[..., Awaitable[Client]]
"""``await open_client(url, token="", tokens=None)``: a client that is not connected yet."""


def canonical(data: Any) -> str:
    """One text for equal JSON values."""
    return json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
