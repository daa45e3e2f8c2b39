"""The command that explains and checks settings: config."""

from typing import Annotated

import typer

from gateway.cli.options import ConfigFile


def register(app: typer.Typer) -> None:
    """Add this command to ``app``."""
    app.command("config", short_help="Check and print the settings.")(config_command)


def config_command(
    docs: Annotated[
        bool, typer.Option("--docs", help="Print docs/configuration.md instead.")
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Check the settings of this environment and print them, without secrets.

    \b
    Example:
      tidegate config --config /etc/tidegate.toml
    """
    from gateway import configuration  # noqa: PLC0415
    from gateway.sources import load  # noqa: PLC0415

    typer.echo(configuration.markdown() if docs else configuration.listing(load(config)), nl=False)
