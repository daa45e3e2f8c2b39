"""Settings as text: the reference in the documentation, and what is in force."""

import json
import types
import typing
from dataclasses import asdict, fields
from typing import Any, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from gateway.namespaces import Namespace
from gateway.settings import Settings, variable

_HEAD = """\
# Configuration

Made from `gateway/settings.py` by `tidegate config --docs`. Do not edit by hand.

A setting comes from the environment (`TIDEGATE_PORT=8000`), else from a TOML file (`port = 8000`),
else from its default. The file is the one given by `--config`, else the one that `TIDEGATE_CONFIG`
names. An empty variable counts as not set. A name that is not a setting, and a value that is not
allowed, end the start with one line each that says what is wrong. `tidegate config` checks the
settings and prints those in force, without secrets.

The unit of a number stands at the end of its name: `_s` seconds, `_bytes`, `_messages`, `_days`.
"""

_NAMESPACES = """
## Namespaces

The namespace of a room is what stands before its first `:` (`orders:42` → `orders`). The entry `*`
holds for all rooms without an entry of their own; without it, the defaults hold. In the file:

```toml
[namespaces.orders]
subscribe = "authenticated"

[namespaces.chat]
publish = "authenticated"
history_messages = 200

[namespaces."*"]
subscribe = "nobody"
```

In the environment, as one JSON object:
`TIDEGATE_NAMESPACES='{"orders": {"subscribe": "authenticated"}}'`.

| option | default | meaning |
|---|---|---|
"""

_OPTIONS = {
    "history_messages": "The most messages that one history request may bring; 0 refuses history "
    "requests. Resuming after a disconnect is not history and has no such limit.",
    "subscribe": "Who may read the rooms: `anyone` (any client of the tenant), `authenticated` "
    "(clients with a token), `nobody`.",
    "publish": "Which clients may publish into the rooms: `anyone`, `authenticated`, `nobody`. The "
    "application itself always may, through the outbox and the HTTP API.",
}


def markdown() -> str:
    """The text of ``docs/configuration.md``."""
    rows = [
        f"| `{variable(name)}` | {_type(field)} | {_default(field)} | {field.description} |"
        for name, field in Settings.model_fields.items()
    ]
    options = [
        f"| `{field.name}` | `{field.default}` | {_OPTIONS[field.name]} |"
        for field in fields(Namespace)
    ]
    head = "| variable | value | default | meaning |\n|---|---|---|---|"
    return "\n".join([_HEAD, head, *rows]) + "\n" + _NAMESPACES + "\n".join(options) + "\n"


def listing(settings: Settings) -> str:
    """All settings in force as lines of TOML; of a secret only whether it is set."""
    lines = []
    for name in Settings.model_fields:
        value = getattr(settings, name)
        if isinstance(value, SecretStr):
            lines.append(f"# {name} is {'set' if value else 'not set'}")
        elif name != "namespaces":
            lines.append(f"{name} = {json.dumps(value)}")
    for name, namespace in settings.namespaces.items():
        lines.append(f"\n[namespaces.{json.dumps(name)}]")
        lines += [f"{option} = {json.dumps(value)}" for option, value in asdict(namespace).items()]
    return "\n".join(lines) + "\n"


def _type(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    if get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    name = {
        SecretStr: "secret text",
        str: "text",
        bool: "`true` or `false`",
        int: "whole number",
        float: "number",
        tuple: "list",
        dict: "table",
    }[get_origin(annotation) or annotation]
    bounds = {
        type(bound).__name__: getattr(bound, type(bound).__name__.lower())
        for bound in field.metadata
        if type(bound).__name__ in ("Ge", "Gt", "Le", "Lt")
    }
    words = {"Ge": "≥", "Gt": ">", "Le": "≤", "Lt": "<"}
    limits = ", ".join(f"{words[kind]} {bound:,}" for kind, bound in bounds.items())
    return f"{name}, {limits}" if limits else name


def _default(field: FieldInfo) -> str:
    value = field.default
    if isinstance(value, SecretStr):
        return "not set"
    if not value and isinstance(value, tuple | dict | types.MappingProxyType):
        return "empty"
    return f"`{json.dumps(value) if isinstance(value, bool) else value}`"
