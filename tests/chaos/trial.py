"""One trial of a cluster: writers and clients at work, and at the end the verdict of the oracle."""

import asyncio
import json
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from outbox import tasks
from publisher import Message, publish_many_async
from tests.chaos.client import AlertClient, churn
from tests.chaos.cluster import Cluster
from tests.chaos.proxy import Link
from tests.chaos.writer import TwoPhases, Writer
from tests.oracle import Committed, Key, Record, Subscribed, Violation, assemble, judge, judge_log
from tests.probe import Probe
from tests.system.crowd import Member
from tests.system.progress import Progress
from tests.system.writers import content

SETTLE_S = 90.0
POLL_S = 0.05
CLOSE_S = 30.0
CLIENT_RECEIVE_BUFFER_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a trial."""

    messages: int
    """In the log."""
    deliveries: int
    """To all clients together."""
    rolled_back: int
    uncertain: int
    """Messages whose commit was never answered."""
    violations: tuple[Violation, ...]
    unsettled: tuple[str, ...]
    """What did not come to rest at the end: clients that are not complete, streams that differ."""

    @property
    def good(self) -> bool:
        return not self.violations and not self.unsettled

    def __str__(self) -> str:
        lines = [
            f"{self.messages} messages, {self.deliveries} deliveries, {self.rolled_back} rolled "
            f"back, {self.uncertain} commits unanswered, {len(self.violations)} violations"
        ]
        return "\n".join(
            [*lines, *(f"{v!s:.300}" for v in self.violations[:30]), *self.unsettled[:30]]
        )


class Trial:
    """Tenants and rooms of its own in a cluster that others may use after it."""

    def __init__(
        self, cluster: Cluster, seed: int, *, tenants: int = 1, rooms: int = 6, dsn: str = ""
    ) -> None:
        """``dsn``: how the writers reach the database, if it is not the cluster's way."""
        mark = secrets.token_hex(4)
        self.cluster = cluster
        self.random = random.Random(seed)
        self.tenants = [f"t{i}-{mark}" for i in range(tenants)]
        self.rooms: list[Key] = [(t, f"orders:{i}") for t in self.tenants for i in range(rooms)]
        self.members: list[Member] = []
        self.links: dict[str, Link] = {}
        """Each client's link to the gateways, by the client's name."""
        self.progress = Progress()
        self.writers: list[Writer] = []
        self.two_phases = TwoPhases()
        self._dsn = dsn
        self._published: list[Committed] = []
        self._stop = asyncio.Event()
        self._running: list[asyncio.Task[Any]] = []

    async def close(self) -> None:
        self._stop.set()
        self.progress.finish()
        if self._running:
            # One with a transaction to end goes on until it can.
            await asyncio.wait(self._running, timeout=CLOSE_S)
            await tasks.end(self._running)
        await asyncio.gather(*(member.leave() for member in self.members))
        for link in self.links.values():
            await link.__aexit__()

    # Clients

    async def make(
        self, kind: str = "client", rooms: Sequence[str] | None = None, pause_s: float = 0.0
    ) -> Member:
        """A client with a link of its own to all gateways in turn, which has not arrived."""
        tenant = self.tenants[len(self.members) % len(self.tenants)]
        name = f"{kind}-{len(self.members)}"
        ports = self.cluster.ports
        # Tenants times gateways: neighbours differ in both.
        start = (len(self.members) + len(self.members) // len(self.tenants)) % len(ports)
        link = Link(
            f"{name} to gateways",
            *ports[start:],
            *ports[:start],
            receive_buffer_bytes=CLIENT_RECEIVE_BUFFER_BYTES if pause_s else None,
        )
        await link.__aenter__()
        self.links[name] = link
        url = f"ws://127.0.0.1:{link.port}/connection/websocket"
        seed = self.random.getrandbits(32)
        client = AlertClient(url, self.cluster.token(tenant, name), seed, pause_s)
        own = rooms if rooms is not None else [room for t, room in self.rooms if t == tenant]
        member = Member(name, tenant, own, client, link, seed)  # type: ignore[arg-type]
        self.members.append(member)
        return member

    async def arrive(
        self, count: int = 4, kind: str = "client", pause_s: float = 0.0, *, late: bool = False
    ) -> list[Member]:
        """So many clients, subscribed to all rooms of their tenant; ``late``: from the start."""
        members = [await self.make(kind, pause_s=pause_s) for _ in range(count)]
        await asyncio.gather(*(member.arrive(late=late) for member in members))
        await asyncio.gather(*(member.settled() for member in members))
        return members

    @asynccontextmanager
    async def churning(self, at_once: int) -> AsyncIterator[None]:
        """Short-lived clients come and go meanwhile."""
        stop = asyncio.Event()

        async def make() -> Member:
            tenant = self.tenants[len(self.members) % len(self.tenants)]
            rooms = [room for t, room in self.rooms if t == tenant]
            return await self.make("brief", self.random.sample(rooms, min(3, len(rooms))))

        async def dismiss(member: Member) -> None:
            await member.leave()
            await self.links.pop(member.name).__aexit__()

        churning = [
            asyncio.create_task(churn(make, dismiss, stop, self.random)) for _ in range(at_once)
        ]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*churning)

    # Messages

    def write(self, count: int = 2, pause_s: float = 0.05) -> None:
        """Starts so many writers."""
        for _ in range(count):
            name = f"writer-{secrets.token_hex(3)}-{len(self.writers)}"
            seed = self.random.getrandbits(32)
            writer = Writer(
                name, self._where, self.rooms, seed, self.progress, self.two_phases, pause_s
            )
            self.writers.append(writer)
            self._running.append(asyncio.create_task(writer.run(self._stop)))

    def _where(self) -> str:
        return self._dsn or self.cluster.dsn

    async def written(self, more: int, timeout_s: float = SETTLE_S) -> None:
        """Waits until so many more messages are committed."""
        async with asyncio.timeout(timeout_s):
            await self.progress.reach(self.progress.count + more)
        for task in self._running:
            if task.done():
                task.result()

    async def publish(self, *keys: Key, data: Mapping[str, Any] | None = None) -> None:
        """One message to each, in one transaction."""
        sent = [(key, {"id": secrets.token_hex(8), **(data or {})}) for key in keys]
        inserted_at = time.monotonic()
        async with await psycopg.AsyncConnection.connect(self.cluster.dsn) as connection:
            txid = await publish_many_async(
                connection, [Message(room, data, tenant=tenant) for (tenant, room), data in sent]
            )
        self.record(txid, sent, inserted_at)

    def record(
        self, txid: str, sent: Sequence[tuple[Key, Mapping[str, Any]]], inserted_at: float
    ) -> None:
        """Takes note of messages that the test has just committed in its own way."""
        now = time.monotonic()
        self._published += [
            Committed(key, content(txid, data), txid, index, inserted_at, now)
            for index, (key, data) in enumerate(sent)
        ]

    @property
    def committed(self) -> list[Committed]:
        return [*self._published, *(m for writer in self.writers for m in writer.committed)]

    async def delivered(self, timeout_s: float = SETTLE_S, *members: Member) -> None:
        """Waits until these members (or all that are there) were given all that is certain now."""
        heads = Counter(message.key for message in self.committed if message.certain)
        chosen = members or [m for m in self.members if not m.name.startswith("brief")]
        late = await _late(chosen, heads, timeout_s)
        assert not late, "\n".join(late)

    # The end

    async def finish(self) -> None:
        """Ends the writers, and sends one more message to each room, after which none may come."""
        self._stop.set()
        self.progress.finish()
        await asyncio.gather(*self._running)
        self._running.clear()
        await self.forget_prepared()
        await self.publish(*self.rooms)

    async def forget_prepared(self) -> None:
        """Rolls back what no writer knows to be prepared, because the answer was lost."""
        assert self.two_phases.under_way == 0
        for (name,) in await self.cluster.sql(
            "SELECT gid FROM pg_prepared_xacts "
            "WHERE database = current_database() AND gid LIKE 'writer-%'"
        ):
            await self.cluster.sql(f"ROLLBACK PREPARED '{name}'")

    async def verdict(self, timeout_s: float = SETTLE_S) -> Verdict:
        """Ends the writers, waits until everything has come to rest, and judges."""
        await self.finish()
        unsettled: list[str] = []
        probe = Probe(self.cluster.dsn, self.cluster.redis.url)
        async with probe:
            if not await within(timeout_s, probe.drained):
                unsettled.append(f"{await probe.waiting()} rows wait in the outbox, or buses lag")
            log, violations = assemble(await self._rows())
            heads = {key: len(contents) for key, contents in log.items()}
            members = [m for m in self.members if not m.name.startswith("brief")]
            unsettled += await _late(members, heads, timeout_s)
            unsettled += await probe.differences(holes=True)
        committed = self.committed
        records = [
            _of_a_brief_one(record) if member.name.startswith("brief") else record
            for member in self.members
            for record in member.records()
            if not member.name.startswith("brief") or record.events
        ]
        violations += judge_log(log, committed)
        found = judge(log, records)
        # A client that went away was given what came until then.
        violations += [
            v
            for v in found
            if not (v.client.startswith("brief") and v.fault.name == "MISSING_TAIL")
        ]
        return Verdict(
            sum(heads.values()),
            sum(
                said.event == "publication" for member in self.members for said in member.diary.said
            ),
            sum(writer.rolled_back for writer in self.writers),
            sum(not message.certain for message in committed),
            tuple(violations),
            tuple(unsettled),
        )

    async def must_be_good(self) -> None:
        """Fails with what is wrong, if anything is."""
        verdict = await self.verdict()
        if not verdict.good:
            raise AssertionError(str(verdict))

    async def _rows(self) -> list[tuple[Key, int, str]]:
        rows = await self.cluster.sql(
            'SELECT tenant, room, "offset", txid::text, payload::text FROM tidegate.message '
            "WHERE tenant = ANY (%s)",
            (self.tenants,),
        )
        return [
            ((tenant, room), offset, content(txid, json.loads(payload)))
            for tenant, room, offset, txid, payload in rows
        ]


