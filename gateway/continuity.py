"""What a client can check of the promise that it misses nothing, repeats nothing, in order.

Pure: ``gateway.tail`` feeds it what a gateway says.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

START = "start"


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a room. An empty epoch with offset 0 is the beginning of any history."""

    epoch: str
    offset: int

    @classmethod
    def parse(cls, text: str) -> "Position":
        """``EPOCH:OFFSET``, or ``start``. Raises ValueError with the remedy."""
        if text == START:
            return cls("", 0)
        epoch, colon, offset = text.rpartition(":")
        if not colon or not epoch or not offset.isascii() or not offset.isdigit():
            raise ValueError(f"{text!r} is not a position: give EPOCH:OFFSET or `{START}`")
        return cls(epoch, int(offset))

    def __str__(self) -> str:
        return f"{self.epoch}:{self.offset}" if self.epoch else START


class Verdict(Enum):
    """What an arriving offset is, against the position held."""

    NEXT = "next"
    REPEATED = "repeated"
    """At or below the position: the client has it already."""
    HOLE = "hole"
    """Beyond the next one: the messages between are missing."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What was seen so far."""

    messages: int = 0
    first: int | None = None
    """Offset of the first message; None while there is none."""
    missing: int = 0
    """Offsets that a later one jumped over."""
    repeated: int = 0
    reconnects: int = 0
    lost: int = 0
    """How often the gateway said that continuity was lost."""
    contradictions: int = 0
    """Replies that claim continuity and cannot have it."""

    @property
    def kept(self) -> bool:
        """Whether the gateway kept its promise. Saying that continuity is lost keeps it."""
        return not (self.missing or self.repeated or self.contradictions)


@dataclass(slots=True)
class Continuity:
    """The position of one subscription and what went wrong on the way."""

    position: Position | None = None
    """Where to resume; None before the first subscription."""
    tally: Tally = field(default_factory=Tally)

    def subscribed(self, epoch: str, offset: int, recovered: bool) -> str | None:
        """A subscription stands; returns what the user must be told of it, or None.

        ``epoch`` and ``offset`` are the reply's. If recovered, messages go on after the position
        held; otherwise after the reply's.
        """
        held = self.position
        if held is None:
            self.position = Position(epoch, offset)
            return None
        if not recovered:
            self.position = Position(epoch, offset)
            self.tally = replace(self.tally, lost=self.tally.lost + 1)
            return f"not recovered: continuity lost at {held}, goes on after {self.position}"
        if held.epoch not in ("", epoch):
            self.tally = replace(self.tally, contradictions=self.tally.contradictions + 1)
            self.position = Position(epoch, offset)
            return f"contradiction: recovered from {held}, but the epoch is {epoch}"
        self.position = Position(epoch, held.offset)
        return None

    def arrived(self, offset: int) -> Verdict:
        """A message arrived. Only NEXT moves the position; a HOLE asks for a new subscription."""
        held = self.position
        if held is None:
            raise RuntimeError("a message arrived before a subscription")
        tally = self.tally
        if offset <= held.offset:
            self.tally = replace(tally, repeated=tally.repeated + 1)
            return Verdict.REPEATED
        if offset > held.offset + 1:
            self.tally = replace(tally, missing=tally.missing + offset - held.offset - 1)
            return Verdict.HOLE
        self.position = Position(held.epoch, offset)
        first = offset if tally.first is None else tally.first
        self.tally = replace(tally, messages=tally.messages + 1, first=first)
        return Verdict.NEXT

    def reconnected(self) -> None:
        """The connection was made anew."""
        self.tally = replace(self.tally, reconnects=self.tally.reconnects + 1)
