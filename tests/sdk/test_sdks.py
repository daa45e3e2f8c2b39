"""The stock SDKs of JavaScript and Python as clients of two gateways."""

import asyncio
from typing import Any

import psycopg
import pytest

from publisher import RawJSON, publish
from tests.sdk.client import Client, Diary, OpenClient, Publication, Refused
from tests.sdk.door import Door
from tests.sdk.stack import Stack


def commit(stack: Stack, room: str, *contents: Any, tenant: str = "acme") -> list[str]:
    """One transaction for each message; the transactions' ids."""
    with psycopg.connect(stack.dsn, autocommit=True) as connection:
        return [publish(connection, room, content, tenant=tenant) for content in contents]


async def joined(open_client: OpenClient, stack: Stack, door: Door, room: str) -> Client:
    """A client that is subscribed to the room."""
    client = await open_client(door.url, stack.token())
    await client.connect()
    await client.subscribe(room)
    await client.diary.count(room, "subscribed")
    return client


async def received(diary: Diary, room: str, offsets: list[int]) -> list[Publication]:
    """Wait for so many messages; they must be these."""
    await diary.wait(lambda: len(diary.offsets(room)) >= len(offsets))
    assert diary.offsets(room) == offsets
    return diary.publications(room)


async def test_receives_what_is_committed(
    open_client: OpenClient, stack: Stack, door: Door, room: str
) -> None:
    client = await joined(open_client, stack, door, room)
    first = client.diary.of(room, "subscribed")[0]
    assert first.recoverable
    assert not first.was_recovering
    assert first.position["offset"] == 0
    contents: list[Any] = [
        {"status": "paid", "of": ["ä€😀", '"\\', 1.5, -7, None, True]},
        "a text\nwith\u2028lines\tand\x7f",
        [],
        0,
        None,
        False,
        {"n": 2**53 - 1},
    ]
    txids = commit(stack, room, *contents)
    got = await received(client.diary, room, [1, 2, 3, 4, 5, 6, 7])
    assert [p.data for p in got] == contents
    assert [p.tags["txid"] for p in got] == txids


async def test_receives_raw_json_tags_and_large_messages(
    open_client: OpenClient, stack: Stack, door: Door, room: str
) -> None:
    client = await joined(open_client, stack, door, room)
    large = "x" * 900_000
    with psycopg.connect(stack.dsn) as connection:
        publish(
            connection, room, RawJSON('{\n  "a":\r\n\t1\n}'), tenant="acme", tags={"kind": "raw"}
        )
        publish(connection, room, large, tenant="acme")
        publish(connection, room, b"\x00\xff", tenant="acme")
    got = await received(client.diary, room, [1, 2, 3])
    assert got[0].data == {"a": 1}
    assert got[0].tags["kind"] == "raw"
    assert got[1].data == large
    assert got[2].data == "AP8="
    assert len({p.tags["txid"] for p in got}) == 1


async def test_receives_nothing_of_a_rolled_back_transaction_or_another_tenant(
    open_client: OpenClient, stack: Stack, door: Door, room: str
) -> None:
    client = await joined(open_client, stack, door, room)
    with psycopg.connect(stack.dsn) as connection:
        publish(connection, room, "rolled back", tenant="acme")
        connection.rollback()
    commit(stack, room, "of another tenant", tenant="globex")
    commit(stack, room, "committed")
    got = await received(client.diary, room, [1])
    assert got[0].data == "committed"


async def test_resumes_on_the_other_gateway(
    open_client: OpenClient, stack: Stack, door: Door, room: str
) -> None:
    client = await joined(open_client, stack, door, room)
    commit(stack, room, *range(1, 11))
    await received(client.diary, room, [*range(1, 11)])
    for meanwhile in range(3):
        await client.disconnect()
        await client.diary.count("", "disconnected", meanwhile + 1)
        head = 10 * (meanwhile + 1)
        commit(stack, room, *range(head + 1, head + 11))
        await client.connect()
        resumed = await client.diary.count(room, "subscribed", meanwhile + 2)
        assert resumed.was_recovering
        assert resumed.recovered
        assert resumed.position["offset"] == head
        await received(client.diary, room, [*range(1, head + 11)])
    assert door.visits == [0, 1, 0, 1]
    commit(stack, room, 41)
    got = await received(client.diary, room, [*range(1, 42)])
    assert [p.data for p in got] == [*range(1, 42)]


