"""What a run came to, as Markdown for people and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tests.chaos.schedule import Fault
from tests.chaos.trial import Verdict


@dataclass(frozen=True, slots=True)
class Delivery:
    """When a message was committed and when a steady client was given it, in the run's time."""

    committed_s: float
    received_s: float


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault as it went: healing can take longer than planned."""

    fault: Fault
    began_s: float
    healed_s: float


@dataclass(frozen=True, slots=True)
class Stall:
    """What steady clients noticed of a fault."""

    delay_s: float
    """The longest delivery of those under way meanwhile. Faults overlap: it may be another's."""
    recovery_s: float
    """From the end of the fault to the first delivery to each client of what came after it."""


@dataclass(frozen=True, slots=True)
class Report:
    """A run."""

    seed: int
    duration_s: float
    injected: tuple[Injected, ...]
    deliveries: tuple[Delivery, ...]
    reconnects: int
    """Connections that clients lost and made anew."""
    recoveries: int
    """Subscriptions that were resumed without a loss."""
    not_recovered: int
    """Those that were told that continuity is lost; none in a good run."""
    prepared: int
    """Transactions that were prepared (PREPARE TRANSACTION)."""
    restarts: int
    """Processes that ended by themselves, where a store was away at their start, and were started
    again."""
    verdict: Verdict
    troubles: tuple[str, ...]
    """Tracebacks in logs, faults that could not be done."""

    @property
    def good(self) -> bool:
        return self.verdict.good and not self.troubles

    def stalls(self) -> dict[str, tuple[int, Stall]]:
        """By kind and sort of target: how often, and the worst that was seen."""
        worst: dict[str, tuple[int, Stall]] = {}
        ordered = sorted(self.deliveries, key=lambda delivery: delivery.committed_s)
        for injected in self.injected:
            stall = stall_of(injected, ordered)
            name = f"{injected.fault.kind} of {sort_of(injected.fault.target)}"
            times, before = worst.get(name, (0, Stall(0.0, 0.0)))
            worst[name] = (
                times + 1,
                Stall(max(before.delay_s, stall.delay_s), max(before.recovery_s, stall.recovery_s)),
            )
        return dict(sorted(worst.items()))

    def markdown(self) -> str:
        verdict = self.verdict
        calm_s = calm(self.deliveries, self.injected)
        lines = [
            f"# Chaos run, seed {self.seed}",
            "",
            f"**{'Good' if self.good else 'VIOLATIONS'}.** {len(verdict.violations)} violations, "
            f"{len(verdict.unsettled)} clients or streams that did not come to rest, "
            f"{len(self.troubles)} other troubles.",
            "",
            "| what | how many |",
            "|---|---|",
            f"| minutes | {self.duration_s / 60:.1f} |",
            f"| faults injected | {len(self.injected)} |",
            f"| messages committed | {verdict.messages} |",
            f"| messages rolled back | {verdict.rolled_back} |",
            f"| messages with the answer to their commit lost | {verdict.uncertain} |",
            f"| transactions prepared | {self.prepared} |",
            f"| deliveries | {verdict.deliveries} |",
            f"| connections lost and made anew | {self.reconnects} |",
            f"| recoveries: subscriptions resumed without a loss | {self.recoveries} |",
            f'| subscriptions told "not recovered" | {self.not_recovered} |',
            f"| processes that ended by themselves | {self.restarts} |",
            "",
            f"Repeat it with `make chaos SEED={self.seed} MINUTES={self.duration_s / 60:g}`.",
            "",
            "Median delivery to a steady client after the answer to its commit, while nothing "
            + (f"failed: {calm_s * 1000:.1f} ms." if calm_s else "failed: there was no such time."),
            "",
            "## Faults and the worst that was noticed of them",
            "",
            "The longest delivery to a steady client under way during a fault of the kind (faults",
            "overlap, so it may be due to another), and how long after the end of the fault",
            "something committed after it had reached every steady client.",
            "",
            "| fault | times | longest delivery, s | back after, s |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {times} | {stall.delay_s:.2f} | {stall.recovery_s:.2f} |"
            for name, (times, stall) in self.stalls().items()
        ]
        wrong = [*map(str, verdict.violations), *verdict.unsettled, *self.troubles]
        if wrong:
            lines += ["", "## What was wrong", "", *(f"- {line:.500}" for line in wrong)]
        lines += ["", "## Schedule", "", "```"]
        lines += [f"{i.fault} (from {i.began_s:.1f} to {i.healed_s:.1f} s)" for i in self.injected]
        return "\n".join([*lines, "```", ""])

    def json(self) -> str:
        return json.dumps(
            {
                "seed": self.seed,
                "duration_s": self.duration_s,
                "good": self.good,
                "messages": self.verdict.messages,
                "deliveries": self.verdict.deliveries,
                "rolled_back": self.verdict.rolled_back,
                "uncertain": self.verdict.uncertain,
                "reconnects": self.reconnects,
                "recoveries": self.recoveries,
                "not_recovered": self.not_recovered,
                "prepared": self.prepared,
                "restarts": self.restarts,
                "violations": [str(violation) for violation in self.verdict.violations],
                "unsettled": list(self.verdict.unsettled),
                "troubles": list(self.troubles),
                "stalls": {
                    name: {"times": times, **asdict(stall)}
                    for name, (times, stall) in self.stalls().items()
                },
                "faults": [asdict(injected) for injected in self.injected],
            },
            indent=1,
        )


def sort_of(target: str) -> str:
    """``relay-2 to redis`` → ``relay to redis``."""
    return " ".join(word.rstrip("0123456789").rstrip("-") for word in target.split())


def stall_of(injected: Injected, ordered: Sequence[Delivery]) -> Stall:
    """From the deliveries in order of commit."""
    delay_s = max(
        (
            delivery.received_s - delivery.committed_s
            for delivery in ordered
            if delivery.committed_s <= injected.healed_s and delivery.received_s >= injected.began_s
        ),
        default=0.0,
    )
    first = next((d for d in ordered if d.committed_s >= injected.healed_s), None)
    recovery_s = 0.0 if first is None else first.received_s - injected.healed_s
    return Stall(delay_s, recovery_s)


def calm(deliveries: Sequence[Delivery], injected: Sequence[Injected]) -> float:
    """The median delivery at times without any fault, in seconds; 0 if there was none."""
    delays = sorted(
        delivery.received_s - delivery.committed_s
        for delivery in deliveries
        if not any(
            one.began_s - 1 <= delivery.received_s and delivery.committed_s <= one.healed_s + 3
            for one in injected
        )
    )
    return delays[len(delays) // 2] if delays else 0.0
