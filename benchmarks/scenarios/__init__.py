"""The scenarios, one noun each: ``run(bench, result)`` adds figures to the result.

The docstring of each module is what the report says of it.
"""

SCENARIOS = (
    "fanout",
    "pipeline",
    "memory",
    "storage",
    "connect",
    "throughput",
    "relay",
    "publish",
    "rooms",
    "resume",
    "slow",
    "growth",
    "payloads",
    "mixed",
    "workers",
)

PEERS = ("peers",)
"""Those that measure other systems on the same work."""
