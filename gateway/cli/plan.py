"""The command that plans: capacity."""

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add this command to ``app``."""
    app.command(short_help="Say what a load takes: gateways, relays, Postgres, Redis.")(capacity)


def capacity(
    clients: Annotated[
        int, typer.Option(min=1, metavar="N", help="Clients connected at one time.")
    ],
    rooms: Annotated[int, typer.Option(min=1, metavar="N", help="Rooms in use at one time.")],
    rate: Annotated[
        float,
        typer.Option(min=0, metavar="N", help="Messages committed per second, all rooms together."),
    ],
    payload_bytes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Bytes of a message's payload.")
    ] = 256,
    rooms_each: Annotated[
        int, typer.Option(min=1, metavar="N", help="Rooms that a client has subscribed to.")
    ] = 1,
    together: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Messages of one room in a transaction: they reach a client in one write.",
        ),
    ] = 1,
    audience: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Clients that get a message, on average over the messages "
            "(clients x rooms each / rooms).",
            show_default=False,
        ),
    ] = None,
    retention_days: Annotated[
        int, typer.Option(min=1, metavar="N", help="Days that the log keeps.")
    ] = 7,
    json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Say what a load takes: gateways, relays, Postgres and Redis.

    Arithmetic from costs that were measured on one machine; it asks no server. A core is planned
    with 60 % of its time. What decides is how many clients a message goes to: where rooms differ,
    take the average over the messages, not over the rooms, and give it as --audience. Exit code 1
    if one installation cannot carry it. The page docs/operate/capacity.md explains each line.

    \b
    Example: 20,000 clients in 2,000 rooms, 500 messages a second
      tidegate capacity --clients 20000 --rooms 2000 --rate 500
    Example: the same, but nine of ten messages go to one room that all are in
      tidegate capacity --clients 20000 --rooms 2000 --rate 500 --audience 18000
    """
    from gateway.capacity import TooMuch, Work, plan  # noqa: PLC0415
    from gateway.capacity_table import table  # noqa: PLC0415

    try:
        work = Work(
            clients=clients,
            rooms=rooms,
            rate_per_s=rate,
            payload_bytes=payload_bytes,
            rooms_each=rooms_each,
            together=together,
            audience=audience,
            retention_days=retention_days,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        found = plan(work)
    except TooMuch as error:
        typer.echo(f"tidegate: {error}", err=True)
        raise typer.Exit(1) from None
    if json:
        import json as format_  # noqa: PLC0415

        typer.echo(format_.dumps(found.as_dict(), indent=1))
    else:
        typer.echo(table(found))
