"""A documentation page as a list of sections, each with the examples to execute.

A fenced block is executed if its info string has the word ``run``: ```` ```python run ````, and the
same for ``sql`` and ``javascript``. A block ```` ```text output ```` says what the block before it
prints. Readers of the rendered page see none of these words.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

LANGUAGES = ("sql", "python", "javascript")
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S
)
_HEADING = re.compile(r"^## (?P<title>.+)$", re.M)


@dataclass(frozen=True, slots=True)
class Example:
    """One block to execute."""

    language: str
    code: str
    line: int
    """Of the block's first line of code in the page, from 1."""
    output: str | None
    """What it must print; None: anything."""


@dataclass(frozen=True, slots=True)
class Section:
    """What stands under one ``##`` heading; the examples before the first come first in each."""

    title: str
    examples: tuple[Example, ...]


def sections(path: Path) -> list[Section]:
    """The page's sections that have examples of their own."""
    text = path.read_text()
    fences = list(_FENCE.finditer(text))
    inside = [(fence.start(), fence.end()) for fence in fences]
    headings = [
        heading
        for heading in _HEADING.finditer(text)
        if not any(start < heading.start() < end for start, end in inside)
    ]
    starts = [*(heading.start() for heading in headings), len(text)]
    opening = tuple(_examples(text, 0, starts[0]))
    found = []
    for heading, end in zip(headings, starts[1:], strict=True):
        own = tuple(_examples(text, heading.start(), end))
        if own:
            found.append(Section(heading["title"], opening + own))
    if opening and not found:
        found.append(Section("the whole page", opening))
    return found


def unmarked(path: Path) -> list[int]:
    """The lines of SQL and Python blocks that are not marked to run."""
    text = path.read_text()
    return [
        text.count("\n", 0, fence.start()) + 1
        for fence in _FENCE.finditer(text)
        if fence["info"].split()[:1]
        and fence["info"].split()[0] in ("sql", "python")
        and "run" not in fence["info"].split()
    ]


def _examples(text: str, start: int, end: int) -> Iterator[Example]:
    fences = list(_FENCE.finditer(text, start, end))
    for fence, following in zip_longest(fences, fences[1:]):
        language, *words = fence["info"].split() or [""]
        if "run" not in words:
            continue
        if language not in LANGUAGES:
            raise ValueError(f"no way to run {language!r}: {', '.join(LANGUAGES)}")
        is_output = following is not None and following["info"].split() == ["text", "output"]
        yield Example(
            language,
            _dedent(fence),
            text.count("\n", 0, fence.start("code")) + 1,
            _dedent(following) if following is not None and is_output else None,
        )


def _dedent(fence: re.Match[str]) -> str:
    return re.sub(f"^{fence['indent']}", "", fence["code"], flags=re.M)
