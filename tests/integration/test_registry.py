"""The registry and the removal of what vanished workers leave behind, on a clock of the test's."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.registry import LEASE_S, Registry
from outbox import keys
from outbox.redis.connect import connect
from outbox.streams import Streams

SHARD = 3


@pytest.fixture
async def remote(redis_url: str) -> AsyncIterator[Any]:
    redis = connect(redis_url)
    yield redis
    await redis.aclose()


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def registry(remote: Any, worker: str, clock: Clock) -> Registry:
    return Registry(
        Streams(remote), worker, lambda: {"pid": 1}, lambda: "e", lambda: [SHARD, 4], clock
    )


async def groups(remote: Any) -> list[bytes]:
    return sorted(group["name"] for group in await remote.xinfo_groups(keys.bus("e", SHARD)))


async def test_groups_of_workers_that_vanished_are_removed(remote: Any) -> None:
    clock = Clock()
    one, two = registry(remote, "one", clock), registry(remote, "two", clock)
    for group in ("one:1", "two:1", "two:7", "dead:1"):
        await remote.xgroup_create(keys.bus("e", SHARD), group, "0", mkstream=True)
    await one.renew()
    await two.renew()
    await one.reap()
    assert await groups(remote) == [b"one:1", b"two:1", b"two:7"]
    clock.now += LEASE_S - 1
    await one.renew()
    await one.reap()
    assert await groups(remote) == [b"one:1", b"two:1", b"two:7"]
    clock.now += 2
    await one.reap()
    assert await groups(remote) == [b"one:1"]
    assert set(await remote.hgetall(keys.GATEWAYS)) == {b"one"}
    await one.leave()
    assert await remote.hgetall(keys.GATEWAYS) == {}
    # Its own groups are its own business, whatever the table says.
    await one.reap()
    assert await groups(remote) == [b"one:1"]


async def test_a_line_that_cannot_be_read_counts_as_none(remote: Any) -> None:
    clock = Clock()
    one = registry(remote, "one", clock)
    await remote.hset(keys.GATEWAYS, mapping={"odd": "junk", "old": '{"pid": 1}', "list": "[]"})
    await one.renew()
    await one.reap()
    assert set(await remote.hgetall(keys.GATEWAYS)) == {b"one"}
