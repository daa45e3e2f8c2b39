"""Options and forms of arguments that several commands share."""

import re
from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file with settings, else the one that TIDEGATE_CONFIG names.",
        show_default=False,
    ),
]

Tenant = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant, like acme.")]
Room = Annotated[
    str, typer.Argument(metavar="ROOM", help="The room (channel) of the tenant, like orders:42.")
]

_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}


def duration_s(text: str) -> int:
    """Seconds of ``90``, ``90s``, ``15m``, ``12h`` or ``7d``. Raises typer.BadParameter."""
    match = re.fullmatch(r"(\d{1,9})([smhd]?)", text)
    if not match or int(match[1]) == 0:
        raise typer.BadParameter(f"{text!r} is not a duration like 90s, 15m, 12h or 7d")
    return int(match[1]) * _UNIT_S[match[2]]
