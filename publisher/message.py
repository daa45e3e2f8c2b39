"""A message before it is published, and JSON text that is published as it stands."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outbox.names import DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class RawJSON:
    """JSON text, from any encoder, that is published without being parsed or changed.

    ``text`` is a string or UTF-8 bytes. Postgres checks its syntax and keeps it byte for byte. Line
    feeds between tokens reach clients as spaces, which means the same in JSON.

    ```python
    publish(conn, "orders:42", RawJSON(orjson.dumps(order)))
    ```
    """

    text: str | bytes


@dataclass(frozen=True, slots=True)
class Message:
    """One message for `publish_many`."""

    room: str
    """Up to 200 characters; what stands before its first ``:`` is its namespace."""
    data: Any
    """`RawJSON`: JSON text as it stands. ``bytes``, ``bytearray``, ``memoryview``: binary, which
    JSON clients get as a base64 string. Anything else: a value for `json.dumps`."""
    tenant: str = DEFAULT_TENANT
    """Up to 64 characters."""
    tags: Mapping[str, str] | None = None
    """Labels that travel beside the data. The tag ``txid`` is set by Tidegate."""
