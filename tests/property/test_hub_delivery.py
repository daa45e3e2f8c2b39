"""Delivery and replay as a whole: hub, rooms, history and connections against a model of the truth.

What is real: everything between the buses and the sockets. What the test plays: the relay, the
consumer, the stores (late, old, short or failing answers), the clients and their sockets. Each
subscriber checks what it is sent: dense from its start, once, in order, or told otherwise.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import gateway.connection
import gateway.room
from gateway.commands import Since
from gateway.connection import Connection, Services
from gateway.deadlines import Deadlines
from gateway.history import History, PageLimits
from gateway.hub import Hub
from gateway.memory import ENCODED_BYTES, MESSAGE_BYTES, Memory
from gateway.namespaces import Identity, Namespaces
from gateway.protocols.centrifuge_json import CentrifugeJSON
from gateway.room import Room
from gateway.session import Limits
from tests.property.world import TENANT, Client, Socket, Stores, Truth

ROOMS = ("a", "b")
CLIENTS = 4
PAGE = 2
CEILING_BYTES = 600
MOST_BYTES = CEILING_BYTES + 2_000
"""The ceiling, and what may be written before it is noticed: a reply with a page for each room, and
a batch of the bus."""
LIMITS = Limits(
    ping_interval_s=25,
    pong_timeout_s=8,
    handshake_timeout_s=10,
    subscriptions_max=10,
    requests_max=5,
)


class Consumer:
    """The part of ``gateway.consumer.Consumer`` that connections see."""

    def __init__(self, hub: Hub, truth: Truth) -> None:
        self.hub = hub
        self.truth = truth
        self.epoch = truth.epoch
        self.lag = 0

    async def attach(self, shard: int) -> None:
        await asyncio.sleep(0)
        self.hub.positions.setdefault(shard, max(0, self.truth.appended - self.lag))

    def suspect(self) -> None:
        pass


@contextmanager
def small_slices() -> Iterator[None]:
    """Slices of two subscribers, and no pause before a read is tried again."""
    before = gateway.room.SLICE, gateway.connection.RETRY_S
    gateway.room.SLICE, gateway.connection.RETRY_S = 2, (0.0, 0.0)
    try:
        yield
    finally:
        gateway.room.SLICE, gateway.connection.RETRY_S = before


def remembered(room: Room) -> bytes:
    """Everything that the room holds of messages, in one piece."""
    memory = room.memory
    held = [message.payload for message in memory.ring]
    if (replay := memory._replay) is not None:
        held += [m.payload for page in replay.pages.values() for m in page.messages]
        held += [m.payload for m in replay.recent]
        held += [part for made in replay.encoded.values() for part in made.values()]
        held += [p for page in replay.pages.values() for ps in page.encoded.values() for p in ps]
        held += [joined for _, joined in replay.joined.values()]
    return b"\n".join(held)


def charge(memory: Memory) -> int:
    """What the budget must know of it."""
    messages, encoded = list(memory.ring), []
    size_bytes = 0
    if (replay := memory._replay) is not None:
        encoded += [part for made in replay.encoded.values() for part in made.values()]
        for page in replay.pages.values():
            messages += page.messages
            encoded += [part for parts in page.encoded.values() for part in parts]
        size_bytes += sum(len(joined) for _, joined in replay.joined.values())
    size_bytes += sum(len(message.payload) + MESSAGE_BYTES for message in messages)
    return size_bytes + sum(len(part) + ENCODED_BYTES for part in encoded)


class Delivery(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = small_slices()
        self.patch.__enter__()
        self.loop = asyncio.new_event_loop()
        self.truth = Truth()
        self.stores = Stores(self.truth)
        self.hub = Hub(1, 1, ring_messages=3, ring_bytes=10_000)
        self.consumer = Consumer(self.hub, self.truth)
        # Two of them, as if two protocols were spoken.
        self.protocols = (CentrifugeJSON(), CentrifugeJSON())
        self.delivery: Iterator[None] | None = None
        self.services = Services(
            hub=self.hub,
            consumer=self.consumer,  # type: ignore[arg-type]
            history=History(
                self.hub,
                self.stores,  # type: ignore[arg-type]
                self.stores,  # type: ignore[arg-type]
                PageLimits(PAGE, 10_000, 1_000.0),
                lambda: self.consumer.epoch,
                self.consumer.suspect,
            ),
            writer=None,  # type: ignore[arg-type]
            deadlines=Deadlines(lambda: 0.0),
            namespaces=Namespaces({}),
            limits=LIMITS,
            stall_timeout_s=30.0,
            version="test",
            authenticate=lambda token, now: Identity(TENANT, "", None, anonymous=True),
            clock=lambda: 0.0,
            left=lambda connection: None,
        )
        self.clients = [Client(self.truth) for _ in range(CLIENTS)]
        self.sockets = [Socket(CEILING_BYTES) for _ in range(CLIENTS)]
        self.connections: list[Connection] = []
        for number in range(CLIENTS):
            self.connections.append(self.connected(number))

    def connected(self, number: int) -> Connection:
        socket = self.sockets[number] = Socket(CEILING_BYTES)
        connection = Connection(str(number), socket, self.protocols[number % 2], self.services)
        socket.listener = connection
        connection.received(self.clients[number].connect())
        return connection

    def turn(self) -> None:
        """Let the tasks run until they wait for something."""

        async def some() -> None:
            for _ in range(12):
                await asyncio.sleep(0)

        self.loop.run_until_complete(some())

    def on_loop(self, number: int, frame: str) -> None:
        async def send() -> None:
            self.connections[number].received(frame)

        self.loop.run_until_complete(send())

    @initialize(
        joined=st.booleans(),
        ring_messages=st.sampled_from((0, 3, 3, 20)),
        ring_bytes=st.sampled_from((60, 10_000)),
        memory_bytes=st.sampled_from((2_000, 12_000, 1_000_000)),
    )
    def begin(
        self,
        joined: bool,
        ring_messages: int = 3,
        ring_bytes: int = 10_000,
        memory_bytes: int = 1_000_000,
    ) -> None:
        """In half of the cases with everybody live."""
        self.hub._ring_messages, self.hub._ring_bytes = ring_messages, ring_bytes
        self.hub.budget.max_bytes = memory_bytes
        if joined:
            for number in range(CLIENTS):
                self.subscribe(number, "a", "new", turn=True)
                for read in list(self.stores.reads):
                    self.async_do(lambda read=read: read.answer("late"))
                self.turn()
                self.read(number, 10_000)

    # Writers, relay, consumer

    @rule(rooms=st.lists(st.sampled_from(ROOMS), min_size=1, max_size=6))
    def commit(self, rooms: list[str]) -> None:
        for room in rooms:
            self.truth.commit(room)

    @rule(room=st.sampled_from(ROOMS), back=st.integers(0, 6))
    def redact(self, room: str, back: int) -> None:
        """One of the newest messages, which may be anywhere on its way."""
        offset = self.truth.head(room) - back
        if offset >= self.truth.first(room):
            self.truth.redact(room, offset)

    @rule(which=st.integers(0, 30), what=st.integers(0, 1), known=st.booleans())
    @precondition(lambda self: self.delivery is None and self.stores.reads)
    def redact_during_a_read(self, which: int, what: int, known: bool) -> None:
        """A read has the content in its hands and ends when the notice was delivered. With
        ``known`` it ends before, and another has told already where the room stands with it."""
        begun = [r for r in self.stores.reads if getattr(r.early, "messages", ())]
        if not begun:
            return
        read = begun[which % len(begun)]
        content = read.early.messages[what % len(read.early.messages)]
        if self.truth.redactions.get((self.truth.epoch, content.seq)):
            return
        if content not in self.truth.log[self.truth.dropped :]:
            return
        self.truth.redact(content.room, content.offset)
        self.truth.appended = self.truth.seq
        if known:
            room = self.hub.rooms.get((TENANT, content.room))
            if room is not None:
                room.anchor(self.truth.head(content.room), room.generation)
            self.async_do(lambda: read.answer("early"))
            self.turn()
        while self.hub.positions.get(0, self.truth.seq) < self.truth.seq:
            self.deliver(50, 0)
            while self.delivery is not None:
                self.go_on()
        self.async_do(lambda: read.answer("early"))
        self.turn()

    @rule(count=st.integers(1, 20))
    def append(self, count: int) -> None:
        self.truth.appended = min(self.truth.seq, self.truth.appended + count)

    @rule(count=st.integers(1, 8), again=st.integers(0, 2), held=st.booleans())
    @precondition(lambda self: self.delivery is None)
    def deliver(self, count: int, again: int, held: bool = False) -> None:
        """The consumer reads some entries; with ``again``, some that it has had."""
        position = self.hub.positions.get(0)
        if position is None:
            return
        if position < self.truth.dropped:
            self.async_do(lambda: self.hub.lose(0, self.truth.dropped))
            return
        first = max(self.truth.dropped, position - again)
        messages = self.truth.bus(first, min(position + count, self.truth.appended), held)
        if messages and messages[-1].seq > position:
            self.delivery = self.hub.deliver(0, messages)
            self.go_on()

    @rule()
    @precondition(lambda self: self.delivery is not None)
    def go_on(self) -> None:
        def step() -> None:
            assert self.delivery is not None
            if next(self.delivery, self) is self:
                self.delivery = None

        self.async_do(step)

    @rule()
    @precondition(lambda self: self.delivery is not None)
    def give_up(self) -> None:
        """The consumer's connection breaks between two slices."""

        def close() -> None:
            assert self.delivery is not None
            self.delivery.close()  # type: ignore[attr-defined]
            self.delivery = None

        self.async_do(close)

    def async_do(self, do: "object") -> None:
        async def run() -> None:
            do()  # type: ignore[operator]

        self.loop.run_until_complete(run())

    @rule(lag=st.integers(0, 5))
    def sweep(self, lag: int) -> None:
        """Rooms without subscribers are dropped; the shard is attached anew from another place."""
        self.consumer.lag = lag
        self.hub.sweep(0.0, 0.0)
        for shard in self.hub.sweep(1.0, 0.0):
            if self.delivery is None:
                self.hub.positions.pop(shard)

    @rule(count=st.integers(1, 10))
    def retain_less(self, count: int) -> None:
        self.truth.dropped = min(self.truth.appended, self.truth.dropped + count)

    @rule(kept=st.integers(0, 100))
    @precondition(lambda self: self.delivery is None and self.truth.seq > 10)
    def lose_commits(self, kept: int) -> None:
        """As ``Worker._restart`` does on a new epoch."""
        self.truth.new_epoch(kept % (self.truth.seq + 1))

        def restart() -> None:
            self.consumer.epoch = self.truth.epoch
            for connection in self.connections:
                connection.evict_all()
            self.hub.restart()

        self.async_do(restart)

    # Stores

    @rule(
        which=st.integers(0, 30),
        how=st.sampled_from(("late", "late", "early", "early", "old", "none", "fail")),
        lag=st.integers(0, 6),
    )
    @precondition(lambda self: self.stores.reads)
    def answer(self, which: int, how: str, lag: int) -> None:
        reads = list(self.stores.reads)
        self.async_do(lambda: reads[which % len(reads)].answer(how, lag))

    @rule()
    def pause(self) -> None:
        self.turn()

    # Clients

    @rule(
        number=st.integers(0, CLIENTS - 1),
        room=st.sampled_from(ROOMS),
        how=st.sampled_from(("new", "resume", "resume", "start", "head", "future", "other")),
        turn=st.booleans(),
    )
    def subscribe(self, number: int, room: str, how: str, turn: bool) -> None:
        client = self.clients[number]
        place = client.place(room)
        if place.subscribed or place.wanted or room in client.leaving.values():
            return
        head = self.truth.head(room, self.truth.appended)
        since = {
            "new": None,
            "resume": Since(place.offset, place.epoch),
            "start": Since(),
            # What another gateway, which is ahead of this one, has delivered.
            "head": Since(head, self.truth.epoch),
            "future": Since(self.truth.head(room) + 2, self.truth.epoch),
            "other": Since(head, "another"),
        }[how]
        self.on_loop(number, client.subscribe(room, since))
        if turn:
            self.turn()

    @rule(number=st.integers(0, CLIENTS - 1), room=st.sampled_from(ROOMS))
    def unsubscribe(self, number: int, room: str) -> None:
        self.on_loop(number, self.clients[number].unsubscribe(room))

    @rule(number=st.integers(0, CLIENTS - 1), size=st.sampled_from((50, 400, 10_000)))
    def read(self, number: int, size: int) -> None:
        def read() -> None:
            self.clients[number].take(self.sockets[number].read(size))

        self.async_do(read)
        self.notice_answers(number)

    def notice_answers(self, number: int) -> None:
        """A refused or ended subscription may be tried again."""
        client = self.clients[number]
        under_way = {asked.room for asked in client.asked.values()} | {*client.leaving.values()}
        for place in client.places.values():
            if not place.subscribed and place.room not in under_way:
                place.wanted = False

    @rule(number=st.integers(0, CLIENTS - 1))
    def come_back(self, number: int) -> None:
        async def reconnect() -> None:
            self.connections[number].closed()
            self.connections[number] = self.connected(number)

        self.loop.run_until_complete(reconnect())

    # What always holds

    @invariant()
    def what_was_redacted_is_not_remembered(self) -> None:
        """From the moment in which the worker has delivered the notice."""
        position = self.hub.positions.get(0)
        if position is None or self.delivery is not None:
            return
        for (epoch, _), redaction in self.truth.redactions.items():
            content = redaction.content
            room = self.hub.rooms.get((TENANT, content.room))
            if epoch == self.consumer.epoch and redaction.notice <= position and room is not None:
                assert content.payload not in remembered(room), (content, room.memory)

    @invariant()
    def what_is_remembered_is_bounded(self) -> None:
        memories = [room.memory for room in self.hub.rooms.values()]
        budget = self.hub.budget
        assert budget.used_bytes == sum(memory.charged_bytes for memory in memories)
        assert budget.used_bytes <= budget.max_bytes
        for memory in memories:
            assert memory.charged_bytes == charge(memory)
            assert sum(len(m.payload) for m in memory.ring) <= memory._ring_max_bytes

    @invariant()
    def memory_is_bounded(self) -> None:
        for socket in self.sockets:
            assert socket.most_bytes <= MOST_BYTES, socket.most_bytes

    @invariant()
    def the_live_stand_at_the_top(self) -> None:
        for room in self.hub.rooms.values():
            for of_protocol in room.live.values():
                assert not of_protocol or room.top is not None
                assert all(s.live and s not in room.others for s in of_protocol)
            for index, message in enumerate(room.memory.ring):
                assert room.top is not None
                assert message.offset == room.top - len(room.memory.ring) + 1 + index

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            for connection in self.connections:
                connection.closed()
            self.turn()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
            self.patch.__exit__(None, None, None)

    def settle(self) -> None:
        """All answer, all read, all is delivered: then each client must have everything."""
        self.consumer.lag = 0
        for _ in range(300):
            while self.delivery is not None:
                self.go_on()
            self.truth.appended = self.truth.seq
            self.deliver(50, 0)
            for read in list(self.stores.reads):
                self.async_do(lambda read=read: read.answer("late"))
            self.turn()
            for number in range(CLIENTS):
                self.read(number, 10_000)
            if self.is_settled():
                return
            for number, client in enumerate(self.clients):
                for place in client.places.values():
                    if place.epoch and not place.subscribed and not place.wanted:
                        since = Since(place.offset, place.epoch)
                        self.on_loop(number, client.subscribe(place.room, since))
        raise AssertionError(
            f"never settled: {[c.places for c in self.clients]}, {self.hub.positions}, "
            f"heads {[self.truth.head(room) for room in ROOMS]}"
        )

    def is_settled(self) -> bool:
        return not self.stores.reads and all(
            place.subscribed
            and place.epoch == self.truth.epoch
            and place.offset == self.truth.head(place.room)
            for client in self.clients
            for place in client.places.values()
            if place.epoch
        )


TestDelivery = Delivery.TestCase
TestDelivery.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
