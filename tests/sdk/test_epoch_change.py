"""A new epoch: subscribers are unsubscribed with 2500, come back by themselves and are told."""

import psycopg
import redis as redis_client

from outbox import keys
from tests.processes import Processes
from tests.sdk.client import OpenClient
from tests.sdk.door import Door
from tests.sdk.stack import Stack
from tests.sdk.test_sdks import commit, joined, received


async def test_subscribes_again_when_the_epoch_changes(
    open_client: OpenClient, migrated: str, redis_url: str, processes: Processes, room: str
) -> None:
    stack = Stack(processes, migrated, redis_url, gateways=1)
    async with Door(stack.ports) as door:
        client = await joined(open_client, stack, door, room)
        commit(stack, room, 1, 2)
        await received(client.diary, room, [1, 2])
        old = client.diary.of(room, "subscribed")[0].position["epoch"]

        new = "0123456789abcdef"
        with psycopg.connect(migrated) as connection:
            connection.execute("SELECT FROM tidegate.shard ORDER BY id FOR NO KEY UPDATE")
            connection.execute("UPDATE tidegate.meta SET epoch = %s", (new,))
        with redis_client.Redis.from_url(redis_url) as server:
            server.delete(keys.EPOCH)

        told = await client.diary.count(room, "subscribed", 2)
        assert [said.code for said in client.diary.of(room, "subscribing")][1:] == [2500]
        assert told.was_recovering
        assert not told.recovered
        assert told.position == {"offset": 2, "epoch": new}
        assert told.position["epoch"] != old

        commit(stack, room, 3)
        await received(client.diary, room, [1, 2, 3])
        assert len(client.diary.of("", "connected")) == 1
