"""The protocol with a running gateway: connect, subscribe, publish, history, refresh, API."""

import asyncio
import json
import secrets
import time
from typing import Any

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import OctKey

from tests.client import Client, Refused
from tests.integration.conftest import API_KEY, SECRET, TENANT, Stack, token
from tests.processes import Process


async def refused(awaitable: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        await awaitable
    return caught.value


# Connect


async def test_a_client_with_a_token_is_greeted(gateway: Process) -> None:
    async with Client(gateway.websocket_url) as client:
        reply = await client.greet(token(now=time.time(), ttl_s=600))
        assert reply["ping"] == 25
        assert reply["pong"] is True
        assert reply["expires"] is True
        assert 500 < reply["ttl"] <= 600
        assert reply["client"]


async def test_a_client_without_a_token_belongs_to_the_default_tenant(
    gateway: Process, shared: Stack, room: str
) -> None:
    async with Client(gateway.websocket_url) as client:
        reply = await client.greet()
        assert "ttl" not in reply
        await client.subscribe(room)
        shared.publish(room, "not for it")
        shared.publish(room, "for it", tenant="default")
        await client.until(lambda: bool(client.data(room)))
        assert client.data(room) == ["for it"]


async def test_an_expired_token_is_answered_so_that_the_client_fetches_another(
    gateway: Process,
) -> None:
    async with Client(gateway.websocket_url) as client:
        error = await refused(client.greet(token(now=time.time() - 100, ttl_s=50)))
        assert error.code == 109
        await client.greet(token(now=time.time()))


def _forged(**header: Any) -> str:
    claims = {"sub": "ann", "tenant": TENANT}
    key = OctKey.import_key(header.pop("secret", SECRET))
    return jwt.encode(header, claims, key, algorithms=["HS256", "HS512"])


@pytest.mark.parametrize(
    "bad",
    [
        "nonsense",
        "a.b.c",
        _forged(alg="HS256", secret="another-secret-of-the-same-length-0123456789"),
        _forged(alg="HS512"),
        # {"alg":"none"}.{"sub":"ann"}
        "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbm4ifQ.",
    ],
)
async def test_a_bad_token_ends_the_connection_for_good(gateway: Process, bad: str) -> None:
    async with Client(gateway.websocket_url) as client:
        await client.send(json.dumps({"id": 1, "connect": {"token": bad}}))
        assert await client.until_closed() == 3500


async def test_no_token_and_no_anonymous_clients(stack: Stack) -> None:
    gateway = stack.gateway(TIDEGATE_ALLOW_ANONYMOUS="false")
    async with Client(gateway.websocket_url) as client:
        assert (await refused(client.greet())).code == 101


# Subscribe and deliver


async def test_a_subscriber_gets_what_is_committed_from_now_on(
    gateway: Process, shared: Stack, room: str
) -> None:
    shared.publish(room, {"n": 1}, {"n": 2})
    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time()))
        async with Client(gateway.websocket_url) as before:
            await before.greet(token(now=time.time()))
            await before.subscribe(room, (0, ""))
            await before.until_offset(room, 2)
        reply = await client.subscribe(room)
        assert reply["offset"] == 2
        assert reply["recoverable"] is True
        assert "recovered" not in reply
        shared.publish(room, {"n": 3}, 'a "line"\nof text', [1, None], "")
        await client.until_offset(room, 6)
        assert client.data(room) == [{"n": 3}, 'a "line"\nof text', [1, None], ""]
        assert all(p["tags"]["txid"].isdecimal() for p in client.received[room])


async def test_raw_line_feeds_and_bytes_reach_the_client_whole(
    gateway: Process, shared: Stack, room: str
) -> None:
    from publisher import RawJSON

    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time()))
        await client.subscribe(room)
        shared.publish(room, RawJSON('{\n "n":\n\n 1}'), b"\x00\n\xff")
        await client.until_offset(room, 2)
        assert client.data(room) == [{"n": 1}, "AAr/"]


@pytest.mark.parametrize(
    ("channel", "code"), [("secret:1", 103), ("no room", 102), ("", 102), ("x" * 201, 102)]
)
async def test_a_subscription_is_refused(gateway: Process, channel: str, code: int) -> None:
    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time()))
        assert (await refused(client.subscribe(channel))).code == code


