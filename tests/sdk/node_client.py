"""Clients of the stock JavaScript SDK: one Node process (``clients.mjs``) holds many of them."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.sdk.client import (
    MAX_DELAY_MS,
    MIN_DELAY_MS,
    TIMEOUT_S,
    Diary,
    History,
    Publication,
    Refused,
    Said,
    Tokens,
)

PROGRAM = Path(__file__).with_name("clients.mjs")
LINE_MAX_BYTES = 16_777_216


class NodeProgram:
    """The process; ``async with NodeProgram(path_of_node) as program: …``. Its standard input
    ends with this process, and it with that."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._clients: dict[str, NodeClient] = {}
        self._process: asyncio.subprocess.Process
        self._reading: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            self._node,
            str(PROGRAM),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_MAX_BYTES,
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._process.wait()
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            await self._reading

    async def open(
        self, name: str, url: str, token: str = "", tokens: Tokens | None = None
    ) -> "NodeClient":
        """A client that is not connected yet."""
        client = self._clients[name] = NodeClient(self, name, tokens)
        await client.command(
            "open",
            url=url,
            token=token,
            asks_for_tokens=tokens is not None,
            min_delay_ms=MIN_DELAY_MS,
            max_delay_ms=MAX_DELAY_MS,
        )
        return client

    async def command(self, name: str, **fields: Any) -> Any:
        """Have it done; the result. Raises Refused."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"n": number, "do": name, **fields}).encode() + b"\n")
        await stdin.drain()
        async with asyncio.timeout(TIMEOUT_S):
            return await answer

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = json.loads(line)
            if "n" in said:
                self._answer(self._answers.pop(said["n"]), said)
            else:
                self._clients[said.pop("client")].told(said)
        for answer in self._answers.values():
            answer.cancel()

    @staticmethod
    def _answer(answer: "asyncio.Future[Any]", said: dict[str, Any]) -> None:
        if answer.done():
            return
        if error := said.get("error"):
            answer.set_exception(Refused(error["code"], error["message"]))
        else:
            answer.set_result(said["result"])


class NodeClient:
    """Implements ``tests.sdk.client.Client``; made by ``NodeProgram.open``."""

    def __init__(self, program: NodeProgram, name: str, tokens: Tokens | None) -> None:
        self.diary = Diary()
        self._program = program
        self._name = name
        self._tokens = tokens
        self._fetching: set[asyncio.Task[None]] = set()

    def told(self, said: dict[str, Any]) -> None:
        """An event of the SDK."""
        event = said.pop("event")
        if event == "token_wanted":
            task = asyncio.create_task(self._fetch_token())
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)
            return
        self.diary.add(Said(event, said.pop("channel", ""), said))

    async def _fetch_token(self) -> None:
        assert self._tokens is not None
        await self.command("token", token=await self._tokens())

    async def command(self, name: str, **fields: Any) -> Any:
        return await self._program.command(name, client=self._name, **fields)

    async def connect(self) -> None:
        await self.command("connect")

    async def disconnect(self) -> None:
        await self.command("disconnect")

    async def subscribe(self, channel: str, since: tuple[int, str] | None = None) -> None:
        await self.command("subscribe", channel=channel, since=_position(since))

    async def unsubscribe(self, channel: str) -> None:
        await self.command("unsubscribe", channel=channel)

    async def publish(self, channel: str, data: Any) -> None:
        await self.command("publish", channel=channel, data=data)

    async def history(
        self,
        channel: str,
        limit: int,
        since: tuple[int, str] | None = None,
        reverse: bool = False,
    ) -> History:
        answer = await self.command(
            "history", channel=channel, limit=limit, since=_position(since), reverse=reverse
        )
        return History(answer["offset"], answer["epoch"], _publications(answer["publications"]))

    async def close(self) -> None:
        await self.disconnect()


def _position(since: tuple[int, str] | None) -> dict[str, Any] | None:
    return None if since is None else {"offset": since[0], "epoch": since[1]}


def _publications(found: Sequence[dict[str, Any]]) -> tuple[Publication, ...]:
    return tuple(Publication(p["offset"], p["data"], p["tags"]) for p in found)
