"""The vocabulary between client protocols and the session: commands in, events out.

A protocol module turns frames into commands and events into frames; the session knows only what
stands here. Field names follow the Centrifuge client protocol, which was the first to be spoken.
Values are msgspec structs: as immutable as a frozen dataclass, decoded without an intermediate
dictionary. ``data`` is raw JSON throughout and never parsed.
"""

from typing import TypeAlias

from msgspec import Raw, Struct


class Since(Struct, frozen=True):
    """A position in a room."""

    offset: int = 0
    epoch: str = ""


class Connect(Struct, frozen=True):
    token: str = ""
    name: str = ""
    version: str = ""


class Subscribe(Struct, frozen=True):
    channel: str
    recover: bool = False
    offset: int = 0
    epoch: str = ""


class Unsubscribe(Struct, frozen=True):
    channel: str


class Publish(Struct, frozen=True):
    channel: str
    data: Raw


class History(Struct, frozen=True):
    channel: str
    limit: int = 0
    """Most messages wanted; 0: the position only; below 0: as many as the namespace allows."""
    since: Since | None = None
    reverse: bool = False


class Refresh(Struct, frozen=True):
    token: str


class Unsupported(Struct, frozen=True):
    """A command of the protocol that this server does not offer, by its name."""

    method: str


class Malformed(Struct, frozen=True):
    """A command whose fields cannot be used; the text says why."""

    reason: str


class Pong(Struct, frozen=True):
    """The client's answer to a ping; has no id and no reply."""


class Ignored(Struct, frozen=True):
    """A one-way command without effect (``send`` without a handler)."""


Body: TypeAlias = (
    Connect
    | Subscribe
    | Unsubscribe
    | Publish
    | History
    | Refresh
    | Unsupported
    | Malformed
    | Pong
    | Ignored
)


class Command(Struct, frozen=True):
    """A command with the id that its reply repeats; 0 for those that have no reply."""

    id: int
    body: Body


class Connected(Struct, frozen=True):
    client: str
    version: str
    ping_s: int
    ttl_s: int | None
    """Seconds after which the client should refresh its token; None: it does not expire."""


class Subscribed(Struct, frozen=True):
    channel: str
    epoch: str
    offset: int
    """The position from which ``publications`` and later pushes continue."""
    recovered: bool
    was_recovering: bool
    publications: bytes = b""
    """Encoded publications, in the form that the protocol's ``page`` makes; empty if none."""


class Unsubscribed(Struct, frozen=True):
    """Reply to ``unsubscribe``."""


class Published(Struct, frozen=True):
    """Reply to ``publish``: the row is committed."""


class HistoryRead(Struct, frozen=True):
    epoch: str
    offset: int
    """Head of the room."""
    publications: bytes = b""


class Refreshed(Struct, frozen=True):
    client: str
    version: str
    ttl_s: int | None


class Failed(Struct, frozen=True):
    code: int
    message: str
    temporary: bool


class Ping(Struct, frozen=True):
    pass


class Evicted(Struct, frozen=True):
    """The server ended a subscription."""

    channel: str
    code: int
    reason: str


Reply: TypeAlias = (
    Connected | Subscribed | Unsubscribed | Published | HistoryRead | Refreshed | Failed
)
Push: TypeAlias = Ping | Evicted
