"""What an audit has looked at and found."""

import time
from collections import Counter
from collections.abc import Callable

PROBLEMS_KEPT = 100
NAMED = 5
"""How many of one kind are named in a line."""
SAY_EVERY_S = 2.0


class Findings:
    """Grows while an audit runs. Problems beyond PROBLEMS_KEPT are only counted."""

    def __init__(self, say: Callable[[str], None] = lambda line: None) -> None:
        """``say`` is called with a line about the progress, every few seconds."""
        self.problems: list[str] = []
        self.notes: list[str] = []
        """What is worth knowing and no mismatch."""
        self.checked: Counter[str] = Counter()
        self._say = say
        self._said_at_s = time.monotonic()
        self._unnamed = 0

    def wrong(self, problem: str) -> None:
        """Notes a mismatch."""
        if len(self.problems) < PROBLEMS_KEPT:
            self.problems.append(problem)
        else:
            self._unnamed += 1

    def done(self, what: str, count: int = 1) -> None:
        """Counts what was looked at, and perhaps tells how far it is."""
        self.checked[what] += count
        now_s = time.monotonic()
        if now_s - self._said_at_s >= SAY_EVERY_S:
            self._said_at_s = now_s
            self._say(", ".join(f"{n:,} {name}" for name, n in self.checked.items()) + " so far")

    def close(self) -> None:
        """The end: says how many problems are not named."""
        if self._unnamed:
            self.problems.append(f"and {self._unnamed:,} more like these")
            self._unnamed = 0
