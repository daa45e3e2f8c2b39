"""Judges runs: whether clients were given what Postgres committed, and nothing else.

Pure. Three steps, each of which returns what is wrong, an empty list for a good run:

* ``assemble`` makes the log of all rooms from its rows and checks that offsets are 1 … n.
* ``judge_log`` compares the log with what the writers know to have committed.
* ``judge`` compares each client's record with the log.

Contents are texts that differ for any two messages, so that a message in the wrong place is told
from one that was altered on its way.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

Key: TypeAlias = tuple[str, str]
"""Tenant and room."""

Log: TypeAlias = Mapping[Key, Sequence[str]]
"""Each room's contents, that of offset 1 first."""


class Fault(Enum):
    """What can be wrong with a run."""

    HOLE = "offsets were left out"
    REPEAT = "an offset came twice"
    INVERSION = "an offset came after a higher one"
    ALTERED = "the content is not the one that was committed"
    FOREIGN = "a message of another room or tenant, or of one not subscribed to"
    INVENTED = "a message that was never committed"
    NOT_RECOVERED = "the client was told that continuity was lost, or that it had none"
    MOVED = "the subscription continued from another position than the client's"
    OTHER_EPOCH = "the epoch changed"
    ENDED = "the server ended the subscription for good"
    MISSING_TAIL = "the last messages never came"
    LOST = "a committed message is not in the log"
    DOUBLED = "a committed message is in the log more than once"
    TORN = "the log has a part of a transaction"
    PHANTOM = "the log has a message that was not committed"
    DISORDER = "the log has a message before one that was committed before it was inserted"
    SPARSE = "the log's offsets are not 1 … n"


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong."""

    fault: Fault
    key: Key
    client: str
    """Whose record shows it; empty for the log itself."""
    detail: str

    def __str__(self) -> str:
        whose = f"{self.client} in " if self.client else ""
        return f"{self.fault.name}: {whose}{'/'.join(self.key)}: {self.detail}"


# What a client records of a subscription, in the order in which it was told.


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The server's answer to a subscribe command."""

    epoch: str
    offset: int
    was_recovering: bool
    """Whether the client had asked to resume."""
    recovered: bool


@dataclass(frozen=True, slots=True)
class Received:
    """A publication that was handed to the application."""

    offset: int
    content: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The subscription stopped for now; the client comes back by itself."""

    code: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The server ended the subscription, or the connection, for good."""

    code: int
    reason: str


Event: TypeAlias = Subscribed | Received | Interrupted | Ended


@dataclass(frozen=True, slots=True)
class Record:
    """All that one client was told of one room."""

    client: str
    key: Key
    events: Sequence[Event]
    start: int = 0
    """The offset from which the client followed the room."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A message whose transaction has committed, as far as is known.

    Times are of one monotonic clock.
    """

    key: Key
    content: str
    transaction: str
    index: int
    """Place among the messages of its transaction."""
    inserted_at: float
    """A time before the INSERT was sent."""
    committed_at: float
    """A time after COMMIT had returned; infinity if it never did."""
    certain: bool = True
    """Whether it is known to have committed. The answer to a COMMIT can be lost: then either all
    messages of the transaction are in the log or none."""


def assemble(rows: Iterable[tuple[Key, int, str]]) -> tuple[dict[Key, list[str]], list[Violation]]:
    """The log from its rows (room, offset, content), in any order."""
    rooms: dict[Key, list[tuple[int, str]]] = {}
    for key, offset, content in rows:
        rooms.setdefault(key, []).append((offset, content))
    violations = []
    for key, found in rooms.items():
        found.sort()
        offsets = [offset for offset, _ in found]
        if offsets != list(range(1, len(offsets) + 1)):
            wrong = next(i for i, offset in enumerate(offsets, 1) if offset != i)
            violations.append(
                Violation(
                    Fault.SPARSE, key, "", f"offset {offsets[wrong - 1]} in the place of {wrong}"
                )
            )
    return {key: [content for _, content in found] for key, found in rooms.items()}, violations


def judge_log(log: Log, committed: Iterable[Committed]) -> list[Violation]:
    """Whether the log holds exactly what was committed, in an order that fits the commits."""
    by_place = {(message.key, message.content): message for message in committed}
    found = Counter((key, content) for key, contents in log.items() for content in contents)
    present = {message.transaction for place, message in by_place.items() if place in found}
    violations = []
    for (key, content), message in by_place.items():
        if (key, content) not in found:
            if message.certain:
                violations.append(Violation(Fault.LOST, key, "", content[:80]))
            if message.transaction in present:
                violations.append(Violation(Fault.TORN, key, "", content))
    for (key, content), times in found.items():
        if (key, content) not in by_place:
            violations.append(Violation(Fault.PHANTOM, key, "", content[:80]))
        if times > 1:
            violations.append(Violation(Fault.DOUBLED, key, "", f"{times} times {content[:80]}"))
    for key, contents in log.items():
        room = [by_place[key, c] for c in contents if (key, c) in by_place]
        violations += _disorder(key, room)
    return violations


