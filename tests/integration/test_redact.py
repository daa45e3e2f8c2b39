"""Redaction end to end: no store and no gateway tells the content any more, and nobody is stuck."""

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import psycopg
import pytest
import redis as redis_client

from outbox import database, keys, redaction
from outbox.errors import OutboxError, SchemaMismatch
from outbox.tombstone import is_tombstone
from tests.client import Client
from tests.integration.conftest import TENANT, Stack, token
from tests.probe import Probe, offsets, until
from tests.processes import Process

SECRET = "the secret of the message"
TOMBSTONE = {"redacted": "true"}
runs = iter(range(1_000))


def start(stack: Stack, *arguments: str, **settings: str) -> Process:
    settings = {**stack.settings, **settings}
    return stack.processes.start(f"command-{next(runs)}", *arguments, **settings)


async def run(stack: Stack, *arguments: str, code: int = 0) -> str:
    """What a command printed."""
    process = start(stack, *arguments)
    assert await asyncio.to_thread(process.wait, 60) == code, process.text()
    return process.text()


async def redact(stack: Stack, room: str, offset: int, code: int = 0) -> str:
    return await run(stack, "redact", TENANT, room, str(offset), "--reason", "asked", code=code)


def in_redis(stack: Stack) -> list[bytes]:
    """Keys that hold the content."""
    with redis_client.Redis.from_url(stack.redis.url) as server:
        streams = list(server.scan_iter(match="tg:*", count=1000, _type="stream"))
        return [key for key in streams if SECRET in str(server.xrange(key))]


def publish(stack: Stack, room: str, *payloads: Any) -> None:
    stack.publish(room, *payloads)


async def greeted(client: Client) -> Client:
    await client.greet(token(now=time.time()))
    return client


@pytest.fixture
async def probe(migrated: str, redis_url: str) -> AsyncIterator[Probe]:
    async with Probe(migrated, redis_url) as probe:
        yield probe


async def test_nobody_is_told_the_content_any_more(stack: Stack, room: str) -> None:
    stack.relay()
    gateways = [stack.gateway("gateway-1"), stack.gateway("gateway-2")]
    async with Client(gateways[0].websocket_url) as watching:
        await greeted(watching)
        await watching.subscribe(room)
        publish(stack, room, 1, SECRET, 3)
        await watching.until_offset(room, 3)
        epoch = watching.positions[room][1]
        said = await redact(stack, room, 2)
        assert f"log: offset 2 of {TENANT} {room} is a tombstone" in said
        assert "Redis: the content is gone" in said
        assert "gateways: the content is gone from their memory" in said

        # Who has the content is told which message it was.
        await watching.until_offset(room, 4)
        notice = watching.received[room][3]
        assert notice["data"] is None
        assert notice["tags"]["redacts"] == "2"
        publish(stack, room, 5)
        await watching.until_offset(room, 5)
        for gateway in gateways:
            async with Client(gateway.websocket_url) as late:
                await greeted(late)
                reply = await late.subscribe(room, since=(0, epoch))
                assert reply["recovered"]
                await late.until_offset(room, 5)
                assert late.data(room) == [1, None, 3, None, 5]
                assert late.received[room][1]["tags"].items() >= TOMBSTONE.items()
                history = await late.call("history", channel=room, limit=10)
                assert [p["data"] for p in history["publications"]] == [1, None, 3, None, 5]
    assert in_redis(stack) == []
    with psycopg.connect(stack.dsn) as connection:
        kept = connection.execute('SELECT room, "offset", reason FROM tidegate.redaction')
        assert kept.fetchall() == [(room, 2, "asked")]
    assert "all is well" in await run(stack, "verify")


async def test_again_changes_nothing(stack: Stack, room: str) -> None:
    stack.relay()
    publish(stack, room, SECRET)
    await asyncio.to_thread(stack.gateway)
    async with Client(stack.processes.all["gateway"].websocket_url) as client:
        await greeted(client)
        await client.subscribe(room, since=(0, ""))
        await client.until_offset(room, 1)
        first = await redact(stack, room, 1)
        assert "was already" not in first
        second = await redact(stack, room, 1)
        assert "was already a tombstone" in second
        await client.until_offset(room, 2)
        publish(stack, room, 3)
        await client.until_offset(room, 3)
        assert client.data(room) == [SECRET, None, 3]


