"""The session as a state machine: any order of commands, outcomes and time.

The driver's part is played here: it authenticates at once, and joins, inserts and reads come to an
end in any order, also when the client has long left the room or gone.
"""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import Raw

from gateway import codes
from gateway import commands as c
from gateway.namespaces import Identity, Namespace, Namespaces
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

START = 1_000_000.0
LIMITS = Limits(
    ping_interval_s=25,
    pong_timeout_s=8,
    handshake_timeout_s=10,
    subscriptions_max=3,
    requests_max=2,
)
NAMESPACES = Namespaces(
    {
        "chat": Namespace(publish="anyone"),
        "staff": Namespace(subscribe="authenticated", publish="authenticated"),
        "secret": Namespace(subscribe="nobody"),
        "fleeting": Namespace(history_messages=0),
    }
)
ROOMS = ("chat:1", "chat:2", "staff:1", "secret:1", "fleeting:1", "plain", "no room", "")
ANN = Identity("acme", "ann", None, anonymous=False)
STRANGER = Identity("default", "", None, anonymous=True)

rooms = st.sampled_from(ROOMS)
offsets = st.sampled_from((-1, 0, 1, 7, 2**53, 2**53 + 1))
lifetimes_s = st.sampled_from((None, 1, 20, 30, 100))


