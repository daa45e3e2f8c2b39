"""What a redaction leaves behind: the tombstone in the message's place, and the notice of it.

The tombstone keeps the positions, the batch and the publisher's transaction id; its payload is JSON
``null`` and its one tag ``redacted``. The notice is a message of the same room with a later offset,
payload ``null`` and the tag ``redacts`` with the offset that was redacted.

A publisher may write the same tags by itself. A false tombstone has no content that could be kept
from anyone, and a false notice has nobody look for content where there is a tombstone.
"""

from collections.abc import Mapping
from typing import TypeAlias

from outbox.message import Message

Redacted: TypeAlias = Mapping[tuple[int, int], int]
"""Shard and seq of a notice → seq of the tombstone that it speaks of."""

TOMBSTONE_TAGS = {"redacted": "true"}
NOTICE_TAG = "redacts"


def is_tombstone(message: Message) -> bool:
    """Whether the message is what a redaction left."""
    return message.payload == b"null" and message.tags == TOMBSTONE_TAGS


def redacted_offset(message: Message) -> int | None:
    """The offset that a notice speaks of; None if the message is no notice."""
    if not message.tags:
        return None
    text = message.tags.get(NOTICE_TAG, "")
    # No position has more digits.
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