async def test_what_has_no_offset_yet_is_said(stack: Stack, room: str) -> None:
    publish(stack, room, SECRET)
    said = await redact(stack, room, 1, code=1)
    assert said.strip() == (
        f"tidegate: room {room} of tenant {TENANT} stands at offset 0 and never had 1; 1 of its "
        "messages wait in the outbox: a relay must give them their offsets first"
    )
    said = await run(stack, "redact", TENANT, "nowhere", "1", code=1)
    assert said.strip() == f"tidegate: room nowhere of tenant {TENANT} never had a message"


async def test_what_retention_dropped_is_said(probe: Probe) -> None:
    await probe.sequence("a", "a")
    await probe.connection.execute('DELETE FROM tidegate.message WHERE "offset" = 1')
    with pytest.raises(OutboxError, match="offset 1 of room a of tenant acme is gone"):
        await redaction.redact(probe.connection, "acme", "a", 1)


async def test_without_a_relay_it_says_what_is_outstanding(
    migrated: str, redis_url: str, probe: Probe
) -> None:
    from gateway.operate.redaction import Order, redact

    messages = await probe.sequence("a", "a", "a")
    await probe.streams.append(probe.epoch, messages[0].shard, messages, start=True)
    order = Order(migrated, redis_url, "acme", "a", 2, patience_s=0.3)
    assert "a relay must run" in (await redact(order, print))[0]
    # What could be done was done.
    assert offsets(await probe.on_bus(messages[0].shard)) == [1, 3]
    assert await probe.in_room("a") == []
    # Its notice goes the way of all messages.
    batch = await probe.sequencer.batch(range(probe.shards), 10)
    notices = await probe.log.redacted(batch.messages)
    await probe.streams.append(probe.epoch, messages[0].shard, batch.messages, redacted=notices)
    assert await redact(order, print) == []


async def test_a_worker_whose_report_is_old_is_waited_for(
    migrated: str, redis_url: str, probe: Probe
) -> None:
    """It may have begun to read the shard after it reported that it does not."""
    from gateway.operate.redaction import Order, redact

    messages = await probe.sequence("a")
    shard = messages[0].shard
    await probe.streams.append(probe.epoch, shard, messages, start=True)
    order = Order(migrated, redis_url, "acme", "a", 1, patience_s=0.5)
    assert "a relay must run" in (await redact(order, print))[0]
    batch = await probe.sequencer.batch([shard], 10)
    notices = await probe.log.redacted(batch.messages)
    await probe.streams.append(probe.epoch, shard, batch.messages, redacted=notices)

    async def report(number: int, **positions: int) -> None:
        line = {"id": "w", "host": "h", "port": 1, "epoch": probe.epoch, "positions": positions}
        line["expires_ms"] = int(time.time() * 1000) + 60_000 + number
        await cast(Any, probe.client).hset(keys.GATEWAYS, "w", json.dumps(line))

    late = "gateways that have not read the notice yet: w (h:1)"
    await report(1)
    assert await redact(order, print) == [late]
    redacting = asyncio.create_task(redact(replace(order, patience_s=20), print))
    for number in range(2, 1_000):
        if redacting.done():
            break
        await report(number)
        await asyncio.sleep(0.02)
    assert await redacting == []
    # One that reads the shard says itself how far it is.
    await report(1_000, **{str(shard): 1})
    assert await redact(order, print) == [late]
    await report(1_001, **{str(shard): 2})
    assert await redact(order, print) == []


async def test_without_redis_the_log_is_redacted_and_the_rest_is_outstanding(
    stack: Stack, room: str
) -> None:
    stack.relay()
    gateway = await asyncio.to_thread(stack.gateway)
    async with Client(gateway.websocket_url) as client:
        await greeted(client)
        await client.subscribe(room, since=(0, ""))
        publish(stack, room, SECRET)
        await client.until_offset(room, 1)
        stack.redis.kill()
        said = await redact(stack, room, 1, code=1)
        assert "is a tombstone" in said
        assert "Redis cannot be asked" in said
        await asyncio.to_thread(stack.redis.restart)
        await client.until_offset(room, 2)
        assert "was already a tombstone" in await redact(stack, room, 1)
        assert in_redis(stack) == []


