"""From one Redis to another, new and empty, while all runs."""

import asyncio
import secrets
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from gateway.embedded import EmbeddedRedis
from gateway.operate.status import read_status
from outbox import keys
from outbox.relay import Relay, RelayOptions
from tests.integration.conftest import Stack, token
from tests.probe import Probe, until
from tests.processes import Process, Processes
from tests.traffic import Traffic


@asynccontextmanager
async def relaying(options: RelayOptions) -> AsyncIterator[Relay]:
    relay = Relay(options)
    stop = asyncio.Event()
    task = asyncio.create_task(relay.run(stop))
    try:
        yield relay
    finally:
        stop.set()
        await task


async def start(stack: Stack, *names: str) -> list[Process]:
    """Gateways, all at the same time."""
    return await asyncio.gather(*(asyncio.to_thread(stack.gateway, name) for name in names))


async def test_clients_notice_nothing(
    migrated: str, redis: EmbeddedRedis, processes: Processes
) -> None:
    stack = Stack(migrated, redis, processes)
    stack.relay("relay-1")
    gateways = await start(stack, "gateway-1", "gateway-2")
    rooms = [f"orders:{secrets.token_hex(4)}" for _ in range(8)]
    with EmbeddedRedis() as other:
        new = Stack(migrated, other, processes)
        async with Traffic(migrated, gateways, rooms, token(now=time.time())) as traffic:
            await traffic.more(100)

            # 1. Relays that append to both.
            both = {**stack.settings, "TIDEGATE_REDIS_URL_ALSO": other.url}
            processes.start_relay("relay-2", **both)
            processes.all["relay-1"].stop()
            await until(
                lambda: "additional redis: complete" in processes.all["relay-2"].text(),
                "the new Redis is complete",
            )
            await traffic.more(50)

            async def complete() -> bool:
                found = await read_status(migrated, redis.url, other.url)
                return found.problems == () and found.also_lag == 0

            await until(complete, "the status says so")

            # 2. Gateways roll over to the new one.
            successors = await start(new, "gateway-3", "gateway-4")
            for number, (gateway, successor) in enumerate(zip(gateways, successors, strict=True)):
                gateway.signal(signal.SIGTERM)
                await traffic.move(number, successor)
                await traffic.more(50)

            # 3. Relays drop the old one.
            new.relay("relay-3")
            await processes_log(processes, "relay-3", "shards leased")
            processes.all["relay-2"].stop()
            redis.stop()
            await traffic.more(100)
            await traffic.settle()
        found = await read_status(migrated, other.url)
        assert found.problems == ()
        assert all(shard.lag == 0 for shard in found.shards)


async def processes_log(processes: Processes, name: str, text: str) -> None:
    await until(lambda: text in processes.all[name].text(), f"{name} says {text!r}")


@pytest.fixture
async def first(migrated: str, redis_url: str) -> AsyncIterator[Probe]:
    async with Probe(migrated, redis_url) as probe:
        yield probe


async def test_the_second_redis_is_no_concern_of_the_first(
    migrated: str, redis_url: str, first: Probe
) -> None:
    with EmbeddedRedis(password="the-second") as second:
        second.kill()
        options = RelayOptions(
            postgres_dsn=migrated, redis_url=redis_url, redis_url_also=second.url
        )
        async with relaying(options) as relay:

            def trouble() -> str:
                return relay.health().redis_also or ""

            # Nobody is there.
            found = await read_status(migrated, redis_url, second.url)
            assert "additional Redis" in found.problems[-1]
            await first.publish("a", "b")
            await until(first.drained, "the first has everything")
            await until(lambda: "Connect" in trouble(), "its absence is told")
            assert relay.health().redis is None
            assert "the-second" not in str(relay.health())

            await asyncio.to_thread(second.restart)
            async with Probe(migrated, second.url) as mirrored:

                async def has_epoch() -> bool:
                    return await mirrored.streams.epoch() == mirrored.epoch

                await until(mirrored.drained, "the second has caught up")
                assert await mirrored.differences() == []
                await until(has_epoch, "the second has the epoch")
                await until(lambda: trouble() == "", "the trouble is over")

                # It loses everything.
                await mirrored.client.flushall()
                await until(mirrored.drained, "the second is refilled")

                # It was used for something else: another message stands where ours belongs.
                await mirrored.client.flushall()
                bus = keys.bus(first.epoch, first.shard("a"))
                await mirrored.client.xadd(bus, {"b": "alien", "m": "x"}, id="900-0")
                await first.publish("a")
                await until(lambda: "FLUSHALL" in trouble(), "it is refused")
                await first.publish("a", "b")
                await until(first.drained, "the first goes on")
                assert (await first.log.heads())[0] == first.epoch

                await mirrored.client.flushall()
                await until(mirrored.drained, "an emptied one is taken again")
                assert await first.differences() == []

            # It goes away again.
            second.kill()
            await first.publish("a", "b")
            await until(first.drained, "the first has everything")


async def test_a_new_epoch_reaches_the_second(migrated: str, first: Probe, redis_url: str) -> None:
    with EmbeddedRedis() as second:
        options = RelayOptions(
            postgres_dsn=migrated, redis_url=redis_url, redis_url_also=second.url
        )
        async with relaying(options), Probe(migrated, second.url) as mirrored:
            await first.publish("a")
            await until(mirrored.drained, "the second follows")
        await first.sequencer.new_epoch(first.epoch)
        async with (
            relaying(replace(options, name="another")),
            Probe(migrated, second.url) as mirrored,
        ):
            assert mirrored.epoch != first.epoch

            async def has_epoch() -> bool:
                return await mirrored.streams.epoch() == mirrored.epoch

            await until(has_epoch, "the second has the new epoch")
            await first.publish("a")
            await until(mirrored.drained, "the second follows")
