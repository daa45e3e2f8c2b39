"""How a gateway waits at its start, and how often it says so."""

import asyncio
from typing import Any

import pytest
import redis
import structlog

from gateway.waiting import REMIND_S, Waiting
from outbox.errors import AccessRefused, PostgresUnavailable, SchemaBehind, SchemaMismatch


class Script:
    """Attempts that fail with one error after another, and then succeed."""

    def __init__(self, *errors: Exception) -> None:
        self.left = list(errors)
        self.now_s = 0.0
        self.pause_s = 0.0
        """What each attempt takes by the clock."""

    async def __call__(self) -> str:
        self.now_s += self.pause_s
        if self.left:
            raise self.left.pop(0)
        return "there"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.waiting.RETRY_S", (0.0, 0.0))


async def waited(script: Script) -> list[dict[str, Any]]:
    """What is logged until it succeeds."""
    waiting = Waiting(lambda: script.now_s)
    with structlog.testing.capture_logs() as logged:
        assert await waiting.until("Redis", script) == "there"
    assert waiting.reason is None
    return [dict(line) for line in logged]


async def test_nothing_is_said_where_nothing_is_missing() -> None:
    assert await waited(Script()) == []


async def test_each_cause_is_told_once() -> None:
    refused = redis.ConnectionError("Error 111 connecting")
    loading = redis.BusyLoadingError("Redis is loading")
    lines = await waited(Script(*[refused] * 50, *[loading, refused] * 50))
    assert [(line["log_level"], line["event"], line["cause"]) for line in lines] == [
        ("warning", "waiting for Redis", "Redis: Error 111 connecting"),
        ("warning", "waiting for Redis", "Redis: Redis is loading"),
    ]


async def test_one_that_lasts_is_told_again_now_and_then() -> None:
    script = Script(*[redis.ConnectionError("x")] * 100)
    script.pause_s = REMIND_S / 20
    assert len(await waited(script)) == 5


async def test_the_reason_names_what_is_missing_and_nothing_else() -> None:
    waiting = Waiting()
    assert waiting.reason is None
    assert not waiting.begun.is_set()
    never = {
        "Redis": redis.ConnectionError("Error 111 connecting to 10.0.0.7:6379"),
        "Postgres": PostgresUnavailable("Postgres: 10.0.0.8 refuses"),
    }

    def attempt(error: Exception) -> Any:
        async def fail() -> None:
            raise error

        return fail

    tasks = [asyncio.create_task(waiting.until(s, attempt(error))) for s, error in never.items()]
    await waiting.begun.wait()
    while waiting.reason != "waiting for Postgres and Redis":
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    schema = asyncio.create_task(waiting.until("Postgres", attempt(SchemaBehind("no schema"))))
    while waiting.reason != "waiting for Redis and the schema (tidegate migrate)":
        await asyncio.sleep(0)
    schema.cancel()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (SchemaMismatch("upgrade Tidegate"), SchemaMismatch),
        (redis.AuthenticationError("invalid password"), AccessRefused),
        (RuntimeError("a mistake"), RuntimeError),
    ],
)
async def test_what_no_waiting_mends_is_raised(error: Exception, raised: type[Exception]) -> None:
    with pytest.raises(raised):
        await Waiting().until("Redis", Script(error))
