"""Many clients: drives ``c/load.c``, which tells how."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import Any, Literal, Self

from benchmarks.histogram import Histogram
from benchmarks.native import compiled
from benchmarks.program import ANSWER_TIMEOUT_S, Program

Protocol = Literal["centrifuge", "plain", "greeted", "socketio", "nats"]
ENDPOINT = "/connection/websocket"
PREFIX = "room:"
STALL_MS = 5.0
VIOLATIONS = ("errors", "closed", "strange", "holes", "duplicates", "evicted", "unrecovered")


class Violation(Exception):
    """A client did not get what it must, or not once, or not in order."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a load saw since its mark."""

    latency: Histogram
    """Messages from sending to arrival, without those that were under way during a stall."""
    latency_in_stall: Histogram
    """Those: the load or its core was away, so their latency says little of the server."""
    joins: Histogram
    """From the TCP connect to the last subscribe reply, per connection."""
    numbers: dict[str, int]
    """All else, as ``load.c`` names it; violations and positions since it was started."""

    def __getitem__(self, name: str) -> int:
        return self.numbers[name]

    @property
    def messages(self) -> int:
        """Live deliveries and those in replies to a resume."""
        return self["deliveries"] + self["replayed"]

    @property
    def every_latency(self) -> Histogram:
        return self.latency + self.latency_in_stall

    @property
    def set_apart_percent(self) -> float:
        """The share of deliveries that overlapped a stall of the load."""
        return 100 * len(self.latency_in_stall) / max(1, len(self.every_latency))

    @property
    def span_s(self) -> float:
        """From the first message to the last."""
        return (self["last_ns"] - self["first_ns"]) / 1e9


class Load:
    """Clients of one server. ``rooms`` rooms in all, of which each client joins ``each``."""

    def __init__(
        self,
        port: int,
        cores: frozenset[int],
        *,
        path: str = ENDPOINT,
        protocol: Protocol = "centrifuge",
        rooms: int = 1,
        each: int = 1,
        prefix: str = PREFIX,
        tokens: Sequence[str] = (),
        narrow: int = 0,
        opening: int = 64,
    ) -> None:
        """``protocol`` is what the server speaks; see ``load.c``. ``narrow`` clients have a small
        receive buffer. ``opening`` clients come at one time."""
        self.rooms = [f"{prefix}{number}" for number in range(rooms)]
        settings: dict[str, object] = {
            "port": port,
            "path": path,
            "protocol": protocol,
            "rooms": rooms,
            "each": each,
            "prefix": prefix,
            "narrow": narrow,
            "opening": opening,
            "stall_ms": STALL_MS,
        }
        with NamedTemporaryFile("w", prefix="tidegate-tokens-") as file:
            if tokens:
                file.write("".join(f"{token}\n" for token in tokens))
                file.flush()
                settings["tokens"] = file.name
            self._program = Program(
                "load",
                [str(compiled("load")), *(f"{k}={v}" for k, v in settings.items())],
                cores,
            )
            self._program.ask("mark")  # it has read the tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.stop()

    def open(self, count: int, timeout_s: float = 120.0) -> None:
        """Open so many more connections and join their rooms. Raises Violation."""
        self.begin(count)
        self.opened(timeout_s)

    def begin(self, count: int) -> None:
        """The same, without waiting for ``opened``."""
        self._program.tell(f"open {count}\n".encode())

    def opened(self, timeout_s: float = 120.0) -> None:
        """Wait until those that were begun are there. Raises Violation."""
        self._program.answer(timeout_s)
        self.report()

    def mark(self) -> None:
        """Count anew from here on."""
        self._program.ask("mark")

    def reach(self, messages: int, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Wait until so many messages have come since the mark."""
        self._program.ask(f"await {messages}", timeout_s)

    def report(self, *, allowed: Collection[str] = ()) -> Report:
        """What was seen since the mark. Raises Violation, but not for those ``allowed``."""
        said: dict[str, Any] = self._program.ask("report")
        trouble = said.pop("trouble")
        del said["event"]
        latency, in_stall, joins = (
            Histogram(said.pop(name)) for name in ("latency", "latency_in_stall", "joins")
        )
        broken = [
            f"{said[name]} {name}" for name in VIOLATIONS if said[name] and name not in allowed
        ]
        if broken:
            raise Violation(f"{', '.join(broken)}; the first: {trouble}")
        return Report(latency, in_stall, joins, said)

    def look(self, every_us: int) -> None:
        """Look for arrivals so often, instead of being woken by each (0). Where receivers are on
        another machine, no sender pays for waking them; here it does, unless they only look."""
        self._program.ask(f"look {every_us}")

    def pause(self, count: int) -> None:
        """Stop reading from the first so many connections."""
        self._program.ask(f"pause {count}")

    def unpause(self) -> None:
        """Read on."""
        self._program.ask("unpause")

    def drop(self) -> None:
        """Cut all connections; positions are kept."""
        self._program.ask("drop")

    def resume(self, timeout_s: float = 120.0) -> None:
        """Open all again, resuming where each was. Raises Violation."""
        self._program.ask("resume", timeout_s)
        self.report()
