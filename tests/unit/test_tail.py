"""The client against gateways that misbehave on a script: a real one never would."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from gateway.continuity import Position
from gateway.tail import Tail, TailFailed, TailOptions, backoff_s

Script = Callable[[ServerConnection, list[Any]], Awaitable[None]]
"""What a gateway does with one connection; the list collects what the client said."""


class Seen:
    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self.warnings: list[str] = []
        self.said: list[Any] = []

    def write(self, line: bytes) -> None:
        assert line.endswith(b"\n")
        self.raw.append(line)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.raw]

    @property
    def offsets(self) -> list[int]:
        return [line["offset"] for line in self.lines]


@asynccontextmanager
async def scripted(seen: Seen, *scripts: Script) -> AsyncIterator[str]:
    """A gateway that goes through ``scripts``, one for each connection."""
    left = list(scripts)

    async def handle(socket: ServerConnection) -> None:
        await left.pop(0)(socket, seen.said)

    async with serve(handle, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"ws://127.0.0.1:{port}/connection/websocket"


async def hear(socket: ServerConnection, said: list[Any]) -> dict[str, Any]:
    command: dict[str, Any] = json.loads(await socket.recv())
    said.append(command)
    return command


async def greet(socket: ServerConnection, said: list[Any], **reply: Any) -> None:
    """Answers connect and subscribe."""
    connect = await hear(socket, said)
    await socket.send(json.dumps({"id": connect["id"], "connect": {"ping": 25, "pong": True}}))
    subscribe = await hear(socket, said)
    await socket.send(json.dumps({"id": subscribe["id"], "subscribe": reply}))


def pub(offset: int, room: str = "room") -> str:
    body = {"data": {"n": offset}, "offset": offset, "tags": {"txid": "7"}}
    return json.dumps({"push": {"channel": room, "pub": body}})


async def follow(url: str, seen: Seen, **options: Any) -> Tail:
    token = options.pop("token", lambda: "T")
    tail = Tail(TailOptions(url, "room", token, **options), seen.write, seen.warnings.append)
    async with asyncio.timeout(20):
        await tail.run(asyncio.Event())
    return tail


async def test_live_messages_in_frames_of_several_lines() -> None:
    async def gateway(socket: ServerConnection, said: list[Any]) -> None:
        await greet(socket, said, epoch="e", offset=4)
        await socket.send("\n".join([pub(5), pub(1, "another"), pub(6)]))
        await socket.send("{}")
        await hear(socket, said)
        await socket.send(pub(7))
        await socket.wait_closed()

    seen = Seen()
    async with scripted(seen, gateway) as url:
        tail = await follow(url, seen, count=3)
    assert seen.lines[0] == {"offset": 5, "data": {"n": 5}, "tags": {"txid": "7"}}
    assert seen.offsets == [5, 6, 7]
    connect, subscribe, pong = seen.said
    assert connect["connect"]["token"] == "T"
    assert subscribe["subscribe"] == {"channel": "room", "recoverable": True, "positioned": True}
    assert pong == {}
    assert not seen.warnings
    assert tail.continuity.tally.kept
    assert "3 messages of room, offsets 5…7; 0 missing" in tail.summary()
    assert "--since e:7" in tail.summary()


async def test_data_is_printed_as_it_came() -> None:
    deep = "[" * 5_000 + "]" * 5_000
    data = (
        f'{{"big":12345678901234567890123, "small":1e-400,"text":"\\u00e9\\ud83d","deep":{deep}}}'
    )

    async def gateway(socket: ServerConnection, said: list[Any]) -> None:
        await greet(socket, said, epoch="e", offset=0)
        await socket.send(f'{{"push":{{"channel":"room","pub":{{"data":{data},"offset":1}}}}}}')
        await socket.wait_closed()

    seen = Seen()
    async with scripted(seen, gateway) as url:
        await follow(url, seen, count=1, token=lambda: None)
    assert seen.raw == [b'{"offset":1,"data":%b,"tags":{}}\n' % data.encode()]
    assert "token" not in seen.said[0]["connect"]


async def test_it_resumes_after_a_break() -> None:
    async def breaks(socket: ServerConnection, said: list[Any]) -> None:
        await greet(socket, said, epoch="e", offset=0)
        await socket.send(pub(1))
        await socket.close(3001, "shutdown")

    async def resumes(socket: ServerConnection, said: list[Any]) -> None:
        publications = [{"data": 0, "offset": offset} for offset in (2, 3)]
        await greet(socket, said, epoch="e", offset=3, recovered=True, publications=publications)
        await socket.send(pub(4))
        await socket.wait_closed()

    seen = Seen()
    async with scripted(seen, breaks, resumes) as url:
        tail = await follow(url, seen, count=4)
    assert seen.offsets == [1, 2, 3, 4]
    asked = seen.said[3]["subscribe"]
    assert (asked["recover"], asked["epoch"], asked["offset"]) == (True, "e", 1)
    (warning,) = seen.warnings
    assert warning.startswith("connection lost: closed with 3001 (shutdown); reconnecting in 0.")
    assert tail.continuity.tally.reconnects == 1
    assert tail.continuity.tally.kept


async def test_a_hole_is_told_and_asked_for_again() -> None:
    async def loses(socket: ServerConnection, said: list[Any]) -> None:
        await greet(socket, said, epoch="e", offset=0)
        await socket.send("\n".join([pub(1), pub(3)]))
        await socket.wait_closed()

    async def resumes(socket: ServerConnection, said: list[Any]) -> None:
        await greet(socket, said, epoch="e", offset=1, recovered=True)
        await socket.send("\n".join([pub(2), pub(3)]))
        await socket.wait_closed()

    seen = Seen()
    async with scripted(seen, loses, resumes) as url:
        tail = await follow(url, seen, count=3)
    assert seen.offsets == [1, 2, 3]
    assert "a hole: offset 3 after e:1" in seen.warnings[0]
    assert tail.continuity.tally.missing == 1
    assert not tail.continuity.tally.kept


async def test_what_comes_twice_is_told_and_not_printed() -> None:
    async def repeats(socket: ServerConnection, said: list[Any]) -> None:
        await greet(socket, said, epoch="e", offset=0)
        await socket.send("\n".join([pub(1), pub(1), pub(2)]))
        await socket.wait_closed()

    seen = Seen()
    async with scripted(seen, repeats) as url:
        tail = await follow(url, seen, count=2)
    assert seen.offsets == [1, 2]
    assert seen.warnings == ["repeated: offset 1 after e:1"]
    assert not tail.continuity.tally.kept


async def not_recovered(socket: ServerConnection, said: list[Any]) -> None:
    await greet(socket, said, epoch="new", offset=8, was_recovering=True, recovered=False)
    await socket.send(pub(9))
    await socket.wait_closed()


async def test_a_loss_is_told_clearly() -> None:
    seen = Seen()
    async with scripted(seen, not_recovered) as url:
        tail = await follow(url, seen, count=1, since=Position("old", 3))
    assert seen.offsets == [9]
    assert seen.warnings == ["not recovered: continuity lost at old:3, goes on after new:8"]
    assert tail.continuity.tally.kept


async def test_a_loss_ends_it_if_strict() -> None:
    seen = Seen()
    async with scripted(seen, not_recovered) as url:
        with pytest.raises(TailFailed, match="--strict"):
            await follow(url, seen, count=1, since=Position("old", 3), strict=True)
    assert not seen.lines


def error(code: int, message: str, temporary: bool = False) -> Script:
    async def gateway(socket: ServerConnection, said: list[Any]) -> None:
        command = await hear(socket, said)
        body = {"code": code, "message": message, "temporary": temporary}
        await socket.send(json.dumps({"id": command["id"], "error": body}))
        await socket.wait_closed()

    return gateway


def closing(code: int, reason: str) -> Script:
    async def gateway(socket: ServerConnection, said: list[Any]) -> None:
        await hear(socket, said)
        await socket.close(code, reason)

    return gateway


def evicting(code: int) -> Script:
    async def gateway(socket: ServerConnection, said: list[Any]) -> None:
        await greet(socket, said, epoch="e", offset=0)
        push = {"channel": "room", "unsubscribe": {"code": code, "reason": "r"}}
        await socket.send(json.dumps({"push": push}))
        await socket.wait_closed()

    return gateway


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (error(103, "permission denied"), r"connect refused with 103 \(permission denied\)"),
        (closing(3500, "invalid token"), r"closed with 3500 \(invalid token\)"),
        (evicting(2000), r"unsubscribed with 2000 \(r\)"),
    ],
)
async def test_what_is_final_ends_it(script: Script, line: str) -> None:
    seen = Seen()
    async with scripted(seen, script) as url:
        with pytest.raises(TailFailed, match=line):
            await follow(url, seen)


async def test_what_is_temporary_is_tried_again_once_it_has_begun() -> None:
    async def works(socket: ServerConnection, said: list[Any]) -> None:
        await greet(socket, said, epoch="e", offset=0, recovered=True)
        await socket.send(pub(1))
        await socket.wait_closed()

    seen = Seen()
    async with scripted(seen, evicting(2500), error(109, "token expired"), works) as url:
        tail = await follow(url, seen, count=1)
    assert seen.offsets == [1]
    assert tail.continuity.tally.reconnects == 2


def refusing(code: int, temporary: bool) -> Script:
    """Lets the client connect and not subscribe."""

    async def gateway(socket: ServerConnection, said: list[Any]) -> None:
        connect = await hear(socket, said)
        await socket.send(json.dumps({"id": connect["id"], "connect": {}}))
        await error(code, "r", temporary)(socket, said)

    return gateway


async def test_what_is_temporary_is_tried_again_from_the_start() -> None:
    async def works(socket: ServerConnection, said: list[Any]) -> None:
        await greet(socket, said, epoch="e", offset=0)
        await socket.send(pub(1))
        await socket.wait_closed()

    tokens = iter("abcdef")
    seen = Seen()
    refusals = (error(109, "r"), refusing(100, True), refusing(7, False), closing(3001, "r"))
    async with scripted(seen, *refusals, works) as url:
        tail = await follow(url, seen, count=1, token=lambda: next(tokens))
    assert seen.offsets == [1]
    assert [warning.partition(";")[0] for warning in seen.warnings] == [
        "connect refused with 109 (r)",
        "subscribe refused with 100 (r)",
        "subscribe refused with 7 (r)",
        "closed with 3001 (r)",
    ]
    assert all("; trying again in " in warning for warning in seen.warnings)
    assert [said["connect"]["token"] for said in seen.said if "connect" in said] == list("abcde")
    assert tail.continuity.tally.reconnects == 0


async def test_a_token_that_expired_and_stays_the_same_ends_it() -> None:
    seen = Seen()
    async with scripted(seen, error(109, "token expired")) as url:
        with pytest.raises(TailFailed, match=r"109 \(token expired\): give a fresh token with"):
            await follow(url, seen, token_fixed=True)


async def test_without_a_gateway_it_does_not_wait() -> None:
    seen = Seen()
    line = r"no gateway answers at ws://127.0.0.1:1/ \(Connection refused\): .* --url"
    with pytest.raises(TailFailed, match=line):
        await follow("ws://127.0.0.1:1/?token=hunter2", seen)
    with pytest.raises(TailFailed, match="not a WebSocket URL"):
        await follow("http://127.0.0.1:1/", seen)


@pytest.mark.parametrize("frame", ["hello", '{"id":1', '{"push":5}', "[]", "{}"])
async def test_what_is_not_the_protocol_ends_it(frame: str) -> None:
    async def gateway(socket: ServerConnection, said: list[Any]) -> None:
        await hear(socket, said)
        await socket.send(frame)
        await socket.wait_closed()

    seen = Seen()
    async with scripted(seen, gateway) as url:
        with pytest.raises(TailFailed, match=r"not the protocol|not one to connect"):
            await follow(url, seen)


async def test_it_stops_when_it_is_told_to() -> None:
    async def gateway(socket: ServerConnection, said: list[Any]) -> None:
        await greet(socket, said, epoch="e", offset=0)
        await socket.send(pub(1))
        await socket.wait_closed()

    seen, stop = Seen(), asyncio.Event()

    def write(line: bytes) -> None:
        seen.write(line)
        stop.set()

    async with scripted(seen, gateway) as url:
        options = TailOptions(url, "room", lambda: None)
        async with asyncio.timeout(20):
            await Tail(options, write, seen.warnings.append).run(stop)
    assert seen.offsets == [1]


def test_the_back_off_doubles_and_is_bounded() -> None:
    assert [backoff_s(n, 1.0) for n in range(7)] == [0.5, 1, 2, 4, 8, 16, 20]
    assert backoff_s(1_000_000, 1.0) == 20
    assert backoff_s(0, 0.0) == 0.25
