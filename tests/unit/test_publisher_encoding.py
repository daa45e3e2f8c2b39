"""From Python values to a row: what is sent, and what is said of values that cannot be."""

import json
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from publisher import InvalidMessage, Message, PublishError, RawJSON
from publisher.encoding import Encoded, encode


def payload_of(data: Any) -> str | None:
    return encode(Message("room", data)).payload


def refusal(message: Message) -> str:
    with pytest.raises(InvalidMessage) as caught:
        encode(message)
    return str(caught.value)


def test_a_message_becomes_a_row() -> None:
    message = Message("orders:42", {"status": "paid"}, "acme", {"kind": "order"})
    assert encode(message) == Encoded(
        "acme", "orders:42", '{"status":"paid"}', None, '{"kind":"order"}'
    )


def test_the_tenant_is_default_unless_given() -> None:
    assert encode(Message("orders:42", 1)) == Encoded("default", "orders:42", "1", None, None)


class Colour(StrEnum):
    RED = "red"


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (None, "null"),
        (True, "true"),
        ("", '""'),
        ("Ünïcödé 🌊", '"Ünïcödé 🌊"'),
        ("\0\n\x7f", '"\\u0000\\n\x7f"'),
        (2**63, "9223372036854775808"),
        (1e300, "1e+300"),
        ([], "[]"),
        (Point(1, 2), "[1,2]"),
        ({"a": Colour.RED, 1: None}, '{"a":"red","1":null}'),
    ],
)
def test_python_values_become_compact_json(data: Any, text: str) -> None:
    assert payload_of(data) == text


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_every_json_value_survives(data: Any) -> None:
    text = payload_of(data)
    assert text is not None
    assert "\n" not in text
    assert json.loads(text.encode()) == data


@pytest.mark.parametrize("text", ['{ "a" :\r\n\t1.0 }', '"\\ud800"', "1e400", "not JSON", ""])
@pytest.mark.parametrize("kind", [str, str.encode])
def test_raw_json_is_not_touched(text: str, kind: Any) -> None:
    assert payload_of(RawJSON(kind(text))) == text


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_are_a_binary_payload(kind: Any) -> None:
    row = encode(Message("room", kind(b"\0\xff\n")))
    assert (row.payload, row.payload_bin) == (None, b"\0\xff\n")


DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
CIRCLE: dict[str, Any] = {"rows": [1]}
CIRCLE["rows"].append(CIRCLE)


def name_of(value: object) -> str | None:
    """A test's name for ``value``: no repr(), which some of these values do not have."""
    return ascii(value[:40]) if isinstance(value, str) else type(value).__name__


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (float("nan"), "data is nan, which JSON cannot carry: publish None or a string instead"),
        ({"a": [{"b": 0}, {"b": float("-inf")}]}, 'data["a"][1]["b"] is -inf, which JSON cannot'),
        ({float("nan"): 1}, "data has the key nan, which JSON cannot carry"),
        (
            {"total": Decimal("1.10")},
            'data["total"] is of type Decimal, which has no JSON form: convert it, or encode it',
        ),
        ([datetime(2026, 1, 1, tzinfo=UTC)], "data[0] is of type datetime, which has no JSON"),
        ({"x": {1, 2}}, 'data["x"] is of type set'),
        ({"x": b"1"}, 'data["x"] is of type bytes'),
        ({"x": {(1, 2): 3}}, 'data["x"] has a key of type tuple: keys must be strings'),
        (
            "ab\ud800",
            "data has half of a surrogate pair (U+D800) at index 2, which UTF-8 cannot carry",
        ),
        ({"a": ["ok", "\udfff"]}, 'data["a"][1] has half of a surrogate pair (U+DFFF) at index 0'),
        ({"a": {"\udfff": 1}}, 'data["a"] has a key that has half of a surrogate pair (U+DFFF)'),
        (CIRCLE, 'data["rows"][1] contains itself'),
        (DEEP, "data is nested too deep for Python's JSON encoder"),
        (10**5000, "data has no JSON form: Exceeds the limit (4300 digits)"),
        ({"k" * 300: {1}}, 'data["kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk…] is of type set'),
        (RawJSON(b'"\xff"'), "data is not valid UTF-8: invalid start byte at byte 1"),
        (RawJSON('"\ud800"'), "data has half of a surrogate pair (U+D800) at index 1"),
        (RawJSON('"a\0"'), "data has a NUL character at index 2"),
    ],
    ids=name_of,
)
def test_what_cannot_be_sent_is_named_with_its_place(data: Any, text: str) -> None:
    assert refusal(Message("room", data)).startswith(text)


def test_refusals_do_not_print_values() -> None:
    assert "secret" not in refusal(Message("room", ["secret", {"a": "secret\ud800"}, object()]))
    assert "secret" not in refusal(Message("room", RawJSON('"secret\0"')))


def test_a_long_path_is_cut_in_the_middle() -> None:
    value: Any = {1}
    for _ in range(500):
        value = [value]
    assert refusal(Message("room", value)).startswith(f"data{'[0]' * 5}…{'[0]' * 7} is of type set")


def test_a_shared_part_is_not_a_circle() -> None:
    part = {"x": 1}
    assert refusal(Message("room", [part, part, {2}])).startswith("data[2] is of type set")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Message("a\0b", 1), "room name has a NUL character at index 1"),
        (Message("\ud800", 1), "room name has half of a surrogate pair (U+D800) at index 0"),
        (Message("room", 1, "a\0"), "tenant name has a NUL character at index 1"),
        (Message("room", 1, tags={"a": "\0"}), "tag 'a' has a NUL character at index 0"),
        (Message("room", 1, tags={"a\0": ""}), "a tag's name has a NUL character at index 1"),
        (Message("room", 1, tags={"a": "\ud800"}), "tag 'a' has half of a surrogate pair"),
        (Message("room", 1, tags={"a": 1}), "tags must map strings to strings, not str to int"),  # type: ignore[dict-item]
    ],
    ids=name_of,
)
def test_names_and_tags_that_cannot_be_sent(message: Message, text: str) -> None:
    assert refusal(message).startswith(text)


@pytest.mark.parametrize(
    "message",
    [
        Message(42, 1),  # type: ignore[arg-type]
        Message("room", 1, None),  # type: ignore[arg-type]
        Message("room", RawJSON(42)),  # type: ignore[arg-type]
        Message("room", 1, tags="kind"),  # type: ignore[arg-type]
    ],
    ids=name_of,
)
def test_wrong_types_are_type_errors(message: Message) -> None:
    with pytest.raises(TypeError, match=r"must be|takes"):
        encode(message)


def test_the_error_is_a_value_error_and_a_publish_error() -> None:
    assert issubclass(InvalidMessage, ValueError)
    assert issubclass(InvalidMessage, PublishError)
