"""Two installations, two databases, on one Redis by mistake: both work, and say what is wrong."""

import asyncio
import json
from dataclasses import dataclass

import psycopg
import pytest

from gateway.tokens import sign
from outbox import keys
from outbox.layout import layout
from outbox.lease import read_leases
from outbox.migrations import migrate
from outbox.redis.connect import connect
from publisher import publish
from tests.client import Client
from tests.probe import until
from tests.processes import Process, Processes

SECRET = "a-secret-that-only-tests-know-of-0123456789"
TENANT = "acme"
ROOMS = [f"room-{number}" for number in range(12)]
COMPLAINT = "another installation uses this Redis (epoch {}): give each its own Redis"


@dataclass
class Installation:
    """A database, relays and a gateway over the common Redis."""

    name: str
    dsn: str
    redis_url: str
    processes: Processes
    epoch: str = ""

    def command(self, name: str, *arguments: str) -> Process:
        return self.processes.start(f"{name}-{self.name}", *arguments, **self.settings)

    @property
    def settings(self) -> dict[str, str]:
        return {
            "TIDEGATE_POSTGRES_DSN": self.dsn,
            "TIDEGATE_REDIS_URL": self.redis_url,
            "TIDEGATE_TOKEN_HMAC_SECRET": SECRET,
            "TIDEGATE_LEASE_S": "1",
            "TIDEGATE_LOG_FORMAT": "json",
        }

    def relay(self, number: int) -> Process:
        return self.processes.start_relay(f"relay-{self.name}-{number}", **self.settings)

    def publish(self, data: object) -> None:
        """One message to each room."""
        with psycopg.connect(self.dsn) as connection:
            for room in ROOMS:
                publish(connection, room, data, tenant=TENANT)

    def complaints(self) -> list[dict[str, str]]:
        """What its relays have logged as errors."""
        lines = [
            json.loads(line)
            for name, process in self.processes.all.items()
            if name.startswith(f"relay-{self.name}")
            for line in process.text().splitlines()
        ]
        return [line for line in lines if line["level"] == "error"]


@pytest.fixture
async def installations(
    migrated: str, database: str, redis_url: str, processes: Processes
) -> list[Installation]:
    await asyncio.to_thread(migrate, database)
    found = []
    for name, dsn in ("a", migrated), ("b", database):
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            epoch = (await layout(connection)).epoch
        found.append(Installation(name, dsn, redis_url, processes, epoch))
    assert found[0].epoch != found[1].epoch
    return found


async def reads_all(client: Client) -> None:
    await client.greet(sign(SECRET, TENANT, "ann", now=0))
    for room in ROOMS:
        await client.subscribe(room, since=(0, ""))


async def test_messages_of_both_flow_and_both_complain(installations: list[Installation]) -> None:
    a, b = installations
    redis = connect(a.redis_url)
    relays = [one.relay(number) for number in (1, 2) for one in (a, b)]
    gateways = [
        await asyncio.to_thread(one.processes.start_gateway, f"gateway-{one.name}", **one.settings)
        for one in (a, b)
    ]
    try:
        async with (
            Client(gateways[0].websocket_url) as at_a,
            Client(gateways[1].websocket_url) as at_b,
        ):
            for client in (at_a, at_b):
                await reads_all(client)
            number = 0

            async def flows() -> None:
                """One more message to each room of each is delivered, and to its clients only."""
                nonlocal number
                number += 1
                for one in (a, b):
                    await asyncio.to_thread(one.publish, [one.name, number])
                for one, client in ((a, at_a), (b, at_b)):
                    for room in ROOMS:
                        await client.until_offset(room, number)
                        assert client.data(room)[-1] == [one.name, number]
                        assert client.positions[room][1] == one.epoch

            async def both_complain() -> bool:
                await flows()
                return bool(a.complaints() and b.complaints())

            await until(both_complain, "both complain", 60)
            for one, other in ((a, b), (b, a)):
                table = await read_leases(redis, one.epoch)
                assert len(table.relays) == 2
                assert len(table.holders) == 16
                events = [line["event"] for line in one.complaints()]
                assert all(COMPLAINT.format(other.epoch) in event for event in events)
                assert len(events) <= 2, "each relay says it once"

                status = one.command("status", "status", "--json")
                assert await asyncio.to_thread(status.wait, 60) == 1
                found = json.loads(status.text()[: status.text().rindex("}") + 1])
                assert [COMPLAINT.format(other.epoch) in text for text in found["problems"]] == [
                    True
                ]
                assert found["epoch"] == one.epoch
                assert {shard["lag"] for shard in found["shards"]} == {0}
                assert set(found["relays"]) == set(table.relays)
                assert [line["port"] for line in found["gateways"]] == [
                    gateways[0 if one is a else 1].port
                ]
            for client in (at_a, at_b):
                assert client.evicted == {}

            # The other one goes: its epoch does not come back.
            for process in (relays[1], relays[3], gateways[1]):
                await asyncio.to_thread(process.stop)

            async def own_epoch() -> bool:
                return bool(await redis.get(keys.EPOCH) == a.epoch.encode())

            await until(own_epoch, "the epoch stays")
            status = a.command("alone", "status")
            assert await asyncio.to_thread(status.wait, 60) == 0, status.text()
    finally:
        await redis.aclose()
