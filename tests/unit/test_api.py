"""What the HTTP API says of a body that it cannot read."""

import pytest

from gateway.api import defect


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"data": "\xff"}', "it is not valid UTF-8 (invalid start byte at byte 10)"),
        (rb'{"data": "\ud800"}', "it has half of a surrogate pair at byte 10"),
        (rb'{"data": "\uDC00\uD800"}', "it has half of a surrogate pair at byte 10"),
        (rb'{"data": "\ud83d\ude00\udfff"}', "it has half of a surrogate pair at byte 22"),
        (rb'{"data": "\ud83d\ude00 \\ud800 \u00e9 \n"}', None),
        (b"{", None),
        (b"", None),
    ],
)
def test_defects(body: bytes, said: str | None) -> None:
    assert defect(body) == said
