"""Where in a Python value the part stands that JSON cannot carry."""

import json
import math
from collections.abc import Iterator
from typing import Any

KEY_MAX_CHARS = 40
PATH_MAX_STEPS = 12


def obstacle(root: str, value: Any) -> str | None:
    """The first part of ``value`` that has no JSON form, with its path and the remedy.

    ``root`` begins the path: ``data["items"][3]["price"] is nan: …``. The error of `json.dumps`
    says what is wrong and not where, so this is asked after it has failed. Values are not printed,
    keys only as part of a path. None if no such part is found.
    """
    problem = _own_obstacle(value)
    if problem:
        return f"{root} {problem}"
    # A stack of iterators instead of recursion: the value may be nested too deep for one.
    steps = [root]
    stack: list[tuple[int, Iterator[tuple[str, Any]]]] = [(id(value), _parts(value))]
    open_ids = {id(value)}
    while stack:
        identity, parts = stack[-1]
        for step, part in parts:
            problem = _own_obstacle(part)
            if problem:
                return f"{_path(steps)}{step} {problem}"
            if isinstance(part, dict | list | tuple):
                if id(part) in open_ids:
                    return f"{_path(steps)}{step} contains itself"
                open_ids.add(id(part))
                steps.append(step)
                stack.append((id(part), _parts(part)))
                break
        else:
            stack.pop()
            steps.pop()
            open_ids.discard(identity)
    return None


def surrogate(text: str) -> str | None:
    """Why ``text`` has no UTF-8 form; None if it has one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"has half of a surrogate pair (U+{ord(text[error.start]):04X}) at index "
            f"{error.start}, which UTF-8 cannot carry"
        )
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        return ((f"[{_short(key)}]", part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return ((f"[{index}]", part) for index, part in enumerate(value))
    return iter(())


def _own_obstacle(value: Any) -> str | None:
    """What is wrong with ``value`` itself, leaving aside what it contains."""
    if isinstance(value, str):
        return surrogate(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return None
        return f"is {float(value)!r}, which JSON cannot carry: publish None or a string instead"
    if isinstance(value, dict):
        return _key_obstacle(value)
    if value is None or isinstance(value, int | list | tuple):
        return None
    return (
        f"is of type {type(value).__name__}, which has no JSON form: convert it, "
        "or encode it yourself and publish RawJSON"
    )


def _key_obstacle(value: dict[Any, Any]) -> str | None:
    for key in value:
        if isinstance(key, str):
            problem = surrogate(key)
            if problem:
                return f"has a key that {problem}"
        elif isinstance(key, float) and not math.isfinite(key):
            return f"has the key {float(key)!r}, which JSON cannot carry"
        elif not (key is None or isinstance(key, int | float)):
            return f"has a key of type {type(key).__name__}: keys must be strings"
    return None


def _path(steps: list[str]) -> str:
    if len(steps) <= PATH_MAX_STEPS:
        return "".join(steps)
    half = PATH_MAX_STEPS // 2
    return f"{''.join(steps[:half])}…{''.join(steps[-half:])}"


def _short(key: Any) -> str:
    shown = json.dumps(key) if isinstance(key, str) else repr(key)
    return shown if len(shown) <= KEY_MAX_CHARS else shown[: KEY_MAX_CHARS - 1] + "…"
