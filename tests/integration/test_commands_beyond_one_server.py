"""The commands as processes against each set-up of Redis, and against two at once."""

import asyncio
import json
import secrets
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis as redis_client

from gateway.embedded import EmbeddedRedis
from outbox.redis.connect import connect
from tests.client import Client
from tests.integration.conftest import TENANT, Stack, token
from tests.probe import Probe, until
from tests.processes import Process, Processes
from tests.redis_setups import Clustered, Replicated

SECRET = "the secret of the message"


@pytest.fixture(params=["sentinel", "cluster"])
def everywhere(
    request: pytest.FixtureRequest, tmp_path: Path, migrated: str, processes: Processes
) -> Iterator[Stack]:
    """A stack over more than one server, with nothing started in it."""
    with Clustered() if request.param == "cluster" else Replicated(tmp_path) as servers:
        yield Stack(migrated, servers, processes)  # type: ignore[arg-type]
        # Before the servers go.
        processes.stop()


async def run(stack: Stack, *arguments: str, code: int | None = 0, **settings: str) -> str:
    """What a command printed, to both of its outputs. It must end with ``code``; None: 0 or 1."""
    name = f"{arguments[0]}-{secrets.token_hex(3)}"
    process = stack.processes.start(name, *arguments, **(stack.settings | settings))
    ended = await asyncio.to_thread(process.wait, 60)
    assert ended in (0, 1) if code is None else ended == code, process.text()
    return process.text()


async def holds_the_secret(url: str) -> bool:
    client = connect(url)
    try:
        for server in await client.servers():
            async for key in server.scan_iter(match="tg:*", _type="stream"):
                if SECRET in str(await cast(Any, server).xrange(key)):
                    return True
        return False
    finally:
        await client.aclose()


