"""The shard hash: fixed for ever, since a room must not move."""

import json
from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from outbox.sharding import shard_of

VECTORS = json.loads(Path(__file__).with_name("sharding_vectors.json").read_text())


def test_vectors() -> None:
    for vector in VECTORS:
        found = shard_of(vector["tenant"], vector["room"], vector["shards"], vector["spread"])
        assert found == vector["shard"], vector


@given(st.text(min_size=1), st.text(min_size=1), st.integers(1, 1024), st.data())
def test_shard_is_in_range(tenant: str, room: str, shards: int, data: st.DataObject) -> None:
    spread = data.draw(st.integers(1, shards))
    assert 0 <= shard_of(tenant, room, shards, spread) < shards


def test_a_tenant_uses_spread_neighbouring_shards() -> None:
    first = shard_of("acme", "x", 16, 1)
    used = {shard_of("acme", f"room-{number}", 16, 4) for number in range(500)}
    assert used == {(first + step) % 16 for step in range(4)}


def test_rooms_are_spread_evenly() -> None:
    count = Counter(shard_of("acme", f"room-{number}", 16, 16) for number in range(16_000))
    assert len(count) == 16
    assert max(count.values()) < 1.2 * 1_000