@pytest.mark.parametrize("appended", [0, 1, 2, 3])
async def test_a_relay_that_wakes_with_the_content_in_its_hands(
    stack: Stack, probe: Probe, appended: int
) -> None:
    """It sequenced the batch, was stopped before it appended (all of) it, and goes on later."""
    (first,) = await probe.sequence("a")
    await probe.streams.append(probe.epoch, first.shard, [first], start=True)
    held = await probe.sequence("a", "a", "a")
    if appended:
        await probe.streams.append(probe.epoch, first.shard, held[:appended])
    done = await redaction.redact(probe.connection, "acme", "a", 3)
    assert done.seq == held[1].seq
    await probe.streams.erase(probe.epoch, first.shard, "acme", "a", done.seq)

    answer = await probe.streams.append(probe.epoch, first.shard, held)
    assert answer.last == 4
    stack.relay()
    await until(probe.drained, "the notice is on the bus")
    content = held[1]
    assert content not in await probe.on_bus(first.shard)
    assert content not in await probe.in_room("a")
    # Now it can try as often as it likes, also where Redis has lost everything.
    await probe.streams.append(probe.epoch, first.shard, held)
    assert content not in await probe.on_bus(first.shard)
    await probe.client.flushall()
    await probe.streams.append(probe.epoch, first.shard, held)
    await until(probe.drained, "the bus is filled again")
    await probe.streams.append(probe.epoch, first.shard, held)
    assert offsets(await probe.on_bus(first.shard)) == [1, 2, 4, 5]
    assert "all is well" in await run(stack, "verify")


async def test_a_redis_that_lost_the_redaction_gets_it_again(
    stack: Stack, probe: Probe, room: str
) -> None:
    """A replica is promoted that has the content, and neither the removal nor the notice."""
    relay = stack.relay()
    publish(stack, room, 1, SECRET, 3)
    await until(probe.drained, "all is on the bus")
    shard = probe.shard(room, TENANT)
    keys = list(await probe.client.keys("tg:{" + probe.epoch + "*"))
    replica = {key: await probe.client.dump(key) for key in keys}
    await redact(stack, room, 2)
    assert in_redis(stack) == []
    relay.signal(signal.SIGSTOP)
    for key, value in replica.items():
        await probe.client.restore(key, 0, value, replace=True)
    assert len(in_redis(stack)) == 2
    relay.signal(signal.SIGCONT)
    await until(lambda: in_redis(stack) == [], "the notice has reached the replica")
    await until(probe.drained, "the bus has caught up")
    assert offsets(await probe.on_bus(shard)) == [1, 3, 4]
    assert "all is well" in await run(stack, "verify")


async def test_a_gateway_that_comes_late_finds_the_tombstone(
    stack: Stack, probe: Probe, room: str
) -> None:
    """A gateway that had not read so far finds the hole and asks the log."""
    publish(stack, room, 1)
    stack.relay()
    gateway = await asyncio.to_thread(stack.gateway)
    async with Client(gateway.websocket_url) as client:
        await greeted(client)
        await client.subscribe(room, since=(0, ""))
        await client.until_offset(room, 1)
        gateway.signal(signal.SIGSTOP)
        # The read that waits in Redis is answered with this one.
        publish(stack, room, 2)
        await until(probe.drained, "the read is answered")
        publish(stack, room, SECRET, 4)
        await until(probe.drained, "all is on the bus")
        done = await redaction.redact(probe.connection, TENANT, room, 3)
        await until(probe.drained, "the notice is on the bus")
        shard = probe.shard(room, TENANT)
        assert done.seq not in [m.seq for m in await probe.on_bus(shard)]
        gateway.signal(signal.SIGCONT)
        await client.until_offset(room, 5)
        assert client.data(room) == [1, 2, None, 4, None]


