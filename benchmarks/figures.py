"""What a scenario brings back: figures with all their samples, and charts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure should be: at most, or at least, a number."""

    limit: float
    at_least: bool = False

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {number(self.limit)}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one case; a sample for each run."""

    case: str
    name: str
    """With its unit, if it has one."""
    samples: tuple[float, ...]
    target: Target | None = None

    @property
    def median(self) -> float:
        known = [sample for sample in self.samples if not math.isnan(sample)]
        return median(known) if known else math.nan

    @property
    def met(self) -> bool | None:
        """Whether the median meets the target; None if there is none."""
        return None if self.target is None else self.target.is_met(self.median)

    @property
    def text(self) -> str:
        """Median and spread (lowest … highest)."""
        if len(self.samples) == 1 or min(self.samples) == max(self.samples):
            return number(self.median)
        return f"{number(self.median)} ({number(min(self.samples))} … {number(max(self.samples))})"


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines of points."""

    title: str
    x: str
    y: str
    lines: dict[str, Sequence[tuple[float, float]]]
    logarithmic_x: bool = False
    logarithmic_y: bool = False


@dataclass(slots=True)
class Result:
    """All that a scenario found. ``add`` collects samples by case and name, in order."""

    name: str
    about: str
    """What was measured."""
    judged: bool = True
    """Whether targets mean anything."""
    charts: list[Chart] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _samples: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    _targets: dict[tuple[str, str], Target] = field(default_factory=dict)

    def add(self, case: str, name: str, sample: float, target: Target | None = None) -> None:
        """One more sample of a figure."""
        self._samples.setdefault((case, name), []).append(sample)
        if target is not None and self.judged:
            self._targets[case, name] = target

    @property
    def figures(self) -> list[Figure]:
        return [
            Figure(case, name, tuple(samples), self._targets.get((case, name)))
            for (case, name), samples in self._samples.items()
        ]

    def median(self, case: str, name: str) -> float:
        """Of the samples so far."""
        return median(self._samples[case, name])


def at_most(limit: float) -> Target:
    return Target(limit)


def at_least(limit: float) -> Target:
    return Target(limit, at_least=True)


def number(value: float) -> str:
    """Three significant digits, thousands with commas."""
    if math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    return f"{rounded:,.{max(0, digits)}f}" if digits > 0 else f"{round(rounded):,}"