async def test_resumes_by_itself_when_its_connection_breaks(
    open_client: OpenClient, stack: Stack, door: Door, room: str
) -> None:
    client = await joined(open_client, stack, door, room)
    commit(stack, room, 1, 2)
    await received(client.diary, room, [1, 2])
    door.cut()
    commit(stack, room, 3, 4)
    resumed = await client.diary.count(room, "subscribed", 2)
    assert resumed.was_recovering
    assert resumed.recovered
    await received(client.diary, room, [1, 2, 3, 4])
    assert len(set(door.visits)) == 2


async def test_moves_on_when_its_gateway_drains(
    open_client: OpenClient, stack: Stack, door: Door, room: str
) -> None:
    client = await joined(open_client, stack, door, room)
    commit(stack, room, 1, 2)
    await received(client.diary, room, [1, 2])
    drained = stack.gateways[door.visits[-1]]
    await asyncio.to_thread(drained.stop)
    try:
        assert drained.returncode == 0
        commit(stack, room, 3, 4)
        await received(client.diary, room, [1, 2, 3, 4])
        assert client.diary.of(room, "subscribed")[1].recovered
        assert [said.code for said in client.diary.of("", "connecting")][:2] == [0, 3001]
        assert not client.diary.of("", "disconnected")
    finally:
        await asyncio.to_thread(drained.restart)
        await asyncio.to_thread(drained.wait_ready)


async def test_resumes_many_rooms_at_once(
    open_client: OpenClient, stack: Stack, door: Door, room: str
) -> None:
    client = await open_client(door.url, stack.token())
    rooms = [f"{room}-{i}" for i in range(60)]
    await client.connect()
    for name in rooms:
        await client.subscribe(name)
    for name in rooms:
        await client.diary.count(name, "subscribed")
    await client.disconnect()
    for name in rooms:
        commit(stack, name, name, name)
    await client.connect()
    for name in rooms:
        got = await received(client.diary, name, [1, 2])
        assert [p.data for p in got] == [name, name]
        assert client.diary.of(name, "subscribed")[1].recovered


async def test_resumes_from_a_position_that_the_application_kept(
    open_client: OpenClient, stack: Stack, door: Door, room: str
) -> None:
    client = await joined(open_client, stack, door, room)
    position = client.diary.of(room, "subscribed")[0].position
    commit(stack, room, *range(1, 6))
    await received(client.diary, room, [1, 2, 3, 4, 5])
    await client.close()

    later = await open_client(door.url, stack.token())
    await later.connect()
    await later.subscribe(room, since=(2, position["epoch"]))
    resumed = await later.diary.count(room, "subscribed")
    assert resumed.recovered
    await received(later.diary, room, [3, 4, 5])

    newcomer = await open_client(door.url, stack.token())
    await newcomer.connect()
    await newcomer.subscribe(room, since=(0, ""))
    await received(newcomer.diary, room, [1, 2, 3, 4, 5])


async def test_leaves_a_room_and_comes_back(
    open_client: OpenClient, stack: Stack, door: Door, room: str
) -> None:
    client = await joined(open_client, stack, door, room)
    other = f"{room}-other"
    await client.subscribe(other)
    await client.diary.count(other, "subscribed")
    await client.unsubscribe(room)
    left = await client.diary.count(room, "unsubscribed")
    assert left.code == 0
    commit(stack, room, 1)
    commit(stack, other, 1)
    await received(client.diary, other, [1])
    assert client.diary.offsets(room) == []
    await client.subscribe(room)
    await received(client.diary, room, [1])
    assert client.diary.of(room, "subscribed")[1].recovered


