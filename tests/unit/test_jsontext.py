import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.jsontext import elements, members

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES), st.sampled_from([None, 1]), st.booleans())
def test_members(value: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert {key: json.loads(part) for key, part in members(text).items()} == value


@given(st.lists(VALUES), st.sampled_from([None, 1]))
def test_elements(value: list[Any], indent: int | None) -> None:
    assert [json.loads(part) for part in elements(json.dumps(value, indent=indent))] == value


def test_parts_are_passed_on_as_they_are() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    text = f'{{ "a" : 1e400 ,"b":"\\ud800 }},]", "c":{deep}, "d":{{"e": "\\\\"}} }}'
    assert members(text) == {"a": "1e400", "b": '"\\ud800 },]"', "c": deep, "d": '{"e": "\\\\"}'}


@pytest.mark.parametrize(
    "text", ["", "5", "[]", "{", '{"a":1', '{"a":1}}', "{}{}", "{a:1}", '{"a"}', '{"a":"}', "{]"]
)
def test_what_is_no_object(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        members(text)
