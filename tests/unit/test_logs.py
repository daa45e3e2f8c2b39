import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from gateway import logs
from gateway.logs import redact_text

TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhIn0.dGhlLXNpZ25hdHVyZQ"


@pytest.fixture(autouse=True)
def _leave_logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    access = logging.getLogger("uvicorn.access")
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    access.disabled = False
    structlog.reset_defaults()


def configured(log_format: str = "json", level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    logs.configure(log_format, level, stream=stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_of_our_own() -> None:
    stream = configured()
    structlog.get_logger("gateway.hub").info("shard taken", shard=3, rooms=("a", "b"))
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "shard taken",
        "level": "info",
        "logger": "gateway.hub",
        "shard": 3,
        "rooms": ["a", "b"],
    }


def test_lines_of_libraries_take_the_same_way() -> None:
    stream = configured()
    logging.getLogger("uvicorn.error").warning("Invalid request from %d", 7)
    logging.getLogger("some.library").warning("odd")
    assert [(line["logger"], line["event"]) for line in lines(stream)] == [
        ("uvicorn.error", "Invalid request from 7"),
        ("some.library", "odd"),
    ]


def test_levels() -> None:
    stream = configured(level="warning")
    structlog.get_logger("x").info("silent")
    logging.getLogger("x").info("silent")
    structlog.get_logger("x").warning("heard")
    assert [line["event"] for line in lines(stream)] == ["heard"]


def test_debug_shows_no_frames_of_libraries() -> None:
    stream = configured(level="debug")
    structlog.get_logger("gateway").debug("ours")
    for name in ("uvicorn.error", "websockets.server", "asyncio"):
        logging.getLogger(name).debug("< TEXT the payload")
    assert [line["event"] for line in lines(stream)] == ["ours"]


def test_console() -> None:
    stream = configured("console")
    structlog.get_logger("gateway").info("shard taken", shard=3)
    assert "shard taken" in stream.getvalue()
    assert not stream.getvalue().startswith("{")
    assert configured("auto").isatty() is False
    structlog.get_logger("gateway").info("again")


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_secret_keys_are_redacted_at_any_depth(log_format: str) -> None:
    stream = configured(log_format)
    structlog.get_logger("gateway").info(
        "x",
        token="S1",
        payload=b"S2",
        data={"a": "S3"},
        Authorization="S4",
        redis_password="S5",
        postgres_dsn="S6",
        nested={"headers": [{"x-api-key": "S7", "cookie": "S8"}]},
        payload_bytes=17,
        raw=b"S9",
    )
    text = stream.getvalue()
    assert not [secret for secret in (f"S{n}" for n in range(1, 10)) if secret in text]
    assert "17" in text


def test_secrets_in_texts_and_tracebacks_are_redacted() -> None:
    stream = configured()
    try:
        raise RuntimeError(f"no way to postgresql://app:S1@db/shop?password=S2 with {TOKEN}")
    except RuntimeError as error:
        structlog.get_logger("gateway").error("failed", exc_info=error, error=error)
        logging.getLogger("x").exception("failed at %s", "redis://:S3@cache:6379/0")
    text = stream.getvalue()
    assert "RuntimeError" in text
    for secret in ("S1", "S2", "S3", TOKEN, TOKEN.rpartition(".")[2]):
        assert secret not in text


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("postgresql://app:p@ss/w@db:5432/x", "postgresql://app:[redacted]@db:5432/x"),
        ("redis://:secret@cache/0", "redis://:[redacted]@cache/0"),
        ("host=db password='a b' user=app", "host=db password=[redacted] user=app"),
        ("host=db password=abc user=app", "host=db password=[redacted] user=app"),
        (
            '127.0.0.1:5 - "WebSocket /connection/websocket?token=abc" [accepted]',
            '127.0.0.1:5 - "WebSocket /connection/websocket?[redacted]" [accepted]',
        ),
        ("GET https://a.b/c?d=e HTTP/1.1", "GET https://a.b/c?[redacted] HTTP/1.1"),
        (f"token {TOKEN}.", "token [redacted]."),
        ('bad json\nDETAIL:  Token "x" is invalid.\nCONTEXT:  JSON data, line 1: {x', None),
        ("redis://cache:6379/0 and http://a:80/b", "redis://cache:6379/0 and http://a:80/b"),
        ("is it ready? yes", "is it ready? yes"),
    ],
)
def test_redact_text(text: str, redacted: str | None) -> None:
    expected = redacted or "bad json\nDETAIL: [redacted]\nCONTEXT: [redacted]"
    assert redact_text(text) == expected
