"""The grammar of names and the sizes that a message may have.

The same rules stand in the schema as CHECK constraints (``schema/0001_outbox.sql``); a test holds
the two against each other. Names are ASCII, so two names that look alike are alike; a tenant has
no ``:``, so ``<tenant>:<room>`` can be split in one way only.
"""

import re

TENANT_MAX_CHARS = 64
ROOM_MAX_CHARS = 200
PAYLOAD_MAX_BYTES = 1_048_576
TAGS_MAX_BYTES = 4_096
DEFAULT_TENANT = "default"

TENANT_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)
ROOM_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:,/@#=+~!|-]*", re.ASCII)

TENANT_GRAMMAR = "a letter or digit, then letters, digits and any of _ . -"
ROOM_GRAMMAR = "a letter or digit, then letters, digits and any of _ . : , / @ # = + ~ ! | -"


def tenant_error(tenant: str) -> str | None:
    """Why ``tenant`` is not a tenant's name, in words for its user; None if it is one."""
    return _error("tenant", tenant, TENANT_PATTERN, TENANT_GRAMMAR, TENANT_MAX_CHARS)


def room_error(room: str) -> str | None:
    """Why ``room`` is not a room's name, in words for its user; None if it is one."""
    return _error("room", room, ROOM_PATTERN, ROOM_GRAMMAR, ROOM_MAX_CHARS)


def _error(noun: str, name: str, pattern: re.Pattern[str], grammar: str, limit: int) -> str | None:
    if len(name) > limit:
        return f"{noun} name has {len(name)} characters, the limit is {limit}"
    if not pattern.fullmatch(name):
        return f"{noun} name {name!r} is not allowed: {grammar}"
    return None


def namespace(room: str) -> str | None:
    """The namespace of a room: what stands before its first ``:``; None if there is none."""
    head, colon, _ = room.partition(":")
    return head if colon else None
