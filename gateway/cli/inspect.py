"""Commands that show how things are: status, version."""

import asyncio
from typing import Annotated

import typer

from gateway.cli.options import ConfigFile


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command(short_help="Show shards, lag, relays and gateways.")(status)
    app.command(short_help="Print the version.")(version)


def status(
    json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    config: ConfigFile = None,
) -> None:
    """Show shards, lag, relays and gateways; exit code 1 if something is wrong.

    Needs TIDEGATE_POSTGRES_DSN and TIDEGATE_REDIS_URL. What cannot be reached is said, the rest is
    shown.

    \b
    Example:
      tidegate status
      tidegate status --json | jq '.shards[] | select(.lag > 0)'
    """
    from gateway.operate.status import read_status  # noqa: PLC0415
    from gateway.operate.status_table import table  # noqa: PLC0415
    from gateway.sources import load  # noqa: PLC0415

    settings = load(config)
    settings.require("postgres_dsn", "redis_url")
    found = asyncio.run(
        read_status(
            settings.postgres_dsn.get_secret_value(),
            settings.redis_url.get_secret_value(),
            settings.redis_url_also.get_secret_value(),
        )
    )
    typer.echo(found.json() if json else table(found))
    if not json:
        for problem in found.problems:
            typer.echo(f"tidegate: {problem}", err=True)
    raise typer.Exit(1 if found.problems else 0)


def version() -> None:
    """Print the version of Tidegate and of what it runs on."""
    import platform  # noqa: PLC0415
    from importlib import metadata  # noqa: PLC0415

    try:
        own = metadata.version("tidegate")
    except metadata.PackageNotFoundError:
        own = "(not installed)"
    typer.echo(f"tidegate {own}, Python {platform.python_version()}")
