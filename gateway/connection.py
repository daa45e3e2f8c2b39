"""A connection: drives one session between its socket and the worker's services.

Everything that a client's frame or a deadline causes is done synchronously, but for what waits on a
store; that runs as a task of this connection and reports back to the session. Deliveries do not
pass through here: the hub writes finished frames to the socket. When the socket's buffer is full
the connection falls back from push to pull: its subscriptions stop being live and are caught up by
replay as the peer reads.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from redis.exceptions import RedisError

from gateway import codes
from gateway.codes import CloseCode
from gateway.commands import Since
from gateway.consumer import Consumer
from gateway.deadlines import Deadlines
from gateway.history import History, Lost
from gateway.hub import Hub
from gateway.namespaces import Identity, Namespaces
from gateway.protocols.base import ClientProtocol, ProtocolViolation
from gateway.room import Sink, Subscription, pushes
from gateway.session import (
    Action,
    Answer,
    Attach,
    Authenticate,
    Close,
    Detach,
    Insert,
    Limits,
    Phase,
    Read,
    Send,
    Session,
)
from gateway.tokens import TokenExpired, TokenInvalid
from gateway.unavailable import Unavailable
from gateway.writer import Rejected, Writer
from outbox.backoff import Backoff
from outbox.errors import OutboxError

RETRY_S = (0.1, 5.0)
TASKS_MAX = 200
"""A join goes on after the client has left the room, so the session's limits do not bound them."""
NEVER = float("inf")

log = structlog.get_logger(__name__)


