"""The registry and the removal of what vanished workers leave behind."""

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from gateway.registry import LEASE_S, Registry, read_workers
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
    """In the place of Redis' own."""

    now = 1_000.0

    async def __call__(self, _: Any) -> int:
        return round(self.now * 1_000)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("gateway.registry._now_ms", clock)
    return clock


def registry(remote: Any, worker: str) -> Registry:
    return Registry(Streams(remote), worker, lambda: {"pid": 1}, lambda: "e", lambda: [SHARD, 4])


async def groups(remote: Any) -> list[bytes]:
    return sorted(group["name"] for group in await remote.xinfo_groups(keys.bus("e", SHARD)))


async def test_groups_of_workers_that_vanished_are_removed(remote: Any, clock: Clock) -> None:
    one, two = registry(remote, "one"), registry(remote, "two")
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


async def test_workers_of_another_installation_are_left_alone(remote: Any) -> None:
    """The table is the same for both, the buses are not."""
    one = registry(remote, "one")
    other = Registry(Streams(remote), "other", lambda: {"epoch": "f"}, lambda: "f", lambda: [SHARD])
    for epoch, group in (("e", "one:1"), ("f", "other:1")):
        await remote.xgroup_create(keys.bus(epoch, SHARD), group, "0", mkstream=True)
    await one.renew()
    await other.renew()
    for reaper in (one, other):
        await reaper.reap()
    assert await groups(remote) == [b"one:1"]
    assert [group["name"] for group in await remote.xinfo_groups(keys.bus("f", SHARD))] == [
        b"other:1"
    ]
    assert set(await remote.hgetall(keys.GATEWAYS)) == {b"one", b"other"}
    await one.leave()
    assert set(await remote.hgetall(keys.GATEWAYS)) == {b"other"}


async def test_living_workers_of_one_history(remote: Any) -> None:
    for worker, epoch in (("one", "e"), ("two", "e"), ("other", "f")):
        describe = partial(dict, epoch=epoch)
        await Registry(Streams(remote), worker, describe, str, list).renew()
    assert [line["id"] for line in await read_workers(remote)] == ["one", "other", "two"]
    assert [line["id"] for line in await read_workers(remote, "e")] == ["one", "two"]


async def test_a_line_that_cannot_be_read_counts_as_none(remote: Any) -> None:
    one = registry(remote, "one")
    await remote.hset(keys.GATEWAYS, mapping={"odd": "junk", "old": '{"pid": 1}', "list": "[]"})
    await one.renew()
    await one.reap()
    assert set(await remote.hgetall(keys.GATEWAYS)) == {b"one"}


async def test_clocks_that_differ_make_nobody_dead(
    remote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines and their ages are by Redis' clock, whatever those of the machines say."""
    one, two = registry(remote, "one"), registry(remote, "two")
    for group in ("one:1", "two:1"):
        await remote.xgroup_create(keys.bus("e", SHARD), group, "0", mkstream=True)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3_600)
    await one.renew()
    monkeypatch.setattr(time, "time", lambda: real() + 3_600)
    await two.renew()
    await two.reap()
    assert await groups(remote) == [b"one:1", b"two:1"]
    assert [line["id"] for line in await read_workers(remote)] == ["one", "two"]
