"""Commands that deal with messages: publish, tail."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from gateway.cli.options import (
    ConfigFile,
    NegativeNumbers,
    Room,
    Tenant,
    duration_s,
    require,
    tenant_name,
)

if TYPE_CHECKING:
    from gateway.settings import Settings
    from gateway.tail import Tail

DEFAULT_PORT = 8000
EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - to be told apart
TAIL_USER = "tidegate-tail"
TAIL_TOKEN_TTL_S = 3_600


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command(cls=NegativeNumbers, short_help="Publish one message.")(publish)
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

    tags = _tags(tag or ())
    settings = load(config)
    settings.require("postgres_dsn")
    dsn = settings.postgres_dsn.get_secret_value()
    text = sys.stdin.buffer.read() if json == "-" else os.fsencode(json)
    if not text.strip():
        where = "stdin is empty" if json == "-" else "it is empty"
        raise typer.BadParameter(f"{where}: give the message as JSON text", param_hint="'JSON'")
    typer.echo(asyncio.run(_publish(dsn, tenant, room, text, tags)))


def _tags(given: Iterable[str]) -> dict[str, str]:
    tags: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="'--tag'")
        if key in tags:
            raise typer.BadParameter(f"{key!r} is given twice", param_hint="'--tag'")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise typer.BadParameter(
                f"{key!r} is not valid UTF-8, or its value", param_hint="'--tag'"
            ) from None
        tags[key] = value
    return tags


async def _publish(dsn: str, tenant: str, room: str, text: bytes, tags: dict[str, str]) -> str:
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
    url: Annotated[
        str | None,
        typer.Option(
            help="The gateway, else the one on TIDEGATE_HOST and TIDEGATE_PORT "
            "(ws://127.0.0.1:8000/connection/websocket).",
            show_default=False,
        ),
    ] = None,
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
        raise typer.BadParameter(str(error), param_hint="'--since'") from None
    settings = load(config)
    gateway_url = own_url(settings.host, settings.port) if url is None else checked_url(url)
    given = _tokens(tenant, settings, token, anonymous)
    options = TailOptions(
        gateway_url,
        room,
        given,
        token_fixed=token is not None,
        since=position,
        count=count,
        strict=strict,
    )
    following = Tail(options, _write, _warn)
    try:
        asyncio.run(_until_signal(following))
    finally:
        if following.began:
            _warn(following.summary())
    raise typer.Exit(0 if following.continuity.tally.kept else 1)


def own_url(host: str, port: int) -> str:
    """Where the gateway with these settings is found from this machine."""
    address = EVERY_ADDRESS.get(host, host)
    shown = f"[{address}]" if ":" in address else address
    return f"ws://{shown}:{port or DEFAULT_PORT}/connection/websocket"


def checked_url(url: str) -> str:
    """Raises typer.BadParameter for what is no WebSocket URL."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("ws", "wss") and parts.hostname and parts.port != 0:
            return url
    raise typer.BadParameter(
        f"{url.partition('?')[0]!r} is not a WebSocket URL like "
        f"{own_url('127.0.0.1', DEFAULT_PORT)}",
        param_hint="'--url'",
    )


def _tokens(
    tenant: str, settings: "Settings", token: str | None, anonymous: bool
) -> Callable[[], str | None]:
    from gateway.tokens import claimed_tenant, sign  # noqa: PLC0415
    from outbox.names import DEFAULT_TENANT  # noqa: PLC0415

    if anonymous and tenant != DEFAULT_TENANT:
        raise typer.BadParameter(
            f"anonymous clients see tenant {DEFAULT_TENANT}, not {tenant}",
            param_hint="'--anonymous'",
        )
    if token and (claimed_tenant(token) or tenant) != tenant:
        raise typer.BadParameter(
            f"the token is for tenant {claimed_tenant(token)}, not {tenant}", param_hint="'--token'"
        )
    if anonymous or token:
        return lambda: token
    require(
        settings,
        "token_hmac_secret",
        instead={"token_hmac_secret": "Or give --token, or --anonymous."},
    )
    secret = settings.token_hmac_secret.get_secret_value()

    return lambda: sign(secret, tenant, TAIL_USER, now=time.time(), ttl_s=TAIL_TOKEN_TTL_S)


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
    tenant: Annotated[
        str, typer.Option(help="The tenant: claim `tenant`.", callback=tenant_name)
    ] = "default",
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
    try:
        typer.echo(sign(secret, tenant, user, now=time.time(), ttl_s=ttl_s))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--user'") from None