async def test_refreshes_its_token_in_place(
    open_client: OpenClient, stack: Stack, door: Door, room: str
) -> None:
    given = asyncio.Semaphore(0)

    async def tokens() -> str:
        given.release()
        return stack.token(ttl_s=6)

    client = await open_client(door.url, "", tokens)
    await client.connect()
    await client.subscribe(room)
    await client.diary.count(room, "subscribed")
    async with asyncio.timeout(30):
        for _ in range(3):  # The first connects, and two refreshes are longer than a token.
            await given.acquire()
            commit(stack, room, "tick")
    await received(client.diary, room, [1, 2, 3])
    assert len(client.diary.of("", "connected")) == 1
    assert len(client.diary.of(room, "subscribed")) == 1


async def test_fetches_a_new_token_when_its_own_has_expired(
    open_client: OpenClient, stack: Stack, door: Door, room: str
) -> None:
    async def tokens() -> str:
        return stack.token()

    client = await open_client(door.url, stack.token(ttl_s=-60), tokens)
    await client.connect()
    await client.subscribe(room)
    await client.diary.count(room, "subscribed")
    assert [said.code for said in client.diary.of("", "error")] == [109]


async def test_is_sent_away_without_a_valid_token(
    open_client: OpenClient, stack: Stack, door: Door
) -> None:
    header, _, signature = stack.token().split(".")
    stranger = stack.token(user="stranger").split(".")[1]
    for token, code in (("", 101), ("nonsense", 3500), (f"{header}.{stranger}.{signature}", 3500)):
        client = await open_client(door.url, token)
        await client.connect()
        gone = await client.diary.count("", "disconnected")
        assert gone.code == code
        assert not client.diary.of("", "connected")


async def test_subscribes_only_where_it_may(
    open_client: OpenClient, stack: Stack, door: Door, room: str
) -> None:
    client = await joined(open_client, stack, door, room)
    for channel, code in (("closed:1", 103), ("not a room", 102), ("x" * 201, 102)):
        await client.subscribe(channel)
        refused = await client.diary.count(channel, "unsubscribed")
        assert refused.code == code
    commit(stack, room, 1)
    await received(client.diary, room, [1])


async def test_publishes_where_it_may(
    open_client: OpenClient, stack: Stack, door: Door, room: str
) -> None:
    chat = room.replace("orders", "chat")
    client = await joined(open_client, stack, door, chat)
    await client.publish(chat, {"text": "hello"})
    got = await received(client.diary, chat, [1])
    assert got[0].data == {"text": "hello"}
    for channel, code in ((room, 103), ("not a room", 102)):
        with pytest.raises(Refused) as refused:
            await client.publish(channel, {"text": "hello"})
        assert refused.value.code == code


async def test_reads_history(open_client: OpenClient, stack: Stack, door: Door, room: str) -> None:
    client = await joined(open_client, stack, door, room)
    commit(stack, room, *range(1, 11))
    await received(client.diary, room, [*range(1, 11)])

    position = await client.history(room, limit=0)
    assert position.offset == 10
    assert position.publications == ()
    epoch = position.epoch
    for wanted, offsets in (
        ({"limit": 3}, [1, 2, 3]),
        ({"limit": -1}, [*range(1, 11)]),
        ({"limit": 3, "since": (5, epoch)}, [6, 7, 8]),
        ({"limit": 3, "since": (10, epoch)}, []),
        ({"limit": 3, "reverse": True}, [10, 9, 8]),
        ({"limit": 3, "since": (3, epoch), "reverse": True}, [2, 1]),
    ):
        history = await client.history(room, **wanted)
        assert [p.offset for p in history.publications] == offsets, wanted
        assert [p.data for p in history.publications] == offsets
        assert (history.offset, history.epoch) == (10, epoch)
        assert all("txid" in p.tags for p in history.publications)


async def test_reads_history_only_where_it_may(
    open_client: OpenClient, stack: Stack, door: Door, room: str
) -> None:
    client = await joined(open_client, stack, door, room)
    for channel, since, code in (
        ("closed:1", None, 103),
        ("not a room", None, 102),
        ("quiet:1", None, 108),
        (room, (1, ""), 112),
        (room, (0, "another epoch"), 112),
    ):
        with pytest.raises(Refused) as refused:
            await client.history(channel, limit=1, since=since)
        assert refused.value.code == code, channel