class Socket(Sink, Protocol):
    """What a connection needs of its transport (``gateway.websocket`` has the real one)."""

    full: bool
    """Whether the write buffer is above its ceiling."""

    def write(self, frame: bytes) -> None:
        """Write a finished frame; never waits, drops it if the socket is closed."""
        ...

    def merge(self, merging: bool) -> None:
        """Whether what is sent in one round of the event loop should go out in one piece."""
        ...

    def close(self, code: int, reason: str) -> None:
        """Send a close frame; the transport is cut if the peer does not answer in time."""
        ...

    def buffered_bytes(self) -> int:
        """What is not yet with the kernel."""
        ...

    async def room_to_write(self) -> None:
        """Wait until the write buffer is below its ceiling, or the socket is closed."""
        ...

    def hold(self) -> None:
        """Read nothing from the peer and hand nothing over until ``release``."""
        ...

    def release(self) -> None:
        """End ``hold``."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """What all connections of a worker share."""

    hub: Hub
    consumer: Consumer
    history: History
    writer: Writer
    deadlines: Deadlines
    namespaces: Namespaces
    limits: Limits
    stall_timeout_s: float
    version: str
    authenticate: Callable[[str, float], Identity | None]
    """Token and time of ``clock`` → identity that expires by that clock, None if a token is needed;
    raises as ``tokens.verify``."""
    clock: Callable[[], float]
    left: Callable[["Connection"], None]
    """Told once of each connection whose socket is gone."""


class Connection:
    """Made when the handshake is complete. Implements ``gateway.websocket.Listener``.

    What only a busy connection needs is made when it is needed: most of them are idle.
    """

    __slots__ = (
        "_behind",
        "_catching_up",
        "_held",
        "_left_bytes",
        "_reading",
        "_services",
        "_socket",
        "_stalled_at",
        "_subscriptions",
        "_tasks",
        "protocol",
        "session",
    )

    def __init__(
        self, client: str, socket: Socket, protocol: ClientProtocol, services: Services
    ) -> None:
        self.protocol = protocol
        self.session = Session(
            client, services.version, services.limits, services.namespaces, services.clock()
        )
        self._services = services
        self._socket = socket
        self._subscriptions: dict[str, Subscription] = {}
        self._behind: dict[Subscription, None] = {}
        self._catching_up: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] | None = None
        self._reading: asyncio.Lock | None = None
        self._held = False
        self._stalled_at = NEVER
        self._left_bytes = 0
        services.deadlines.enter(self)

    # From the peer

    def received(self, text: str) -> None:
        """Handle one text frame."""
        try:
            commands = self.protocol.decode(text)
        except ProtocolViolation as violation:
            log.info("protocol violation", client=self.session.client, error=str(violation)[:200])
            self.close(codes.BAD_FRAME)
            return
        parts: list[bytes] = []
        for command in commands:
            self._perform(self.session.receive(command, self._services.clock()), parts)
        self._send(parts)
        if self._busy:
            # A peer that sends and does not read is not read from either, nor one for which too
            # much is under way.
            self._held = True
            self._socket.hold()

    def refused(self) -> None:
        """A binary frame: belongs to protocols that were not negotiated."""
        self.close(codes.BAD_FRAME)

    @property
    def _busy(self) -> bool:
        return self._socket.full or (self._tasks is not None and len(self._tasks) > TASKS_MAX)

    def _read_on(self) -> None:
        if self._held and not self._busy:
            self._held = False
            self._socket.release()

    def close(self, code: CloseCode) -> None:
        """Close by the server's will."""
        self._do(self.session.close(code))

    def closed(self) -> None:
        """The socket is gone (or going): leave everything. May be called twice."""
        self.session.gone()
        for room in list(self._subscriptions):
            self._detach(room)
        for task in list(self._tasks or ()):
            task.cancel()

    def lost(self) -> None:
        """The socket is gone."""
        self.closed()
        self._services.left(self)

    # From the socket's buffer

    def filled(self) -> None:
        """The write buffer passed its ceiling: no more live deliveries."""
        for subscription in self._subscriptions.values():
            if subscription.live:
                subscription.room.fall_behind(subscription)
                self._behind[subscription] = None
        self._stalled_at = self._services.clock() + self._services.stall_timeout_s
        self._left_bytes = self._socket.buffered_bytes()
        self._services.deadlines.enter(self)

    def drained(self) -> None:
        """The peer has read on: deliver what it missed."""
        self._stalled_at = NEVER
        # A ping that lay in the full buffer has only now been read.
        self.session.excuse(self._services.clock())
        self._start_catching_up()
        self._read_on()

    # Time

    @property
    def deadline(self) -> float | None:
        """See ``deadlines.Timed``."""
        if self.session.phase is Phase.CLOSED:
            return None
        return min(self.session.deadline, self._stalled_at)

    def on_deadline(self, now: float) -> None:
        """See ``deadlines.Timed``."""
        if now >= self._stalled_at:
            left = self._socket.buffered_bytes()
            if left >= self._left_bytes:
                self.close(codes.SLOW)
                return
            self._left_bytes = left
            self._stalled_at = now + self._services.stall_timeout_s
        if self._socket.full:
            # The peer cannot have seen a ping behind a full buffer; its progress is what counts.
            self.session.excuse(now)
        self._do(self.session.on_time(now))

    # Actions of the session

    def _do(self, actions: list[Action]) -> None:
        parts: list[bytes] = []
        self._perform(actions, parts)
        self._send(parts)

    def _perform(self, actions: list[Action], parts: list[bytes]) -> None:
        for action in actions:
            match action:
                case Answer(id, reply):
                    parts.append(self.protocol.reply(id, reply))
                case Send(push):
                    parts.append(self.protocol.push(push))
                case Authenticate():
                    self._perform(self._authenticate(action), parts)
                case Attach():
                    self._run(self._join(action))
                case Detach(room):
                    self._detach(room)
                case Insert():
                    self._run(self._insert(action))
                case Read():
                    self._run(self._read(action))
                case Close(code):
                    self._send(parts)
                    parts.clear()
                    self._socket.close(code.code, code.reason)
                    self.closed()

    def _send(self, parts: list[bytes]) -> None:
        if parts:
            self._socket.write(self.protocol.frame(parts))

    def _run(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        if self._tasks is None:
            self._tasks = set()
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[None]") -> None:
        assert self._tasks is not None
        self._tasks.discard(task)
        if not self._tasks:
            self._tasks = None
        if task is self._catching_up:
            self._catching_up = None
        self._read_on()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("connection failed", client=self.session.client, exc_info=error)
            self.close(codes.SERVER_ERROR)
        elif not task.cancelled():
            self._start_catching_up()

    def _authenticate(self, action: Authenticate) -> list[Action]:
        now = self._services.clock()
        try:
            identity = self._services.authenticate(action.token, now)
        except TokenExpired:
            return self.session.refused(action.id, codes.TOKEN_EXPIRED)
        except TokenInvalid as invalid:
            log.info("token refused", client=self.session.client, reason=invalid.reason)
            return self.session.refused(action.id, codes.INVALID_TOKEN)
        if identity is None:
            return self.session.refused(action.id, codes.UNAUTHORIZED)
        actions = self.session.authenticated(action.id, identity, now)
        self._services.deadlines.enter(self)
        return actions

    # Subscriptions

    async def _join(self, action: Attach) -> None:
        identity = self.session.identity
        assert identity is not None
        key = (identity.tenant, action.room)
        services = self._services
        try:
            await services.consumer.attach(services.hub.shard(key))
            room = services.hub.open(key)
            subscription = Subscription(room, self.protocol, self._socket, self)
            if not self.session.is_joining(action.id, action.room):
                return
            room.join(subscription)
            self._subscriptions[action.room] = subscription
            self._socket.merge(len(self._subscriptions) > 1)
            offset, page, recovered = await self._position(subscription, action.since)
        except (Unavailable, OutboxError, RedisError, OSError) as error:
            log.warning(
                "subscribe failed for now", client=self.session.client, error=str(error)[:200]
            )
            if self.session.is_joining(action.id, action.room):
                self._detach(action.room)
                self._do(self.session.failed(action.id, codes.INTERNAL))
            return
        if self._subscriptions.get(action.room) is not subscription:
            return  # left, or the epoch changed, in the meantime
        if page and self._socket.full:
            # Many rooms are joined and nothing is read: all pages together know no bound.
            subscription.offset, page = offset, b""
        self._do(
            self.session.subscribed(
                action.id, action.room, services.consumer.epoch, offset, page, recovered
            )
        )
        if not self._go_live(subscription):
            self.wake(subscription)

    def _go_live(self, subscription: Subscription) -> bool:
        # Not with a full buffer: it is told only once, and the hub would go on writing.
        return not self._socket.full and subscription.room.go_live(subscription)

    async def _position(
        self, subscription: Subscription, since: Since | None
    ) -> tuple[int, bytes, bool | None]:
        """Set the subscription to where it starts: the offset from which the reply continues, the
        reply's publications, and whether a resume succeeded (None: none was asked for)."""
        room = subscription.room
        if since is not None and self._is_of_this_history(since):
            found = await self._services.history.read(room, since.offset)
            if not isinstance(found, Lost):
                messages = found.messages
                subscription.offset = since.offset + len(messages)
                page = room.memory.joined(self.protocol, messages) if messages else b""
                return since.offset, page, True
        subscription.offset = await self._services.history.head(room)
        return subscription.offset, b"", None if since is None else False

    def _is_of_this_history(self, since: Since) -> bool:
        # Without an epoch only the beginning is a position: it is the same in every history.
        return since.epoch == self._services.consumer.epoch or since == Since()

    def _detach(self, name: str) -> None:
        subscription = self._subscriptions.pop(name, None)
        if subscription is not None:
            subscription.room.leave(subscription)
            self._behind.pop(subscription, None)
            self._socket.merge(len(self._subscriptions) > 1)

    def evict_all(self) -> None:
        """Have the client subscribe anew to everything: no position holds any more."""
        parts: list[bytes] = []
        for name in list(self._subscriptions):
            self._perform(self.session.evict(name, codes.RESUBSCRIBE), parts)
        self._send(parts)

    # Pull

    def wake(self, subscription: Subscription) -> None:
        """See ``room.Owner``."""
        name = subscription.room.key[1]
        if name in self.session.rooms and self._subscriptions.get(name) is subscription:
            self._behind[subscription] = None
            self._start_catching_up()

    def _start_catching_up(self) -> None:
        if self._behind and self._catching_up is None and not self._socket.full:
            self._catching_up = self._run(self._catch_up())

    async def _catch_up(self) -> None:
        """Page by page, room by room, until all are live or the buffer is full."""
        waiting = False
        backoff = Backoff(*RETRY_S)
        while self._behind and not self._socket.full:
            subscription = next(iter(self._behind))
            del self._behind[subscription]
            room = subscription.room
            if self._go_live(subscription):
                continue
            if room.top is not None and subscription.offset > room.top:
                # Another worker was faster: the log vouched for the offset when the client came.
                room.await_offset(subscription)
                continue
            try:
                found = await self._services.history.read(room, subscription.offset)
                waiting = False
                backoff.reset()
            except (Unavailable, OutboxError, RedisError, OSError) as error:
                if not waiting:
                    log.warning("replay waits", client=self.session.client, error=str(error)[:200])
                waiting = True
                self._behind[subscription] = None
                await asyncio.sleep(backoff.next_s())
                continue
            name = room.key[1]
            if self._subscriptions.get(name) is not subscription:
                continue
            if isinstance(found, Lost):
                self._do(self.session.evict(name, codes.RESUBSCRIBE))
                continue
            if found.messages:
                subscription.offset = found.messages[-1].offset
                publications = room.memory.publications(self.protocol, found.messages)
                self._socket.write(pushes(self.protocol, name, publications))
            if not self._go_live(subscription):
                self._behind[subscription] = None
                await asyncio.sleep(0)

    # Requests

    async def _insert(self, action: Insert) -> None:
        identity = self.session.identity
        assert identity is not None
        try:
            await self._services.writer.insert(identity.tenant, action.room, action.data)
        except Rejected as rejected:
            self._do(self.session.failed(action.id, codes.BAD_REQUEST, str(rejected)))
        except OutboxError as error:
            log.warning("publish failed", client=self.session.client, error=str(error)[:200])
            self._do(self.session.failed(action.id, codes.INTERNAL))
        else:
            self._do(self.session.published(action.id))

    async def _read(self, action: Read) -> None:
        identity = self.session.identity
        assert identity is not None
        services = self._services
        key = (identity.tenant, action.room)
        try:
            # One page at a time: those of all requests together know no bound.
            if self._reading is None:
                self._reading = asyncio.Lock()
            async with self._reading:
                await self._socket.room_to_write()
                found = await services.history.past(
                    key, services.hub.shard(key), action.since, action.limit, action.reverse
                )
        except (Unavailable, OutboxError) as error:
            log.warning("history failed", client=self.session.client, error=str(error)[:200])
            self._do(self.session.failed(action.id, codes.INTERNAL))
            return
        if isinstance(found, Lost):
            self._do(self.session.failed(action.id, codes.UNRECOVERABLE_POSITION))
            return
        epoch, head, messages = found
        page = self.protocol.page(map(self.protocol.publication, messages))
        self._do(self.session.history_read(action.id, epoch, head, page))
