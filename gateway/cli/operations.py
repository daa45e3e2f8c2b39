"""Commands that change or audit what is stored: redact, verify, epoch."""

import asyncio
import sys
from typing import Annotated

import typer

from gateway.cli.options import ConfigFile, NegativeNumbers, Room, Tenant, room_of_tenant

epoch_app = typer.Typer(
    name="epoch",
    short_help="Replace the epoch after Postgres lost commits.",
    help="""The identity of the log, which is part of every position. Replaced only when Postgres
    lost commits that were delivered.

    \b
    Example:
      tidegate epoch new --yes""",
    rich_markup_mode=None,
)


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command(cls=NegativeNumbers, short_help="Replace one message by a tombstone, everywhere.")(
        redact
    )
    app.command(short_help="Compare Postgres and Redis, message by message.")(verify)
    epoch_app.command("new", short_help="Begin a new history.")(epoch_new)
    app.add_typer(epoch_app)


def redact(
    tenant: Tenant,
    room: Room,
    offset: Annotated[int, typer.Argument(min=1, metavar="OFFSET", help="The message's offset.")],
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Why, for the table tidegate.redaction.")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Replace one message by a tombstone: in the log, in Redis and in the gateways' memory.

    The tombstone keeps the offset; its data is null, its one tag `redacted`. One more message in
    the room, with data null and the tag `redacts`, tells those who have it already. May be
    repeated. Exit code 1 if something is outstanding; then run it again. Needs
    TIDEGATE_POSTGRES_DSN of a role that may (tidegate.allow_redact) and TIDEGATE_REDIS_URL.

    \b
    Example:
      tidegate redact acme orders:42 17 --reason "request 1234"
    """
    from gateway.operate import redaction  # noqa: PLC0415
    from gateway.sources import load  # noqa: PLC0415

    settings = load(config)
    settings.require("postgres_dsn", "redis_url")
    order = redaction.Order(
        settings.postgres_dsn.get_secret_value(),
        settings.redis_url.get_secret_value(),
        tenant,
        room,
        offset,
        reason,
        redis_url_also=settings.redis_url_also.get_secret_value(),
    )
    outstanding = asyncio.run(redaction.redact(order, typer.echo))
    for line in outstanding:
        typer.echo(f"tidegate: {line}", err=True)
    raise typer.Exit(1 if outstanding else 0)


def verify(
    room: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="TENANT ROOM",
            help="This room and the bus that carries it only.",
            callback=room_of_tenant,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    config: ConfigFile = None,
) -> None:
    """Compare the log in Postgres with itself and with the streams in Redis.

    Reads only, page by page, and may run while messages flow. Exit code 1 if anything is missing,
    doubled or different; what it is stands on stderr. Needs TIDEGATE_POSTGRES_DSN (the rights of a
    relay) and TIDEGATE_REDIS_URL.

    \b
    Example:
      tidegate verify
      tidegate verify --room acme orders:42 --json
    """
    from gateway.operate import verification  # noqa: PLC0415
    from gateway.sources import load  # noqa: PLC0415

    settings = load(config)
    settings.require("postgres_dsn", "redis_url")
    report = asyncio.run(
        verification.verify(
            settings.postgres_dsn.get_secret_value(),
            settings.redis_url.get_secret_value(),
            room,
            lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
            settings.redis_url_also.get_secret_value(),
        )
    )
    typer.echo(verification.as_json(report) if json else verification.summary(report))
    if not json:
        for problem in report.problems:
            typer.echo(f"tidegate: {problem}", err=True)
    raise typer.Exit(1 if report.problems else 0)


def epoch_new(
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without it nothing happens.")] = False,
    config: ConfigFile = None,
) -> None:
    """Begin a new history: every client is told that continuity was lost.

    Only for a Postgres that lost commits (an older backup, a standby that lagged) of which neither
    Redis nor a running gateway knows any more: otherwise relays find the loss and do this
    themselves. Messages and offsets stay; positions of the old epoch become void, so that none is
    taken for one of the history that goes on from here. Connected clients subscribe again by
    themselves, each is answered `recovered: false` and loads its state anew.

    \b
    Example:
      tidegate epoch new --yes
    """
    from gateway.operate import new_epoch  # noqa: PLC0415
    from gateway.sources import load  # noqa: PLC0415

    settings = load(config)
    settings.require("postgres_dsn", "redis_url")
    if not yes:
        raise typer.BadParameter(
            "this tells every client that continuity was lost, and cannot be undone: give --yes",
            param_hint="'--yes'",
        )
    outstanding = asyncio.run(
        new_epoch.begin(
            settings.postgres_dsn.get_secret_value(),
            settings.redis_url.get_secret_value(),
            typer.echo,
            settings.redis_url_also.get_secret_value(),
        )
    )
    for line in outstanding:
        typer.echo(f"tidegate: {line}", err=True)
    raise typer.Exit(1 if outstanding else 0)