@pytest.mark.timeout(180)
async def test_redacting_while_messages_flow(stack: Stack, probe: Probe) -> None:
    """Clients check each offset; `verify` runs in between and must not raise a false alarm."""
    rooms = [f"orders:{n}" for n in range(6)]
    stack.relay("relay-1")
    stack.relay("relay-2")
    gateway = await asyncio.to_thread(stack.gateway)
    flowing = True
    published = dict.fromkeys(rooms, 0)

    async def write(room: str) -> None:
        async with await psycopg.AsyncConnection.connect(stack.dsn, autocommit=True) as connection:
            while flowing:
                text = json.dumps(f"{SECRET} {published[room]}")
                await connection.execute(
                    "SELECT tidegate.publish(%s, %s, %s)", (TENANT, room, text)
                )
                published[room] += 1
                await asyncio.sleep(0.005)

    async with Client(gateway.websocket_url) as client:
        await greeted(client)
        for room in rooms:
            await client.subscribe(room, since=(0, ""))
        writers = [asyncio.create_task(write(room)) for room in rooms]
        verifying = [start(stack, "verify") for _ in range(2)]
        redacted: list[tuple[str, int]] = []
        for turn in range(4):
            for room in rooms:
                await client.until(lambda r=room, n=turn: len(client.offsets(r)) > 20 * (n + 1))
                offset = client.offsets(room)[-1] - turn
                try:
                    await redaction.redact(probe.connection, TENANT, room, offset)
                except OutboxError:
                    continue
                redacted.append((room, offset))
        verifying.append(start(stack, "verify"))
        for process in verifying:
            assert await asyncio.to_thread(process.wait, 90) == 0, process.text()
        flowing = False
        await asyncio.gather(*writers)
        await until(probe.drained, "all is on the buses")
        logged = {(m.room, m.offset): m for found in (await probe.logged()).values() for m in found}
        heads = {room: max(o for r, o in logged if r == room) for room in rooms}
        for room in rooms:
            await client.until_offset(room, heads[room])
        assert len(redacted) >= 12
        assert all(is_tombstone(logged[place]) for place in redacted)
        erased = {(m.shard, m.seq) for m in logged.values() if is_tombstone(m)}
        for shard in range(probe.shards):
            on_bus = {(m.shard, m.seq): m for m in await probe.on_bus(shard)}
            assert not any(SECRET in str(on_bus.get(place)) for place in erased)
    async with Client(gateway.websocket_url) as late:
        await greeted(late)
        for room in rooms:
            await late.subscribe(room, since=(0, ""))
            await late.until_offset(room, heads[room])
            for where, offset in redacted:
                if where == room:
                    assert late.received[room][offset - 1]["data"] is None
    report = json.loads(re.search(r"\{.*\}", await run(stack, "verify", "--json"), re.S)[0])
    assert report["ok"], report


async def test_false_tags_fool_nobody(probe: Probe) -> None:
    """A publisher may write the tags of a tombstone or a notice; neither hides a content."""
    shard = probe.shard("a")
    for tags in ('{"redacted": "true"}', '{"redacts": "1"}', '{"redacts": "99999999999999999999"}'):
        await probe.connection.execute(
            "SELECT tidegate.publish('acme', 'a', %s, %s)", (json.dumps(SECRET), tags)
        )
    batch = await probe.sequencer.batch([shard], 10)
    assert await probe.log.redacted(batch.messages) == {}
    done = await redaction.redact(probe.connection, "acme", "a", 1)
    assert done.first
    assert all(is_tombstone(m) for m in await probe.log.span(shard, 0, 1, 1))


async def test_only_a_role_with_the_right_redacts(probe: Probe) -> None:
    await probe.sequence("a")
    role = f"redactor_{probe.connection.info.dbname}"
    await probe.connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'p'")
    try:
        parts = psycopg.conninfo.conninfo_to_dict(probe.dsn) | {"user": role, "password": "p"}
        conninfo = psycopg.conninfo.make_conninfo(**parts)
        async with await database.connect(conninfo) as connection:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await redaction.redact(connection, "acme", "a", 1)
            await probe.connection.execute(f"SELECT tidegate.allow_redact('{role}')")
            done = await redaction.redact(connection, "acme", "a", 1)
            assert await redaction.notice_head(connection, done) is None
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await connection.execute("SELECT payload FROM tidegate.message")
    finally:
        await probe.connection.execute(f"DROP OWNED BY {role}")
        await probe.connection.execute(f"DROP ROLE {role}")


async def test_an_older_schema_is_told_what_it_lacks(database: str) -> None:
    from outbox import database as connections
    from outbox.migrations import migrations

    async with await connections.connect(database) as connection:
        await connection.execute(migrations()[0].statement(4, 2).encode())
        with pytest.raises(SchemaMismatch, match="version 1, needed is 2: run `tidegate migrate`"):
            await redaction.redact(connection, "acme", "a", 1)
