"""One client's state machine, without I/O: commands and time in, actions out.

The driver (``gateway.connection``) hands each command to ``receive``, performs the actions that it
returns in order, and reports what came of the slow ones (``authenticated``, ``subscribed`` …),
which gives further actions. Between a command and its outcome anything may happen; outcomes that
came too late are recognised by the command's id and dropped.

Times are seconds since 1970 UTC and always passed in.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from gateway import codes
from gateway import commands as c
from gateway.codes import CloseCode, ErrorCode, UnsubscribeCode
from gateway.namespaces import Identity, Namespaces
from outbox.names import room_error

MAX_OFFSET = 2**53
"""No JSON number beyond this survives a browser, so no position is beyond it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Send the reply to command ``id``."""

    id: int
    reply: c.Reply


@dataclass(frozen=True, slots=True)
class Send:
    """Send a push."""

    push: c.Push


@dataclass(frozen=True, slots=True)
class Authenticate:
    """Check the token; report ``authenticated`` or ``refused``."""

    id: int
    token: str


@dataclass(frozen=True, slots=True)
class Attach:
    """Join the room's deliveries and replay from ``since``; report ``subscribed`` or ``failed``."""

    id: int
    room: str
    since: c.Since | None
    """Where to resume; None: from now on."""


@dataclass(frozen=True, slots=True)
class Detach:
    """End deliveries of the room, and whatever ``Attach`` of it is under way."""

    room: str