def _of_a_brief_one(record: Record) -> Record:
    """It came in the middle and follows the room from there, unless it asked for the past."""
    first = next((event for event in record.events if isinstance(event, Subscribed)), None)
    if first is None or first.was_recovering:
        return record
    return replace(record, start=first.offset)


async def _late(members: Sequence[Member], heads: Mapping[Key, int], timeout_s: float) -> list[str]:
    """A line for each that is not given the last message of each of its rooms in time."""
    outcomes = await asyncio.gather(
        *(member.read_up_to(dict(heads), timeout_s) for member in members), return_exceptions=True
    )
    lines = []
    for member, outcome in zip(members, outcomes, strict=True):
        if isinstance(outcome, AssertionError):
            missing = {
                room: f"{member.diary.last.get(room, 0)} of {heads.get((member.tenant, room), 0)}"
                for room in member.rooms
                if member.diary.last.get(room, 0) < heads.get((member.tenant, room), 0)
            }
            tail = [f"{said.event} {said.channel}" for said in member.diary.said[-8:]]
            lines.append(f"{member.name} lacks {missing}; its last events: {', '.join(tail)}")
        elif outcome is not None:
            raise outcome
    return lines


async def within(timeout_s: float, ready: Callable[[], Awaitable[bool]]) -> bool:
    """Whether ``ready`` became true in time."""
    deadline = time.monotonic() + timeout_s
    while not await ready():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True