async def test_anonymous_clients_and_second_subscriptions_are_refused(
    gateway: Process, room: str
) -> None:
    async with Client(gateway.websocket_url) as client:
        await client.greet()
        assert (await refused(client.subscribe("staff:1"))).code == 103
        await client.subscribe(room)
        assert (await refused(client.subscribe(room))).code == 105
        assert (await refused(client.call("rpc", data={}))).code == 104


async def test_after_unsubscribe_nothing_comes_and_a_new_subscription_resumes(
    gateway: Process, shared: Stack, room: str
) -> None:
    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time()))
        await client.subscribe(room)
        shared.publish(room, 1)
        await client.until_offset(room, 1)
        await client.call("unsubscribe", channel=room)
        shared.publish(room, 2)
        async with Client(gateway.websocket_url) as other:
            await other.greet(token(now=time.time()))
            await other.subscribe(room, (0, ""))
            await other.until_offset(room, 2)
        assert client.data(room) == [1]
        reply = await client.subscribe(room, client.positions[room])
        assert reply["recovered"] is True
        await client.until_offset(room, 2)


async def test_commands_in_one_frame_are_handled_in_order(gateway: Process, room: str) -> None:
    async with Client(gateway.websocket_url) as client:
        lines = [{"id": 1, "connect": {"token": token(now=time.time())}}]
        lines += [{"id": 2, "unsubscribe": {"channel": room}}, {"id": 3, "rpc": {}}]
        futures = {}
        for number in (1, 2, 3):
            futures[number] = asyncio.get_running_loop().create_future()
            client._waiting[number] = futures[number]
        await client.send("\n".join(map(json.dumps, lines)) + "\n")
        await client.until(futures[3].done)
        assert "connect" in futures[1].result()
        assert "unsubscribe" in futures[2].result()
        assert futures[3].result()["error"]["code"] == 104


# Publish


async def test_a_client_publishes_where_its_namespace_allows_it(gateway: Process) -> None:
    room = f"chat:{secrets.token_hex(5)}"
    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time()))
        await client.subscribe(room)
        assert await client.call("publish", channel=room, data={"say": "hello\n"}) == {}
        await client.until_offset(room, 1)
        assert client.data(room) == [{"say": "hello\n"}]
        error = await refused(client.call("publish", channel="orders:1", data={}))
        assert error.code == 103
        await client.call("publish", channel=room, data="\x00")
        await client.until_offset(room, 2)
        assert client.data(room)[1] == "\x00"


# History


async def test_history_forwards_backwards_and_since(
    gateway: Process, shared: Stack, room: str
) -> None:
    shared.publish(room, *range(1, 8))
    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time()))
        await client.subscribe(room, (0, ""))
        await client.until_offset(room, 7)
        epoch = client.positions[room][1]

        async def history(**fields: Any) -> list[int]:
            reply = await client.call("history", channel=room, **fields)
            assert reply["offset"] == 7
            assert reply["epoch"] == epoch
            return [p["offset"] for p in reply.get("publications", ())]

        assert await history() == []
        assert await history(limit=3) == [1, 2, 3]
        assert await history(limit=-1) == [1, 2, 3, 4, 5, 6, 7]
        assert await history(limit=2, reverse=True) == [7, 6]
        assert await history(limit=2, since={"offset": 3, "epoch": epoch}) == [4, 5]
        assert await history(limit=2, since={"offset": 7, "epoch": epoch}) == []
        since = {"offset": 5, "epoch": epoch}
        assert await history(limit=3, since=since, reverse=True) == [4, 3, 2]
        assert await history(limit=30, since=since, reverse=True) == [4, 3, 2, 1]
        for lost in ({"offset": 8, "epoch": epoch}, {"offset": 3, "epoch": "another"}):
            error = await refused(client.call("history", channel=room, limit=1, since=lost))
            assert error.code == 112
        short = room.replace("orders", "short")
        fleeting = await refused(client.call("history", channel="fleeting:1", limit=1))
        assert fleeting.code == 108
        shared.publish(short, *range(9))
        await client.subscribe(short, (0, ""))
        await client.until_offset(short, 9)
        reply = await client.call("history", channel=short, limit=-1, reverse=True)
        assert [p["offset"] for p in reply["publications"]] == [9, 8, 7, 6, 5]


