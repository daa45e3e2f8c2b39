"""What the pages point to is there: files of the repository, other pages, and their sections."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/*/README.md")])

_FENCE = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
_PATH = re.compile(
    r"(?<![\w/.-])(?:\.ci|benchmarks|deploy|docs|examples|gateway|outbox|publisher|tests)/[\w./-]*\w"
)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.M)


def paths(text: str) -> list[str]:
    """All that looks like a path from the repository's root; also inside code blocks."""
    return _PATH.findall(_LINK.sub("", text))


def links(text: str) -> list[str]:
    """The targets of links within the repository."""
    return [
        link["target"]
        for link in _LINK.finditer(_FENCE.sub("", text))
        if not re.match(r"[a-z]+:", link["target"])
    ]


def anchors(text: str) -> set[str]:
    """The names of a page's sections, as GitHub makes them."""
    titles = (heading["title"].lower() for heading in _HEADING.finditer(_FENCE.sub("", text)))
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_all_is_there(page: Path) -> None:
    text = page.read_text()
    lacking = [path for path in paths(text) if not (ROOT / path).exists()]
    for link in links(text):
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            lacking.append(link)
    assert lacking == []


def test_it_finds_them() -> None:
    text = (
        "## What a `page` has: two\n*`tests/unit/a.py`, `tests/b/` and tests/c.py.* "
        "See [d](e.md#f),\n[g](https://example.com/docs/h.md).\n"
        "```sh\n[no](link) docs/i.md\n# no heading\n```\n"
    )
    assert paths(text) == ["tests/unit/a.py", "tests/b", "tests/c.py", "docs/i.md"]
    assert links(text) == ["e.md#f"]
    assert anchors(text) == {"what-a-page-has-two"}
