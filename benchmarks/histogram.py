"""Latencies as counts per bucket."""

from collections import Counter
from collections.abc import Iterable
from typing import Self

MS = 1e-6


class Histogram:
    """Counts by value in ns; a bucket is 1.6 % wide and stands at its lowest value."""

    def __init__(self, counts: Iterable[tuple[int, int]] = ()) -> None:
        self.counts: Counter[int] = Counter()
        for value, count in counts:
            self.counts[value] += count

    def __len__(self) -> int:
        return self.counts.total()

    def __add__(self, other: Self) -> "Histogram":
        return Histogram([*self.counts.items(), *other.counts.items()])

    def percentile_ms(self, percent: float) -> float:
        """The value that so many per cent do not exceed; NaN if there are none."""
        if not self.counts:
            return float("nan")
        wanted = max(1.0, len(self) * percent / 100)
        seen = 0
        for value in sorted(self.counts):
            seen += self.counts[value]
            if seen >= wanted:
                return value * MS
        raise AssertionError("counts do not add up")
