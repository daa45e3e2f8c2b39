"""Logs: structlog for our own lines and for those of the libraries, one line for each event.

JSON in production, readable on a terminal; always on stderr, since stdout belongs to commands.
Nothing secret reaches a line: keys that name a secret or a payload are redacted, and passwords and
query strings in URLs and connection strings are cut out of every text, tracebacks included.
"""

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

REDACTED = "[redacted]"

_SECRET_KEY = re.compile(
    r"token|secret|passw|authorization|cookie|api[_-]?key|credential|payload|^data$|^dsn$|_dsn$",
    re.IGNORECASE,
)
# scheme://user:password@ → the password, which may itself hold "@" or "/" if badly escaped.
_URL_PASSWORD = re.compile(r"(?<=://)([^\s/:@'\"]*):[^\s'\"]*@")
_URL_QUERY = re.compile(r"((?:https?|wss?)://[^\s?'\"]*|/[^\s?'\"]*)\?[^\s'\"]+")
_KEY_VALUE_PASSWORD = re.compile(r"(password|passwd|pwd)\s*=\s*('[^']*'|[^\s'\"&]+)", re.IGNORECASE)
# What Postgres adds to an error may quote the row or the JSON text.
_SERVER_DETAIL = re.compile(r"^(DETAIL|CONTEXT|QUERY):.*$", re.MULTILINE)
_JWT = re.compile(r"\beyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")


def redact_text(text: str) -> str:
    """``text`` without passwords, query strings and tokens."""
    text = _URL_PASSWORD.sub(rf"\1:{REDACTED}@", text)
    text = _KEY_VALUE_PASSWORD.sub(rf"\1={REDACTED}", text)
    text = _URL_QUERY.sub(rf"\1?{REDACTED}", text)
    text = _SERVER_DETAIL.sub(rf"\1: {REDACTED}", text)
    return _JWT.sub(REDACTED, text)


def redact(_: WrappedLogger, __: str, event_dict: EventDict) -> EventDict:
    """A structlog processor: no secret key, no secret text, at any depth."""
    for key, value in event_dict.items():
        event_dict[key] = _redact_entry(key, value)
    return event_dict


def _redact_entry(key: str, value: Any) -> Any:
    # A number is a size or a count (payload_bytes), never the thing itself.
    if value is None or isinstance(value, bool | int | float):
        return value
    return REDACTED if _SECRET_KEY.search(key) else _redact_value(value)


def _redact_value(value: Any) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"[{len(value)} bytes]"
    if isinstance(value, Mapping):
        return {
            redact_text(str(key)): _redact_entry(str(key), inner) for key, inner in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_redact_value(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return redact_text(str(value))


def configure(
    log_format: str = "auto", level: str = "info", *, stream: TextIO | None = None
) -> None:
    """Set up structlog and the standard library's logging of this process.

    ``log_format`` is ``json``, ``console`` or ``auto`` (console if ``stream`` is a terminal).
    uvicorn must be started with ``log_config=None, access_log=False``: its loggers then end here.
    """
    stream = stream or sys.stderr
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=not console),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        redact,
    ]
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        if console
        else structlog.processors.JSONRenderer()
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_forget_arguments, *shared],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers[:] = []
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    # One line for each request, with its query string: never.
    logging.getLogger("uvicorn.access").disabled = True
    logging.getLogger("uvicorn.error").addFilter(_is_no_denial)
    # uvicorn prints paths with their query strings at INFO, frames at DEBUG; pools, asyncio and
    # HTTP clients have nothing to say below WARNING that an operator of this service needs.
    for name in ("uvicorn.error", "websockets", "asyncio", "httpx", "httpcore", "psycopg"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _is_no_denial(record: logging.LogRecord) -> bool:
    """uvicorn calls each WebSocket that was refused with an HTTP status an error of ours."""
    return record.msg != "ASGI callable returned without completing handshake."


def _forget_arguments(
    _: WrappedLogger, __: str, event_dict: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    event_dict.pop("positional_args", None)
    return event_dict
