"""The blob of a stream entry."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.entry import decode, encode
from outbox.message import Message

MESSAGES = st.builds(
    Message,
    shard=st.integers(0, 1023),
    seq=st.integers(1, 2**63 - 1),
    tenant=st.text(min_size=1, max_size=8),
    room=st.text(min_size=1, max_size=8),
    offset=st.integers(1, 2**63 - 1),
    batch=st.text("0123456789abcdef", min_size=1, max_size=32),
    txid=st.integers(3, 2**64 - 1).map(str),
    tags=st.none() | st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3),
    payload=st.binary(max_size=64),
    binary=st.booleans(),
    created_us=st.integers(0, 2**53),
)


@given(MESSAGES)
def test_a_message_survives(message: Message) -> None:
    assert decode(message.shard, message.batch, encode(message)) == message


@pytest.mark.parametrize(
    "payload",
    [b"", b"{}", b'"\\ud800"', b'"\\u0000"', b"[1e400]", b"\xff\xfe", b"[" * 5000, bytes(1 << 20)],
)
def test_the_payload_is_passed_through(payload: bytes) -> None:
    message = Message(1, 2, "acme", "a", 3, "b", "4", {"k": "v"}, payload, False, 5)
    assert decode(1, "b", encode(message)).payload == payload


def test_fields_that_a_later_version_adds_are_ignored() -> None:
    message = Message(1, 2, "acme", "a", 3, "b", "4", None, b"{}", False, 5)
    later = msgpack.packb([*msgpack.unpackb(encode(message)), "new", 7])
    assert decode(1, "b", later) == message


def test_the_form_is_fixed() -> None:
    """Relays and gateways of neighbouring versions run side by side: this must not change."""
    message = Message(1, 2, "acme", "a", 3, "b", "4", {"k": "v"}, b"{}", False, 5)
    assert encode(message).hex() == "9902a461636d65a1610305a13481a16ba176c4027b7dc2"
