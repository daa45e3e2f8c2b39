"""Commands that deal with messages: publish, tail."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.options import ConfigFile, Room, Tenant, duration_s

if TYPE_CHECKING:
    from gateway.settings import Settings
    from gateway.tail import Tail

DEFAULT_URL = "ws://127.0.0.1:8000/connection/websocket"
TAIL_USER = "tidegate-tail"
TAIL_TOKEN_TTL_S = 3_600


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command(short_help="Publish one message.")(publish)
    app.command(short_help="Print a room's messages and check continuity.")(tail)
    app.command(short_help="Print a token for a client.")(token)


def publish(
    tenant: Tenant,
    room: Room,
    json: Annotated[
        str, typer.Argument(metavar="JSON", help="The message as JSON text; - reads it from stdin.")
    ],
    tag: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A tag beside the message; may be repeated."),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Publish one message, in a transaction of its own, and print the transaction's id.

    The text is passed on as it is. Needs TIDEGATE_POSTGRES_DSN and the schema.

    \b
    Example:
      tidegate publish acme orders:42 '{"status": "paid"}'
    """
    from gateway.sources import load  # noqa: PLC0415

    tags: dict[str, str] = {}
    for text in tag or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"--tag {text!r} is not KEY=VALUE")
        tags[key] = value
    settings = load(config)
    settings.require("postgres_dsn")
    dsn = settings.postgres_dsn.get_secret_value()
    text = sys.stdin.read() if json == "-" else json
    typer.echo(asyncio.run(_publish(dsn, tenant, room, text, tags)))


async def _publish(dsn: str, tenant: str, room: str, text: str, tags: dict[str, str]) -> str:
    from outbox import database  # noqa: PLC0415
    from publisher import RawJSON, publish_async  # noqa: PLC0415

    connection = await database.connect(dsn, application_name="tidegate-publish")
    async with connection:
        return await publish_async(
            connection, room, RawJSON(text), tenant=tenant, tags=tags or None
        )


def tail(
    tenant: Tenant,
    room: Room,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="EPOCH:OFFSET",
            help="Resume after this position; `start` for everything that the log still has.",
        ),
    ] = None,
    url: Annotated[str, typer.Option(help="The gateway.")] = DEFAULT_URL,
    token: Annotated[
        str | None,
        typer.Option(help="Token to connect with, instead of one made for this command."),
    ] = None,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Connect without a token.")
    ] = False,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after so many messages.")] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="End with exit code 1 if continuity was lost."),
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Print a room's messages as they arrive, a JSON line each, and check that none is missing.

    It is a client like any other: it connects to a gateway, resumes after a break, and says on
    stderr what happens. Ends with exit code 1 if a message was missing or came twice. Without
    --token and --anonymous it signs a token with TIDEGATE_TOKEN_HMAC_SECRET.

    \b
    Example:
      tidegate tail acme orders:42
      tidegate tail acme orders:42 --since start --count 10
    """
    from gateway.continuity import Position  # noqa: PLC0415
    from gateway.sources import load  # noqa: PLC0415
    from gateway.tail import Tail, TailOptions  # noqa: PLC0415

    try:
        position = None if since is None else Position.parse(since)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    given = _tokens(tenant, load(config), token, anonymous)
    following = Tail(TailOptions(url, room, given, position, count, strict), _write, _warn)
    try:
        asyncio.run(_until_signal(following))
    finally:
        if following.began:
            _warn(following.summary())
    raise typer.Exit(0 if following.continuity.tally.kept else 1)


def _tokens(
    tenant: str, settings: "Settings", token: str | None, anonymous: bool
) -> Callable[[], str | None]:
    from gateway.tokens import claimed_tenant, sign  # noqa: PLC0415
    from outbox.names import DEFAULT_TENANT  # noqa: PLC0415

    if anonymous and tenant != DEFAULT_TENANT:
        raise typer.BadParameter(f"anonymous clients see tenant {DEFAULT_TENANT}, not {tenant}")
    if token and (claimed_tenant(token) or tenant) != tenant:
        raise typer.BadParameter(f"the token is for tenant {claimed_tenant(token)}, not {tenant}")
    if anonymous or token:
        return lambda: token
    settings.require("token_hmac_secret")
    secret = settings.token_hmac_secret.get_secret_value()

    def fresh() -> str:
        return sign(secret, tenant, TAIL_USER, now=time.time(), ttl_s=TAIL_TOKEN_TTL_S)

    _checked(fresh)
    return fresh


async def _until_signal(following: "Tail") -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await following.run(stop)


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _warn(line: str) -> None:
    sys.stderr.write(f"tidegate: {line}\n")
    sys.stderr.flush()


def token(
    user: Annotated[str, typer.Option(help="The user: claim `sub`.", show_default=False)],
    tenant: Annotated[str, typer.Option(help="The tenant: claim `tenant`.")] = "default",
    ttl: Annotated[
        str, typer.Option(metavar="DURATION", help="How long it is good for: 90s, 15m, 12h, 7d.")
    ] = "1h",
    config: ConfigFile = None,
) -> None:
    """Print a token for a client, as an application would make it.

    Needs TIDEGATE_TOKEN_HMAC_SECRET, the same as the gateway's.

    \b
    Example:
      tidegate token --tenant acme --user alice --ttl 12h
    """
    from gateway.sources import load  # noqa: PLC0415
    from gateway.tokens import sign  # noqa: PLC0415

    ttl_s = duration_s(ttl)
    settings = load(config)
    settings.require("token_hmac_secret")
    secret = settings.token_hmac_secret.get_secret_value()
    typer.echo(_checked(lambda: sign(secret, tenant, user, now=time.time(), ttl_s=ttl_s)))


def _checked(make: Callable[[], str]) -> str:
    try:
        return make()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