def lines_of(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"offset"')]


@pytest.mark.timeout(240)
async def test_all_commands(everywhere: Stack, room: str) -> None:
    stack = everywhere
    dev = stack.processes.start(
        "dev",
        *("dev", "--ephemeral", "--port", "0", "--relays", "2", "--gateways", "2"),
        **stack.settings,
    )
    await asyncio.to_thread(dev.wait_log, "Ctrl-C stops everything")
    (url, *_) = [
        line.split()[1] for line in dev.text().splitlines() if line.startswith("gateway   ws://")
    ]
    watching = stack.processes.start(
        "tail", "tail", TENANT, room, "--url", url, "--since", "start", "--strict", **stack.settings
    )
    await run(stack, "publish", TENANT, room, '"first"')
    stack.publish(room, SECRET, "third")
    await until(lambda: len(lines_of(watching.text())) == 3, "tail has all messages")

    async def all_is_well() -> bool:
        # While relays share the shards and gateways report themselves something is missing.
        found = json.loads(await run(stack, "status", "--json", code=None))
        complete = len(found["relays"]) == len(found["gateways"]) == 2
        return found["ok"] and complete and all(shard["lag"] == 0 for shard in found["shards"])

    await until(all_is_well, "the status is complete")
    report = json.loads(await run(stack, "verify", "--json"))
    assert report["ok"]
    assert report["checked"]["messages on the buses"] == 3
    assert "all is well" in await run(stack, "verify", "--room", TENANT, room)

    assert await holds_the_secret(stack.redis.url)
    said = await run(stack, "redact", TENANT, room, "2", "--reason", "asked")
    assert "Redis: the content is gone" in said
    assert "gateways: the content is gone" in said
    assert not await holds_the_secret(stack.redis.url)
    await until(lambda: len(lines_of(watching.text())) == 4, "tail has the notice")
    assert lines_of(watching.text())[3]["tags"]["redacts"] == "2"
    late = await run(
        stack, "tail", TENANT, room, "--url", url, "--since", "start", "--count", "4", "--strict"
    )
    assert [message["data"] for message in lines_of(late)] == ["first", None, "third", None]
    assert "all is well" in await run(stack, "verify")

    await run(stack, "epoch", "new", "--yes")
    # Strict: it was told that continuity was lost.
    assert await asyncio.to_thread(watching.wait, 30) == 1
    await until(all_is_well, "the status is complete")
    dev.signal(signal.SIGINT)
    assert await asyncio.to_thread(dev.wait, 30) == 0, dev.text()


class Between:
    """Gateways on two servers, in the middle of the move from one to the other."""

    def __init__(self, stack: Stack, new: EmbeddedRedis) -> None:
        self.stack = stack
        self.old, self.new = stack.redis, new
        self.both = {"TIDEGATE_REDIS_URL_ALSO": new.url}

    async def start(self) -> None:
        self.relay = self.stack.processes.start_relay("relay", **(self.stack.settings | self.both))
        self.gateways: tuple[Process, Process] = await asyncio.gather(
            asyncio.to_thread(self.stack.gateway, "old"),
            asyncio.to_thread(self.stack.gateway, "new", TIDEGATE_REDIS_URL=self.new.url),
        )

    async def run(self, *arguments: str, code: int = 0) -> str:
        return await run(self.stack, *arguments, code=code, **self.both)


@pytest.fixture
async def between(stack: Stack) -> AsyncIterator[Between]:
    with EmbeddedRedis() as new:
        between = Between(stack, new)
        await between.start()
        yield between
        stack.processes.stop()


async def test_a_redaction_reaches_both_servers_and_their_gateways(
    between: Between, room: str
) -> None:
    old, new = (gateway.websocket_url for gateway in between.gateways)
    async with Client(old) as a, Client(new) as b:
        for client in (a, b):
            await client.greet(token(now=time.time()))
            await client.subscribe(room, since=(0, ""))
        between.stack.publish(room, 1, SECRET, 3)
        for client in (a, b):
            await client.until_offset(room, 3)
        assert await holds_the_secret(between.old.url)
        assert await holds_the_secret(between.new.url)
        status = json.loads(await between.run("status", "--json"))
        assert status["ok"], status
        assert status["also_lag"] == 0
        ports = {gateway.port for gateway in between.gateways}
        assert {reported["port"] for reported in status["gateways"]} == ports

        # A gateway that has the content and does not read is named, whichever server it reads.
        gateway = between.gateways[1]
        gateway.signal(signal.SIGSTOP)
        redacting = between.stack.processes.start(
            "redact", "redact", TENANT, room, "2", **(between.stack.settings | between.both)
        )
        await asyncio.to_thread(redacting.wait_log, "gateways: the content is gone", 30)
        await asyncio.to_thread(redacting.wait_log, "additional Redis: the content is gone", 30)
        assert "gateways of the additional Redis" not in redacting.text()
        assert redacting.returncode is None
        gateway.signal(signal.SIGCONT)
        assert await asyncio.to_thread(redacting.wait, 30) == 0, redacting.text()
        assert "gateways of the additional Redis: the content is gone" in redacting.text()

        assert not await holds_the_secret(between.old.url)
        assert not await holds_the_secret(between.new.url)
        for client in (a, b):
            await client.until_offset(room, 4)
            assert client.received[room][3]["tags"]["redacts"] == "2"
    said = await between.run("verify")
    assert "all is well" in said
    # Without the one that was redacted.
    assert "3 messages on the buses, " in said
    assert "3 messages on the buses (additional Redis)" in said


async def test_a_server_that_is_away_is_named_and_does_not_keep_the_other_waiting(
    between: Between, room: str
) -> None:
    between.stack.publish(room, SECRET)

    async def complete() -> bool:
        return await holds_the_secret(between.old.url) and await holds_the_secret(between.new.url)

    await until(complete, "both have it")
    between.new.kill()
    said = await between.run("redact", TENANT, room, "1", code=1)
    assert "\nRedis: the content is gone" in said
    assert "additional Redis cannot be asked (ConnectionError): it may hold the content" in said
    assert not await holds_the_secret(between.old.url)
    said = await between.run("verify", code=1)
    assert "messages in the log" in said
    assert "additional Redis: cannot be audited: Error " in said.splitlines()[-1]
    await asyncio.to_thread(between.new.restart)
    await until(
        lambda: between.relay.text().count("additional redis: complete") == 2, "it is refilled"
    )
    said = await between.run("redact", TENANT, room, "1")
    assert "gateways of the additional Redis: the content is gone" in said
    assert "all is well" in await between.run("verify")


async def test_the_audit_names_the_server(between: Between, room: str) -> None:
    between.stack.publish(room, 1, 2, 3)
    dsn = between.stack.dsn
    async with Probe(dsn, between.old.url) as first, Probe(dsn, between.new.url) as second:
        for probe in (first, second):
            await until(probe.drained, "all is on the bus")
        shard = first.shard(room, TENANT)
        (_, damaged, _) = await second.on_bus(shard)
    with redis_client.Redis.from_url(between.new.url) as server:
        (bus,) = server.keys(f"tg:*:{shard}}}:bus")
        server.xdel(bus, f"{damaged.seq}-0")
    said = await between.run("verify", code=1)
    assert f"additional Redis: shard {shard}, seq {damaged.seq}: missing from the bus" in said
    assert said.count("missing from the bus") == 1
    assert "all is well" in await run(between.stack, "verify")  # of the first alone


async def test_a_new_epoch_is_told_to_both(between: Between, room: str) -> None:
    async with Client(between.gateways[1].websocket_url) as client:
        await client.greet(token(now=time.time()))
        await client.subscribe(room)
        said = await between.run("epoch", "new", "--yes")
        assert "additional Redis knows it" in said
        await client.until(lambda: room in client.evicted)
