"""Options and forms of arguments that several commands share."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from gateway.settings import Settings


def tenant_name(name: str) -> str:
    """The callback of what takes a tenant's name."""
    from outbox.names import tenant_error  # noqa: PLC0415

    return _named(name, tenant_error(name))


def _room(name: str) -> str:
    from outbox.names import room_error  # noqa: PLC0415

    return _named(name, room_error(name))


def _named(name: str, problem: str | None) -> str:
    if problem:
        raise typer.BadParameter(problem)
    return name


def room_of_tenant(value: tuple[str, str] | None) -> tuple[str, str] | None:
    """The callback of an option that takes both names."""
    return value and (tenant_name(value[0]), _room(value[1]))


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file with settings, else the one that TIDEGATE_CONFIG names.",
        show_default=False,
    ),
]

Tenant = Annotated[
    str, typer.Argument(metavar="TENANT", help="The tenant, like acme.", callback=tenant_name)
]
Room = Annotated[
    str,
    typer.Argument(
        metavar="ROOM",
        help="The room (channel) of the tenant, like orders:42.",
        callback=_room,
    ),
]

_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_NEGATIVE = re.compile(r"-\d[\d.eE+-]*")


class NegativeNumbers(TyperCommand):
    """A command whose arguments may be negative numbers: -1 is no option of it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As of every command."""
        if any(map(_NEGATIVE.fullmatch, args)):
            ctx.ignore_unknown_options = True
        return super().parse_args(ctx, args)


def duration_s(text: str) -> int:
    """Seconds of --ttl: ``90``, ``90s``, ``15m``, ``12h``, ``7d``. Raises typer.BadParameter."""
    match = re.fullmatch(r"(\d{1,9})([smhd]?)", text)
    if not match or int(match[1]) == 0:
        raise typer.BadParameter(
            f"{text!r} is not a duration like 90s, 15m, 12h or 7d", param_hint="'--ttl'"
        )
    return int(match[1]) * _UNIT_S[match[2]]


def require(settings: "Settings", *names: str, instead: Mapping[str, str]) -> None:
    """As ``Settings.require``, and says what else would do for a setting of ``instead``."""
    from gateway.settings import SettingsError, variable  # noqa: PLC0415

    ways = {f"{variable(name)} is not set": way for name, way in instead.items()}
    try:
        settings.require(*names)
    except SettingsError as error:
        raise SettingsError(
            problem
            + next((f" {way}" for start, way in ways.items() if problem.startswith(start)), "")
            for problem in error.problems
        ) from None