async def test_backwards_pages_that_end_by_size_leave_no_hole(stack: Stack, room: str) -> None:
    stack.relay()
    gateway = stack.gateway(TIDEGATE_REPLAY_PAGE_BYTES="5000")
    stack.publish(room, *["x" * 2000] * 7)
    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time()))
        await client.subscribe(room, (0, ""))
        await client.until_offset(room, 7)
        got: list[int] = []
        before = 8
        while before > 1:
            fields = {} if before == 8 else {"since": {"offset": before, "epoch": ""}}
            reply = await client.call("history", channel=room, limit=10, reverse=True, **fields)
            got += [p["offset"] for p in reply["publications"]]
            before = got[-1]
        assert got == [7, 6, 5, 4, 3, 2, 1]


# Expiry and refresh


async def test_delivery_ends_when_the_token_expires(
    gateway: Process, shared: Stack, room: str
) -> None:
    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time(), ttl_s=1))
        await client.subscribe(room)
        code = await client.until_closed()
        assert code == 3005


async def test_a_refresh_prolongs_the_connection_without_a_gap(
    gateway: Process, shared: Stack, room: str
) -> None:
    async with (
        Client(gateway.websocket_url) as client,
        Client(gateway.websocket_url) as other,
    ):
        # Both end at the same second; one of them brings a new token before.
        first = token(now=time.time(), ttl_s=2)
        await client.greet(first)
        await other.greet(first)
        await client.subscribe(room)
        reply = await client.call("refresh", token=token(now=time.time(), ttl_s=600))
        assert reply["ttl"] > 500
        assert await other.until_closed() == 3005
        shared.publish(room, 1)
        await client.until_offset(room, 1)


async def test_a_refresh_cannot_make_another_person_of_a_client(gateway: Process) -> None:
    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time(), ttl_s=60))
        error = await refused(client.call("refresh", token=token(now=time.time() - 99, ttl_s=9)))
        assert error.code == 109
        bob = token("bob", now=time.time())
        await client.send(json.dumps({"id": 99, "refresh": {"token": bob}}))
        assert await client.until_closed() == 3500


# HTTP


async def test_the_api_publishes_with_its_key_only(gateway: Process, room: str) -> None:
    body = {"tenant": TENANT, "channel": room, "data": {"by": "api"}, "tags": {"a": "b"}}
    async with Client(gateway.websocket_url) as client, httpx.AsyncClient() as http:
        await client.greet(token(now=time.time()))
        await client.subscribe(room)
        url = f"{gateway.url}/api/publish"
        assert (await http.post(url, json=body)).status_code == 401
        wrong = await http.post(url, json=body, headers={"X-API-Key": "wrong"})
        assert wrong.status_code == 401
        assert wrong.json()["error"]["code"] == 101
        key = {"X-API-Key": API_KEY}
        done = await http.post(url, json=body, headers=key)
        assert done.status_code == 200
        txid = done.json()["result"]["txid"]
        await client.until_offset(room, 1)
        assert client.received[room][0]["tags"] == {"a": "b", "txid": txid}
        assert client.data(room) == [{"by": "api"}]
        for text, reason in (
            (b'"\xff"', "data is not valid UTF-8: invalid start byte at byte 1"),
            (b'"\\ud800"', "it has half of a surrogate pair at byte 26"),
            (b'1, "tags": {"a": 1}', "Expected a string, got a number - at `$.tags[...]`"),
        ):
            content = b'{"channel": "x", "data": %b}' % text
            answer = await http.post(url, content=content, headers=key)
            assert reason in answer.json()["error"]["message"]
        for bad in (
            b"",
            b"[]",
            b'{"channel": "x"}',
            b'{"channel": "no room", "data": 1}',
            b'{"channel": "x", "data": 1, "tenant": "no tenant"}',
            b'{"channel": "x", "data": NaN}',
            b'{"channel": "x", "data": "\xff"}',
            b'{"channel": "x", "data": 1, "tags": {"txid": "1"}}',
            b'{"channel": "x", "data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            b'{"channel": "x", "data": "' + b"y" * 1_100_000 + b'"}',
        ):
            answer = await http.post(url, content=bad, headers=key)
            assert answer.status_code == 400, bad[:60]
            assert answer.json()["error"]["code"] == 107
            assert len(answer.text) < 400


async def test_the_probes(gateway: Process) -> None:
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{gateway.url}/healthz")).status_code == 200
        ready = await http.get(f"{gateway.url}/readyz")
        assert ready.json() == {"ready": True, "draining": False, "consuming": True}
        assert (await http.get(f"{gateway.url}/api/publish")).status_code == 405
        assert (await http.get(f"{gateway.url}/connection/websocket")).status_code in (
            400,
            404,
            426,
        )