@dataclass(frozen=True, slots=True)
class Insert:
    """Put the message into the outbox; report ``published`` or ``failed``."""

    id: int
    room: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Read:
    """Read history; answer by ``history_read`` or ``failed``."""

    id: int
    room: str
    since: c.Since | None
    limit: int
    """How many messages at most; 0: the position only."""
    reverse: bool


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection. Nothing follows."""

    code: CloseCode


Action: TypeAlias = Answer | Send | Authenticate | Attach | Detach | Insert | Read | Close


@dataclass(frozen=True, slots=True)
class Limits:
    """What a session allows. Times in seconds."""

    ping_interval_s: float
    pong_timeout_s: float
    handshake_timeout_s: float
    subscriptions_max: int
    requests_max: int
    """Publishes and history reads that may be under way at once."""


class Phase(Enum):
    """How far the session is."""

    GREETING = "greeting"
    """Nothing came yet: only ``connect`` is allowed."""
    AUTHENTICATING = "authenticating"
    OPEN = "open"
    CLOSED = "closed"


class Session:
    """The state of one client. See the module's text for how it is driven."""

    __slots__ = (
        "_joining",
        "_limits",
        "_namespaces",
        "_ping_at",
        "_pong_by",
        "_refreshing",
        "_requests",
        "_version",
        "client",
        "deadline",
        "identity",
        "phase",
        "rooms",
    )

    def __init__(
        self, client: str, version: str, limits: Limits, namespaces: Namespaces, now: float
    ) -> None:
        self.client = client
        self.phase = Phase.GREETING
        self.identity: Identity | None = None
        # Dictionaries serve as sets: empty ones cost a third, and the garbage collector has less
        # to visit.
        self.rooms: dict[str, None] = {}
        """Rooms whose ``subscribe`` was answered with success."""
        self.deadline = now + limits.handshake_timeout_s
        """When ``on_time`` must be called next."""
        self._joining: dict[str, int] = {}
        self._requests: dict[int, None] = {}
        self._refreshing: dict[int, None] = {}
        self._limits = limits
        self._namespaces = namespaces
        self._version = version
        self._ping_at = 0.0
        self._pong_by: float | None = None

    # Commands

    def receive(self, command: c.Command, now: float) -> list[Action]:
        """What to do for one command of the client."""
        if self.phase is Phase.CLOSED:
            return []
        body = command.body
        if isinstance(body, c.Connect):
            return self._connect(command.id, body)
        if self.phase is Phase.GREETING:
            return self._close(codes.BAD_FRAME)
        if isinstance(body, c.Pong):
            self._pong_by = None
            self._reschedule()
            return []
        if self._is_under_way(command.id):
            # Its outcome could not be told from that of the command before it.
            return self._close(codes.BAD_FRAME)
        if self.phase is Phase.AUTHENTICATING and not isinstance(body, c.Ignored):
            # The driver reads no further frame while a token is checked, so these came in the
            # frame of the connect command itself: it holds them back until the outcome.
            raise AssertionError("commands are held back while the token is checked")
        match body:
            case c.Subscribe():
                return self._subscribe(command.id, body)
            case c.Unsubscribe():
                return self._unsubscribe(command.id, body)
            case c.Publish():
                return self._publish(command.id, body)
            case c.History():
                return self._history(command.id, body)
            case c.Refresh():
                self._refreshing[command.id] = None
                return [Authenticate(command.id, body.token)]
            case c.Unsupported():
                return [_failure(command.id, codes.METHOD_NOT_FOUND)]
            case c.Malformed(reason=reason):
                return [_failure(command.id, codes.BAD_REQUEST, reason)]
            case _:
                return []

    def _is_under_way(self, id: int) -> bool:
        return id in self._requests or id in self._refreshing or id in self._joining.values()

    def _connect(self, id: int, body: c.Connect) -> list[Action]:
        if self.phase is not Phase.GREETING:
            return self._close(codes.BAD_FRAME)
        self.phase = Phase.AUTHENTICATING
        return [Authenticate(id, body.token)]

    def _subscribe(self, id: int, body: c.Subscribe) -> list[Action]:
        assert self.identity is not None
        room = body.channel
        if room_error(room):
            return [_failure(id, codes.UNKNOWN_CHANNEL)]
        if room in self.rooms or room in self._joining:
            return [_failure(id, codes.ALREADY_SUBSCRIBED)]
        if len(self.rooms) + len(self._joining) >= self._limits.subscriptions_max:
            return [_failure(id, codes.LIMIT_EXCEEDED)]
        if not self._namespaces.may_subscribe(self.identity, room):
            return [_failure(id, codes.PERMISSION_DENIED)]
        since = c.Since(body.offset, body.epoch) if body.recover else None
        if since is not None and not 0 <= since.offset <= MAX_OFFSET:
            return [_failure(id, codes.BAD_REQUEST)]
        self._joining[room] = id
        return [Attach(id, room, since)]

    def _unsubscribe(self, id: int, body: c.Unsubscribe) -> list[Action]:
        actions: list[Action] = []
        joining = self._joining.pop(body.channel, None)
        if joining is not None:
            actions = [Detach(body.channel), _failure(joining, codes.NOT_AVAILABLE)]
        elif body.channel in self.rooms:
            del self.rooms[body.channel]
            actions = [Detach(body.channel)]
        return [*actions, Answer(id, c.Unsubscribed())]

    def _publish(self, id: int, body: c.Publish) -> list[Action]:
        assert self.identity is not None
        if room_error(body.channel):
            return [_failure(id, codes.UNKNOWN_CHANNEL)]
        if not self._namespaces.may_publish(self.identity, body.channel):
            return [_failure(id, codes.PERMISSION_DENIED)]
        return self._request(id, Insert(id, body.channel, bytes(body.data)))

    def _history(self, id: int, body: c.History) -> list[Action]:
        assert self.identity is not None
        room, since = body.channel, body.since
        if room_error(room):
            return [_failure(id, codes.UNKNOWN_CHANNEL)]
        if not self._namespaces.may_subscribe(self.identity, room):
            return [_failure(id, codes.PERMISSION_DENIED)]
        most = self._namespaces.of(room).history_messages
        if most <= 0:
            return [_failure(id, codes.NOT_AVAILABLE)]
        if since is not None and not 0 <= since.offset <= MAX_OFFSET:
            return [_failure(id, codes.BAD_REQUEST)]
        limit = most if body.limit < 0 else min(body.limit, most)
        return self._request(id, Read(id, room, since, limit, body.reverse))

    def _request(self, id: int, action: Action) -> list[Action]:
        if len(self._requests) >= self._limits.requests_max:
            return [_failure(id, codes.TOO_MANY_REQUESTS)]
        self._requests[id] = None
        return [action]

    # Outcomes

    def authenticated(self, id: int, identity: Identity, now: float) -> list[Action]:
        """The token of command ``id`` is good (or none was given and none is needed)."""
        if self.phase is Phase.CLOSED:
            return []
        if self.phase is Phase.OPEN:
            assert self.identity is not None
            self._refreshing.pop(id, None)
            if (identity.tenant, identity.user) != (self.identity.tenant, self.identity.user):
                # A refresh prolongs a session; it cannot turn it into another person's.
                return self._close(codes.INVALID_TOKEN)
            self.identity = identity
            self._reschedule()
            refreshed = c.Refreshed(self.client, self._version, _ttl_s(identity, now))
            return [Answer(id, refreshed)]
        self.phase = Phase.OPEN
        self.identity = identity
        self._ping_at = now + self._limits.ping_interval_s
        self._reschedule()
        connected = c.Connected(
            self.client,
            self._version,
            max(1, round(self._limits.ping_interval_s)),
            _ttl_s(identity, now),
        )
        return [Answer(id, connected)]

    def refused(self, id: int, why: ErrorCode | CloseCode) -> list[Action]:
        """The token of command ``id`` is not good. An error is answered, and before the session is
        open the connection then ends; a close code ends it at once."""
        if self.phase is Phase.CLOSED:
            return []
        if isinstance(why, CloseCode):
            return self._close(why)
        if self.phase is Phase.OPEN:
            self._refreshing.pop(id, None)
            return [_failure(id, why)]
        # Back to the greeting: an SDK answers 109 by closing, fetching a token and coming again.
        self.phase = Phase.GREETING
        return [_failure(id, why)]

    def subscribed(
        self,
        id: int,
        room: str,
        epoch: str,
        offset: int,
        page: bytes,
        recovered: bool | None,
    ) -> list[Action]:
        """The subscription stands at ``offset`` with ``page`` to follow. ``recovered``: None if no
        resume was asked for. Returns nothing if the client has left the room in the meantime."""
        if self.phase is Phase.CLOSED or self._joining.get(room) != id:
            return []
        del self._joining[room]
        if not self._joining:
            self._joining = {}  # one that was emptied keeps its table
        self.rooms[room] = None
        reply = c.Subscribed(room, epoch, offset, bool(recovered), recovered is not None, page)
        return [Answer(id, reply)]

    def published(self, id: int) -> list[Action]:
        """The message of command ``id`` is committed."""
        return self._finish(id, c.Published())

    def history_read(self, id: int, epoch: str, head: int, page: bytes) -> list[Action]:
        """The history that command ``id`` asked for."""
        return self._finish(id, c.HistoryRead(epoch, head, page))

    def failed(self, id: int, why: ErrorCode, detail: str = "") -> list[Action]:
        """Command ``id`` (subscribe, publish or history) came to nothing."""
        for room, joining in self._joining.items():
            if joining == id:
                del self._joining[room]
                return [] if self.phase is Phase.CLOSED else [_failure(id, why, detail)]
        failure = _failure(id, why, detail)
        return self._finish(id, failure.reply)

    def _finish(self, id: int, reply: c.Reply) -> list[Action]:
        if self.phase is Phase.CLOSED or id not in self._requests:
            return []
        del self._requests[id]
        return [Answer(id, reply)]

    def evict(self, room: str, why: UnsubscribeCode) -> list[Action]:
        """End a subscription by the server's will; a join under way fails for now."""
        if self.phase is Phase.CLOSED:
            return []
        joining = self._joining.pop(room, None)
        if joining is not None:
            return [Detach(room), _failure(joining, codes.INTERNAL)]
        if room not in self.rooms:
            return []
        del self.rooms[room]
        return [Detach(room), Send(c.Evicted(room, why.code, why.reason))]

    # Time and end

    def on_time(self, now: float) -> list[Action]:
        """Called at ``deadline`` or later; moves ``deadline``."""
        if self.phase is Phase.CLOSED or now < self.deadline:
            return []
        if self.phase is not Phase.OPEN:
            return self._close(codes.STALE)
        assert self.identity is not None
        if self.identity.expires_at is not None and now >= self.identity.expires_at:
            return self._close(codes.CONNECTION_EXPIRED)
        if self._pong_by is not None and now >= self._pong_by:
            return self._close(codes.NO_PONG)
        actions: list[Action] = []
        if now >= self._ping_at:
            self._ping_at = now + self._limits.ping_interval_s
            if self._pong_by is None:
                self._pong_by = now + self._limits.pong_timeout_s
            actions = [Send(c.Ping())]
        self._reschedule()
        return actions

    def excuse(self, now: float) -> None:
        """The peer cannot have seen a ping: its time to answer starts again."""
        if self.phase is Phase.OPEN:
            self._pong_by = None
            self._ping_at = now + self._limits.ping_interval_s
            self._reschedule()

    def is_joining(self, id: int, room: str) -> bool:
        """Whether command ``id`` still waits for the room's ``subscribed``."""
        return self._joining.get(room) == id

    def close(self, code: CloseCode) -> list[Action]:
        """End the session by the server's will."""
        return [] if self.phase is Phase.CLOSED else self._close(code)

    def gone(self) -> None:
        """The peer has gone: every later outcome is dropped."""
        self.phase = Phase.CLOSED
        self.rooms.clear()
        self._joining.clear()

    def _close(self, code: CloseCode) -> list[Action]:
        self.gone()
        return [Close(code)]

    def _reschedule(self) -> None:
        if self.phase is not Phase.OPEN:
            return
        assert self.identity is not None
        deadline = self._ping_at
        if self._pong_by is not None:
            deadline = min(deadline, self._pong_by)
        if self.identity.expires_at is not None:
            deadline = min(deadline, self.identity.expires_at)
        self.deadline = deadline


def _failure(id: int, why: ErrorCode, detail: str = "") -> Answer:
    message = f"{why.message}: {detail}" if detail else why.message
    return Answer(id, c.Failed(why.code, message, why.temporary))


def _ttl_s(identity: Identity, now: float) -> int | None:
    """When the SDK should refresh: well before the expiry, at which deliveries end."""
    if identity.expires_at is None:
        return None
    left_s = identity.expires_at - now
    return max(1, int(left_s - min(left_s / 4, 15.0)))
