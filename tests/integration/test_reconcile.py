"""Reconcile: a bus that lost entries becomes what it was; one that has too many is a proof."""

from collections.abc import AsyncIterator

import pytest

from outbox import keys
from outbox.errors import EpochChanged, Fork
from outbox.reconcile import REFILL_WINDOW, Reconciled, reconcile
from outbox.streams import StreamLimits
from tests.probe import Probe, offsets, seqs


@pytest.fixture
async def probe(migrated: str, redis_url: str) -> AsyncIterator[Probe]:
    async with Probe(migrated, redis_url) as probe:
        yield probe


async def run(probe: Probe) -> Reconciled:
    return await reconcile(
        probe.streams, probe.log, probe.epoch, range(probe.shards), probe.log.heads
    )


async def test_nothing_is_done_where_nothing_is_missing(probe: Probe) -> None:
    done = await run(probe)
    assert done.refilled == 0
    assert set(done.lasts.values()) == {0}
    assert await probe.client.dbsize() == 0


async def test_an_empty_bus_is_started_and_filled(probe: Probe) -> None:
    await probe.sequence("a", "b", "a", "c")
    done = await run(probe)
    assert done.refilled == 4
    assert done.lasts == done.heads
    assert await probe.differences() == []
    assert offsets(await probe.in_room("a")) == [1, 2]
    assert (await run(probe)).refilled == 0


async def test_a_lost_tail_is_appended_again(probe: Probe) -> None:
    messages = await probe.sequence(*["a", "b"] * 20)
    await run(probe)
    shard = probe.shard("a")
    kept = [message for message in messages if message.shard == shard][:7]
    # What a replica that lagged behind would have.
    await probe.client.flushall()
    await probe.streams.append(probe.epoch, shard, kept, start=True)
    done = await run(probe)
    assert done.lasts == done.heads
    assert seqs(await probe.on_bus(shard))[0] == 1
    assert await probe.differences() == []
    assert offsets(await probe.in_room("a")) == list(range(1, 21))


async def test_a_deleted_bus_is_made_anew_beside_its_rooms(probe: Probe) -> None:
    await probe.sequence(*["a"] * 5)
    await run(probe)
    await probe.client.delete(keys.bus(probe.epoch, probe.shard("a")))
    await run(probe)
    assert await probe.differences() == []
    replay = await probe.streams.replay(probe.epoch, probe.shard("a"), "acme", "a", 2, 10)
    assert replay is not None
    assert offsets(replay.messages) == [3, 4, 5]


async def test_an_empty_bus_starts_with_the_recent_window(probe: Probe) -> None:
    await probe.sequence(*["a"] * (REFILL_WINDOW + 300))
    done = await run(probe)
    assert done.refilled == REFILL_WINDOW
    assert seqs(await probe.on_bus(probe.shard("a")))[0] == 301
    assert await probe.differences() == []


async def test_a_bus_far_behind_starts_anew(migrated: str, redis_url: str) -> None:
    async with Probe(migrated, redis_url, StreamLimits(bus_length=50)) as probe:
        quiet = probe.neighbour("a")
        await probe.sequence("a", quiet)
        await run(probe)
        await probe.sequence(*["a"] * 100)
        await run(probe)
        assert seqs(await probe.on_bus(probe.shard("a")))[-1] >= 101
        assert await probe.differences() == []
        # The stream of a room without news is older than the new bus, which cannot vouch for it.
        shard = probe.shard("a")
        assert await probe.streams.replay(probe.epoch, shard, "acme", quiet, 0, 9) is None


async def test_what_retention_dropped_is_passed_over(probe: Probe) -> None:
    shard = probe.shard("a")
    await probe.sequence(*["a"] * 10)
    await probe.connection.execute("DELETE FROM tidegate.message WHERE seq <= 6")
    await run(probe)
    assert seqs(await probe.on_bus(shard)) == [7, 8, 9, 10]
    await probe.client.flushall()
    await probe.connection.execute("DELETE FROM tidegate.message")
    done = await run(probe)
    assert done.lasts[shard] == 0
    assert done.heads[shard] == 10
    await probe.sequence("a")
    await run(probe)
    assert seqs(await probe.on_bus(shard)) == [11]


@pytest.mark.parametrize("dropped", [4, 6])
async def test_a_bus_that_ends_before_what_retention_left_begins_anew(
    probe: Probe, dropped: int
) -> None:
    """Also where only the one message between the two is gone."""
    shard = probe.shard("a")
    await probe.sequence(*["a"] * 3)
    await run(probe)
    await probe.sequence(*["a"] * 5)
    await probe.connection.execute("DELETE FROM tidegate.message WHERE seq <= %s", (dropped,))
    done = await run(probe)
    assert done.unfinished == frozenset()
    assert done.lasts[shard] == 8
    assert seqs(await probe.on_bus(shard)) == list(range(dropped + 1, 9))


async def test_a_bus_beyond_the_head_is_a_fork(probe: Probe) -> None:
    await probe.sequence("a", "a", "a")
    await run(probe)
    await probe.connection.execute("UPDATE tidegate.shard SET head = head - 1 WHERE head > 0")
    with pytest.raises(Fork, match="ends at seq 3, the log at 2"):
        await run(probe)


async def test_other_messages_at_the_same_place_are_a_fork(probe: Probe) -> None:
    await probe.sequence("a", "a")
    await run(probe)
    # A backup of the empty database comes back, and publishers go on.
    await probe.connection.execute("UPDATE tidegate.shard SET head = 0")
    await probe.connection.execute("TRUNCATE tidegate.room, tidegate.message")
    await probe.sequence("a", "a", "a")
    await probe.client.delete(keys.bus(probe.epoch, probe.shard("a")))
    with pytest.raises(Fork, match="hold other messages"):
        await run(probe)


async def test_another_epoch_is_told(probe: Probe) -> None:
    await probe.sequencer.new_epoch()
    with pytest.raises(EpochChanged):
        await run(probe)


async def test_a_bus_lost_under_the_refill_is_started_again(probe: Probe) -> None:
    await probe.sequence(*["a"] * REFILL_WINDOW)
    append = probe.streams.append
    losses = iter([True, True, False])

    async def append_and_lose(*args: object, **kwargs: object) -> object:
        answer = await append(*args, **kwargs)  # type: ignore[arg-type]
        if next(losses, False):
            await probe.client.flushall()
        return answer

    probe.streams.append = append_and_lose  # type: ignore[method-assign,assignment]
    done = await run(probe)
    assert not done.unfinished
    assert await probe.differences() == []


async def test_a_bus_that_is_lost_again_and_again_is_left_for_later(probe: Probe) -> None:
    await probe.sequence(*["a"] * REFILL_WINDOW)
    append = probe.streams.append

    async def lose_and_append(*args: object, **kwargs: object) -> object:
        await probe.client.flushall()
        return await append(*args, **{**kwargs, "start": False})  # type: ignore[arg-type]

    probe.streams.append = lose_and_append  # type: ignore[method-assign,assignment]
    assert (await run(probe)).unfinished == {probe.shard("a")}
