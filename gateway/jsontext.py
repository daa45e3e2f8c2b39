"""JSON taken apart as text: its parts are passed on as they are, whatever they hold.

A parser refuses some of what Postgres accepts as JSON and other clients read: lone surrogates in
escapes, thousands of levels. Here only the level asked for is looked at.
"""

import json
import re
from collections.abc import Iterator

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},"]', re.DOTALL)
_KEY = re.compile(r'\s*("[^"\\]*(?:\\.[^"\\]*)*")\s*:\s*', re.DOTALL)


def members(text: str) -> dict[str, str]:
    """The members of an object: key → the text of its value. Raises ValueError."""
    found = {}
    for part in _parts(text, "{", "}"):
        key = _KEY.match(part)
        if key is None:
            raise ValueError("an object's member has no name")
        found[json.loads(key[1])] = part[key.end() :].rstrip()
    return found


def elements(text: str) -> list[str]:
    """The texts of an array's elements. Raises ValueError."""
    return [part.strip() for part in _parts(text, "[", "]")]


def _parts(text: str, opening: str, closing: str) -> Iterator[str]:
    text = text.strip()
    if not text.startswith(opening) or not text.endswith(closing):
        raise ValueError(f"not between {opening} and {closing}")
    depth, start = 0, 1
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in ("{", "["):
            depth += 1
        elif mark in ("}", "]"):
            depth -= 1
            if depth == 0:
                if token.end() != len(text):
                    raise ValueError("something follows the end")
                if text[start : token.start()].strip():
                    yield text[start : token.start()]
                return
        elif mark == '"':
            raise ValueError("a string does not end")
        elif mark == "," and depth == 1:
            yield text[start : token.start()]
            start = token.end()
    raise ValueError("it does not end")