def _disorder(key: Key, room: Sequence[Committed]) -> list[Violation]:
    violations = []
    newest: Committed | None = None
    last_index: dict[str, int] = {}
    for message in room:
        if newest is not None and message.committed_at < newest.inserted_at:
            detail = f"{newest.content[:80]} before {message.content[:80]}"
            violations.append(Violation(Fault.DISORDER, key, "", detail))
        if message.index <= last_index.get(message.transaction, -1):
            detail = f"{message.content[:80]} out of its place in {message.transaction}"
            violations.append(Violation(Fault.DISORDER, key, "", detail))
        last_index[message.transaction] = message.index
        if newest is None or message.inserted_at > newest.inserted_at:
            newest = message
    return violations


def judge(log: Log, records: Iterable[Record]) -> list[Violation]:
    """Whether every client accepted its rooms' offsets without hole, repeat or inversion, with the
    committed contents, to the end, and was never told that continuity was lost."""
    owners: dict[str, Key] = {c: key for key, contents in log.items() for c in contents}
    return [v for record in records for v in _Judgement(log, owners, record).violations]


class _Judgement:
    """Walks through one record."""

    def __init__(self, log: Log, owners: Mapping[str, Key], record: Record) -> None:
        self.violations: list[Violation] = []
        self._record = record
        self._contents = log.get(record.key, ())
        self._owners = owners
        self._position: int | None = None
        self._epoch = ""
        self._open = False
        self._seen: set[int] = set()
        for event in record.events:
            match event:
                case Subscribed():
                    self._subscribed(event)
                case Received():
                    self._received(event)
                case Interrupted():
                    self._open = False
                case Ended(code, reason):
                    self._open = False
                    self._report(Fault.ENDED, f"{code} {reason}")
        self._finish()

    def _report(self, fault: Fault, detail: str) -> None:
        violation = Violation(fault, self._record.key, self._record.client, detail)
        self.violations.append(violation)

    def _subscribed(self, event: Subscribed) -> None:
        first = self._position is None
        held = self._record.start if self._position is None else self._position
        told = f"stood at {held}, continued from {event.offset}"
        if self._epoch and event.epoch != self._epoch:
            self._report(Fault.OTHER_EPOCH, f"{self._epoch} became {event.epoch}")
        if event.was_recovering and not event.recovered:
            self._report(Fault.NOT_RECOVERED, told)
        elif not first and not event.was_recovering:
            self._report(Fault.NOT_RECOVERED, f"the client asked for no resume; {told}")
        elif event.offset != held:
            self._report(Fault.MOVED, told)
        if first or not event.recovered:
            held = event.offset
        self._position, self._epoch, self._open = held, event.epoch, True

    def _received(self, event: Received) -> None:
        if not self._open:
            self._report(Fault.FOREIGN, f"offset {event.offset} came without a subscription")
        self._check_content(event)
        position = self._record.start if self._position is None else self._position
        if event.offset in self._seen:
            self._report(Fault.REPEAT, f"offset {event.offset} at {position}")
        elif event.offset <= position:
            self._report(Fault.INVERSION, f"offset {event.offset} at {position}")
        else:
            if event.offset != position + 1:
                self._report(Fault.HOLE, f"offset {event.offset} at {position}")
            self._position = event.offset
        self._seen.add(event.offset)

    def _check_content(self, event: Received) -> None:
        offset, content = event.offset, event.content
        if 1 <= offset <= len(self._contents) and self._contents[offset - 1] == content:
            return
        owner = self._owners.get(content)
        if owner is not None and owner != self._record.key:
            self._report(Fault.FOREIGN, f"offset {offset} is a message of {'/'.join(owner)}")
        elif not 1 <= offset <= len(self._contents):
            self._report(Fault.INVENTED, f"offset {offset}, the head is {len(self._contents)}")
        else:
            was = self._contents[offset - 1]
            self._report(Fault.ALTERED, f"offset {offset}: {content[:80]!r}, not {was[:80]!r}")

    def _finish(self) -> None:
        head = len(self._contents)
        if self._position is None:
            self._report(Fault.MISSING_TAIL, f"was never subscribed; the head is {head}")
        elif self._position < head:
            self._report(Fault.MISSING_TAIL, f"stands at {self._position}, the head is {head}")
