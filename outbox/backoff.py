"""How long to wait before the next attempt."""

import random


class Backoff:
    """Waiting times that double from ``least_s`` to ``most_s``, with jitter.

    The time is kept and not computed from a count of failures: after an outage of some minutes no
    float would hold the power of two.
    """

    def __init__(self, least_s: float, most_s: float) -> None:
        self._least_s = least_s
        self._most_s = most_s
        self._next_s = least_s

    def reset(self) -> None:
        """Begins again with the least."""
        self._next_s = self._least_s

    def next_s(self) -> float:
        """The next waiting time: between half of it and all of it."""
        delay_s = self._next_s
        self._next_s = min(delay_s * 2, self._most_s)
        return delay_s * random.uniform(0.5, 1.0)
