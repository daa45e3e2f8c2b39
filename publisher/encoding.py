"""From the Python values of a message to what its outbox row holds. Pure, no connection.

Limits (lengths, sizes, the grammar of names) are not looked at here: the table's CHECK constraints
are the one place that decides them, for every language alike. What is caught here is what has no
form that could be sent: values without JSON, text without UTF-8, NUL characters.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from publisher.errors import InvalidMessage
from publisher.location import obstacle, surrogate
from publisher.message import Message, RawJSON


class Encoded(NamedTuple):
    """The columns of an outbox row; exactly one of ``payload`` and ``payload_bin`` is set."""

    tenant: str
    room: str
    payload: str | None
    """JSON text."""
    payload_bin: bytes | None
    tags: str | None
    """JSON text of an object."""


def encode(message: Message) -> Encoded:
    """The row of ``message``. Raises `InvalidMessage` if it has none, TypeError on wrong types."""
    tenant = _name("tenant", message.tenant)
    room = _name("room", message.room)
    tags = _tags(message.tags)
    data = message.data
    if isinstance(data, bytes | bytearray | memoryview):
        return Encoded(tenant, room, None, bytes(data), tags)
    text = _raw(data.text) if isinstance(data, RawJSON) else _json("data", data)
    return Encoded(tenant, room, text, None, tags)


def _json(root: str, value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        reason = obstacle(root, value) or f"{root} is nested too deep for Python's JSON encoder"
        raise InvalidMessage(reason) from None
    except (TypeError, ValueError) as error:
        raise InvalidMessage(obstacle(root, value) or f"{root} has no JSON form: {error}") from None
    problem = None if text.isascii() else surrogate(text)
    if problem:
        raise InvalidMessage(obstacle(root, value) or f"{root} {problem}")
    return text


def _raw(text: str | bytes) -> str:
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise InvalidMessage(
                f"data is not valid UTF-8: {error.reason} at byte {error.start}"
            ) from None
    elif not isinstance(text, str):
        raise TypeError(f"RawJSON takes str or bytes, not {type(text).__name__}")
    _check_text("data", text)
    return text


def _name(noun: str, name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{noun} must be a string, not {type(name).__name__}")
    _check_text(f"{noun} name", name)
    return name


def _tags(tags: Mapping[str, str] | None) -> str | None:
    if tags is None:
        return None
    if not isinstance(tags, Mapping):
        raise TypeError(f"tags must be a mapping of strings, not {type(tags).__name__}")
    for key, value in tags.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidMessage(
                f"tags must map strings to strings, not {type(key).__name__} "
                f"to {type(value).__name__}"
            )
        _check_text("a tag's name", key)
        _check_text(f"tag {key!r}", value)
    return json.dumps(dict(tags), ensure_ascii=False, separators=(",", ":"))


def _check_text(what: str, text: str) -> None:
    problem = None if text.isascii() else surrogate(text)
    if problem:
        raise InvalidMessage(f"{what} {problem}")
    index = text.find("\0")
    if index >= 0:
        raise InvalidMessage(f"{what} has a NUL character at index {index}")
