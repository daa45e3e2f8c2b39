"""Witnesses: gateway workers that have delivered more than the log has.

After a loss of commits in Postgres a bus that ends beyond its shard's head proves the loss. If
Redis was emptied as well, the workers' own positions are what is left: each writes them into its
line in ``keys.GATEWAYS`` and renews that every two seconds.
"""

import json
from typing import Any, cast

from outbox import keys
from outbox.redis.client import Client


async def delivered(client: Client, epoch: str) -> dict[int, int]:
    """Shard → the highest seq that any worker of this epoch says it has delivered.

    A worker that has died since is as good a witness. Lines that cannot be read count for nothing.
    """
    lines = cast(dict[bytes, bytes], await cast(Any, client).hgetall(keys.GATEWAYS))
    highest: dict[int, int] = {}
    for line in lines.values():
        try:
            told = json.loads(line)
            positions = told["positions"] if told["epoch"] == epoch else {}
            seen = {int(shard): int(seq) for shard, seq in positions.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        for shard, seq in seen.items():
            highest[shard] = max(seq, highest.get(shard, 0))
    return highest
