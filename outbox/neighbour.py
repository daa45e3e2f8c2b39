"""Neighbours: another installation that uses the same Redis.

Two databases have two epochs, and so their own buses, room streams and leases, but there is one
place for the epoch: their relays replace it in turns, and gateways ask Postgres again and again.
"""

from typing import Final

PROOF: Final = 3
"""So many times another epoch must come back; once it may do so after a failover of Redis."""
MEMORY_S: Final = 60.0
"""Without a sign for so long, it counts as gone."""


def complaint(epoch: str) -> str:
    """What to say of the installation with this epoch, in one line."""
    return (
        f"another installation uses this Redis (epoch {epoch}): "
        "give each its own Redis or database number"
    )


class Neighbours:
    """The epochs that were found in Redis where this relay had written its own."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}
        """Epoch → how many times."""
        self._last_at_s = 0.0

    def found(self, epoch: str, now_s: float) -> bool:
        """Takes note of an epoch that replaced the relay's; whether to complain of it now."""
        if now_s - self._last_at_s > MEMORY_S:
            self._found.clear()
        self._last_at_s = now_s
        times = self._found[epoch] = self._found.get(epoch, 0) + 1
        return times == PROOF