class Driver(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.ids = 0
        self.steps = 0
        self.unanswered: dict[int, str] = {}
        self.joins: list[Attach] = []
        self.requests: list[Insert | Read] = []
        self.subscribed: set[str] = set()
        self.closed: Close | None = None
        self.gone = False
        self.pinged_at: float | None = None
        self.session = Session("client", "test", LIMITS, NAMESPACES, self.now)
        self.identity: Identity | Exception = ANN

    # The driver

    def command(self, body: c.Body, identified: bool = True) -> None:
        id = 0
        if identified:
            self.ids += 1
            id = self.ids
            self.unanswered[id] = type(body).__name__
        self.perform(self.session.receive(c.Command(id, body), self.now))

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.closed is None, f"{action} after {self.closed}"
            assert not self.gone, f"{action} after the peer had gone"
            match action:
                case Answer(id, reply):
                    command = self.unanswered.pop(id, None)
                    assert command is not None, f"{reply} to {id}, which nobody asked"
                    self.answered(command, reply)
                case Send(c.Ping()):
                    assert self.session.phase is Phase.OPEN
                    if self.pinged_at is None:
                        self.pinged_at = self.now
                case Send(c.Evicted(channel)):
                    self.subscribed.remove(channel)
                case Attach():
                    assert action.room not in self.subscribed
                    self.joins.append(action)
                case Detach(room):
                    self.subscribed.discard(room) if self.leaving else None
                case Insert() | Read():
                    self.requests.append(action)
                case Authenticate(id):
                    self.perform(self.authenticate(id))
                case Close():
                    self.closed = action

    leaving = False

    def answered(self, command: str, reply: c.Reply) -> None:
        match reply:
            case c.Failed():
                pass
            case c.Subscribed(channel):
                assert command == "Subscribe"
                self.subscribed.add(channel)
            case _:
                expected = {
                    "Connect": c.Connected,
                    "Refresh": c.Refreshed,
                    "Publish": c.Published,
                    "History": c.HistoryRead,
                    "Unsubscribe": c.Unsubscribed,
                }
                assert isinstance(reply, expected[command])

    def authenticate(self, id: int) -> list[Action]:
        if isinstance(self.identity, Identity):
            return self.session.authenticated(id, self.identity, self.now)
        return self.session.refused(id, self.identity.args[0])

    @property
    def open(self) -> bool:
        return self.closed is None and not self.gone

    # The client

    @initialize(connected=st.sampled_from((True, True, True, False)))
    def begin(self, connected: bool) -> None:
        if connected:
            self.connect(ANN, None)

    @property
    def lively(self) -> bool:
        """Whether a good while has passed in which nothing was allowed to end the session."""
        return self.steps > 15

    @rule(
        who=st.sampled_from((ANN, STRANGER, Identity("acme", "bob", None, anonymous=False))),
        lifetime_s=lifetimes_s,
    )
    def refresh(self, who: Identity, lifetime_s: float | None) -> None:
        who = who if self.lively else ANN
        was = self.session.identity
        self.identity = _until(who, self.now, lifetime_s)
        connected = self.session.phase is Phase.OPEN
        self.command(c.Refresh("token"))
        if not self.open or not connected:
            return
        assert was is not None
        assert (was.tenant, was.user) == (who.tenant, who.user), "another person took over"

    @rule(
        why=st.sampled_from((codes.TOKEN_EXPIRED, codes.INVALID_TOKEN, codes.UNAUTHORIZED)),
        refresh=st.booleans(),
    )
    @precondition(lambda self: self.lively or self.session.phase is not Phase.OPEN)
    def fail_to_authenticate(self, why: codes.ErrorCode | codes.CloseCode, refresh: bool) -> None:
        self.identity = Exception(why)
        self.command(c.Refresh("token") if refresh else c.Connect("token"))
        assert not self.open or isinstance(why, codes.ErrorCode)

    @rule(who=st.sampled_from((ANN, STRANGER)), lifetime_s=lifetimes_s)
    @precondition(lambda self: self.session.phase is Phase.GREETING)
    def connect(self, who: Identity, lifetime_s: float | None) -> None:
        self.identity = _until(who, self.now, lifetime_s)
        self.command(c.Connect("token"))
        assert self.session.phase is Phase.OPEN

    @rule(room=rooms, recover=st.booleans(), offset=offsets)
    def subscribe(self, room: str, recover: bool, offset: int) -> None:
        self.command(c.Subscribe(room, recover, offset, "epoch"))

    @rule(room=rooms)
    def unsubscribe(self, room: str) -> None:
        self.leaving = True
        self.command(c.Unsubscribe(room))
        self.leaving = False
        assert room not in self.session.rooms

    @rule(room=rooms)
    def publish(self, room: str) -> None:
        self.command(c.Publish(room, Raw(b"{}")))

    @rule(
        room=rooms,
        limit=st.integers(-1, 2_000),
        since=st.none() | st.builds(c.Since, offsets, st.just("epoch")),
    )
    def history(self, room: str, limit: int, since: c.Since | None) -> None:
        self.command(c.History(room, limit, since))

    @rule()
    def ask_for_what_is_unsupported(self) -> None:
        self.command(c.Unsupported("rpc"))

    @rule()
    def send_something(self) -> None:
        self.command(c.Ignored(), identified=False)

    @rule()
    def pong(self) -> None:
        self.command(c.Pong(), identified=False)
        self.pinged_at = None

    @rule(body=st.sampled_from((c.Subscribe("plain"), c.Publish("chat:1", Raw(b"1")))))
    @precondition(lambda self: self.lively and self.session.phase is Phase.OPEN)
    def use_an_id_twice(self, body: c.Body) -> None:
        under_way = [id for id in self.unanswered if id]
        if under_way:
            self.perform(self.session.receive(c.Command(under_way[0], body), self.now))
            assert self.closed == Close(codes.BAD_FRAME)

    # Outcomes

    @rule(
        which=st.integers(0, 20), good=st.booleans(), recovered=st.sampled_from((None, False, True))
    )
    @precondition(lambda self: self.joins)
    def end_join(self, which: int, good: bool, recovered: bool | None) -> None:
        join = self.joins.pop(which % len(self.joins))
        waits = self.session.is_joining(join.id, join.room)
        if good:
            self.perform(self.session.subscribed(join.id, join.room, "epoch", 3, b"{}", recovered))
            assert (join.room in self.session.rooms) or not waits or not self.open
        else:
            self.perform(self.session.failed(join.id, codes.INTERNAL))

    @rule(which=st.integers(0, 20), good=st.booleans())
    @precondition(lambda self: self.requests)
    def end_request(self, which: int, good: bool) -> None:
        request = self.requests.pop(which % len(self.requests))
        if not good:
            self.perform(self.session.failed(request.id, codes.BAD_REQUEST, "too large"))
        elif isinstance(request, Insert):
            self.perform(self.session.published(request.id))
        else:
            self.perform(self.session.history_read(request.id, "epoch", 9, b""))

    # The server

    @rule(room=rooms, why=st.sampled_from(codes.UNSUBSCRIBES))
    def evict(self, room: str, why: codes.UnsubscribeCode) -> None:
        self.perform(self.session.evict(room, why))
        assert room not in self.session.rooms

    @rule(seconds=st.sampled_from((0.1, 1.0, 7.0, 8.0, 20.0, 60.0)), late_s=st.sampled_from((0, 3)))
    def time_passes(self, seconds: float, late_s: float) -> None:
        until = self.now + seconds
        while self.open and self.session.deadline <= until:
            self.now = self.session.deadline + late_s
            self.perform(self.session.on_time(self.now))
            if self.closed is None:
                assert self.session.deadline > self.now, "the timer would spin"
            else:
                self.closed_for_a_reason(self.closed.code)
        self.now = max(self.now, until)

    def closed_for_a_reason(self, code: codes.CloseCode) -> None:
        identity = self.session.identity
        if code is codes.STALE:
            assert identity is None
            assert self.now >= START + LIMITS.handshake_timeout_s
        elif code is codes.CONNECTION_EXPIRED:
            assert identity is not None
            assert identity.expires_at is not None
            assert identity.expires_at <= self.now
        else:
            assert code is codes.NO_PONG
            assert self.pinged_at is not None
            assert self.now >= self.pinged_at + LIMITS.pong_timeout_s

    @rule()
    def excuse(self) -> None:
        self.session.excuse(self.now)
        if self.session.phase is Phase.OPEN:
            self.pinged_at = None

    @precondition(lambda self: self.lively)
    @rule(code=st.sampled_from((codes.SHUTDOWN, codes.SLOW)))
    def close(self, code: codes.CloseCode) -> None:
        self.perform(self.session.close(code))
        assert not self.open

    @precondition(lambda self: self.lively)
    @rule()
    def go(self) -> None:
        self.session.gone()
        self.gone = True

    # What always holds

    @invariant()
    def count(self) -> None:
        self.steps += 1

    @invariant()
    def subscriptions_are_what_was_answered(self) -> None:
        assert set(self.session.rooms) == (self.subscribed if self.open else set())

    @invariant()
    def it_is_within_its_limits(self) -> None:
        if self.open:
            joining = [j for j in self.joins if self.session.is_joining(j.id, j.room)]
            assert len(self.session.rooms) + len(joining) <= LIMITS.subscriptions_max
            assert len(self.requests) <= LIMITS.requests_max

    @invariant()
    def nothing_is_overdue(self) -> None:
        if not self.open:
            assert self.session.phase is Phase.CLOSED
        elif self.session.phase is Phase.OPEN:
            identity = self.session.identity
            assert identity is not None
            # Time stands at most at the deadline's: what is due then has been done.
            assert identity.expires_at is None or self.session.deadline <= identity.expires_at
            if self.pinged_at is not None:
                assert self.session.deadline <= self.pinged_at + LIMITS.pong_timeout_s

    def teardown(self) -> None:
        """Every command that is still open gets its answer when the driver's work is done."""
        while self.joins:
            self.end_join(0, good=True, recovered=None)
        while self.requests:
            self.end_request(0, good=True)
        if self.open and self.session.phase is Phase.OPEN:
            assert not self.unanswered


def _until(who: Identity, now: float, lifetime_s: float | None) -> Identity:
    expires_at = None if lifetime_s is None else now + lifetime_s
    return Identity(who.tenant, who.user, expires_at, who.anonymous)


TestSession = Driver.TestCase
TestSession.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)


def test_the_driver_above_notices_a_session_that_answers_twice() -> None:
    driver = Driver()
    driver.connect(ANN, None)
    answer: Callable[[], list[Action]] = lambda: [Answer(1, c.Published())]  # noqa: E731
    with pytest.raises(AssertionError, match="nobody asked"):
        driver.perform(answer())
