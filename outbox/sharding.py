"""Which shard a room belongs to: one stable hash, the same here and in SQL.

``shard = (h(tenant) + h(tenant:room) mod spread) mod shards``, where ``h`` is the first 28 bits of
the MD5 of the ASCII text. A tenant's rooms so lie on ``spread`` neighbouring shards: a noisy tenant
cannot reach the others, and a gateway that serves few tenants reads few streams. The migration
writes the same expression, with both numbers as literals, into ``tidegate.shard_of``, which gives
each row of the outbox its shard; ``tests/unit/sharding_vectors.json`` holds both to the same
answers.
"""

from hashlib import md5


def shard_of(tenant: str, room: str, shards: int, spread: int) -> int:
    """The shard, 0 … ``shards`` - 1, of a room. ``spread`` is 1 … ``shards``."""
    return (_hash(tenant) + _hash(f"{tenant}:{room}") % spread) % shards


def _hash(text: str) -> int:
    digest = md5(text.encode(), usedforsecurity=False).hexdigest()
    return int(digest[:7], 16)
