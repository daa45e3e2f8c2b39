"""Random schedules of faults: pure, and the same for the same seed.

A fault has a kind (``tests.chaos.faults`` does it), a target and a duration, after which it is
healed. No two faults at a time share a target, but any two others may overlap.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a schedule. Times are in seconds since the start of the run."""

    at_s: float
    kind: str
    target: str
    """What it is done to: ``redis``, ``postgres``, ``relay-1``, ``gateway-2 to redis``,
    ``some clients``, ``writers`` …"""
    lasts_s: float
    seed: int
    """For the choices that it makes itself."""

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.kind} of {self.target} for {self.lasts_s:.1f} s"


LINK_KINDS: dict[str, tuple[float, float]] = {
    "delay": (2.0, 8.0),
    "throttle": (2.0, 8.0),
    "freeze": (1.0, 12.0),
    "cut": (0.0, 0.0),
    "cuts in a loop": (1.0, 4.0),
    "refuse": (0.5, 8.0),
    "half-open": (0.0, 0.0),
    "black hole": (1.0, 10.0),
}
"""Kind → for how long, at least and at most."""

PROCESS_KINDS = {"kill": (0.2, 6.0), "stop": (0.5, 10.0), "terminate": (0.2, 3.0)}
REDIS_KINDS = {
    "flushall": (0.0, 0.0),
    "delete keys": (0.0, 0.0),
    "destroy groups": (0.0, 0.0),
    "restart empty": (0.1, 4.0),
    "stall": (0.5, 12.0),
    "kill connections": (0.5, 4.0),
    "fill memory": (1.0, 6.0),
    "lose the tail": (0.0, 0.0),
    "fail-over without the tail": (0.5, 4.0),
}
POSTGRES_KINDS = {
    "terminate backends": (0.0, 0.0),
    "restart": (0.0, 0.0),
    "crash": (0.1, 2.0),
    "stall": (0.5, 6.0),
    "hold a snapshot": (4.0, 20.0),
    "idle in transaction": (4.0, 20.0),
    "fail-over": (0.1, 2.0),
}
WRITERS_KINDS = {"prepare transactions": (5.0, 25.0)}
APART_S = {"fail-over": 60.0, "fail-over without the tail": 20.0, "prepare transactions": 60.0}
"""Kinds that must leave time for others, and how long after its start the same may start again."""
PAUSE_MEAN_S = 2.0
"""Between the starts of two faults."""


def schedule(seed: int, duration_s: float, relays: int, gateways: int) -> list[Fault]:
    """Faults that start, and those that last also end, within the duration."""
    pick = random.Random(seed)
    targets = _targets(relays, gateways)
    busy_until_s: dict[str, float] = {}
    faults: list[Fault] = []
    at_s = 1.0
    while at_s < duration_s:
        # First the sort of target, so that the many links do not outnumber everything else.
        sort = pick.choice(sorted(targets))
        names, kinds = targets[sort]
        target = pick.choice(names)
        kind = pick.choice(sorted(kinds))
        lasts_s = round(pick.uniform(*kinds[kind]), 2)
        seed_of_fault = pick.getrandbits(32)
        at_s = round(at_s, 2)
        free_at_s = max(busy_until_s.get(target, 0.0), busy_until_s.get(kind, 0.0))
        if free_at_s <= at_s and at_s + lasts_s <= duration_s:
            busy_until_s[target] = at_s + lasts_s + 1.0
            if kind in APART_S:
                busy_until_s[kind] = at_s + APART_S[kind]
            faults.append(Fault(at_s, kind, target, lasts_s, seed_of_fault))
        at_s += pick.expovariate(1 / PAUSE_MEAN_S)
    return faults


def _targets(
    relays: int, gateways: int
) -> dict[str, tuple[list[str], dict[str, tuple[float, float]]]]:
    relay_names = [f"relay-{i + 1}" for i in range(relays)]
    gateway_names = [f"gateway-{i + 1}" for i in range(gateways)]
    return {
        "relay": (relay_names, PROCESS_KINDS),
        "gateway": (gateway_names, PROCESS_KINDS),
        "redis": (["redis"], REDIS_KINDS),
        "postgres": (["postgres"], POSTGRES_KINDS),
        "relay's link": (
            [f"{name} to {store}" for name in relay_names for store in ("postgres", "redis")],
            LINK_KINDS,
        ),
        "gateway's link": (
            [f"{name} to {store}" for name in gateway_names for store in ("postgres", "redis")],
            LINK_KINDS,
        ),
        "clients' links": (["some clients"], LINK_KINDS),
        "writers": (["writers"], WRITERS_KINDS),
    }


def dump(faults: Sequence[Fault]) -> str:
    """As lines of JSON."""
    return "".join(json.dumps(asdict(fault)) + "\n" for fault in faults)


def load(text: str) -> list[Fault]:
    """What ``dump`` gave. Raises ValueError or TypeError."""
    return [Fault(**json.loads(line)) for line in text.splitlines() if line]
