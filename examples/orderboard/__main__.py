"""``python -m examples.orderboard``: start everything and serve the page."""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import uvicorn
from psycopg_pool import AsyncConnectionPool

from examples.orderboard import orders, surroundings
from examples.orderboard.controls import Controls
from examples.orderboard.web import Web
from examples.orderboard.writer import Writer
from gateway.dev import Stack, StackError, StackOptions
from gateway.embedded import EmbeddedServerError

LOOPBACK = "127.0.0.1"
GATEWAYS = 2
SCHEMA = "orderboard"
POOL_SIZE = 10
POOL_TIMEOUT_S = 5.0


def main(arguments: list[str] | None = None) -> int:
    """Run until Ctrl-C; the exit status."""
    options = _parser().parse_args(arguments)
    _look_around(options.use_environment)
    try:
        page = _listen(options.port)
        port = page.getsockname()[1]
        with Stack(_stack_options(options, port)) as stack:
            asyncio.run(_serve(stack, page, port))
    except KeyboardInterrupt:
        pass
    except (StackError, EmbeddedServerError, OSError) as error:
        print(f"orderboard: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.orderboard",
        description="A live order board through two gateways, with buttons to break things.",
    )
    parser.add_argument("--port", type=int, default=8080, help="port of the page; 0: any free one")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(".tidegate/orderboard"),
        metavar="DIR",
        help="where the data is kept between runs (default: %(default)s)",
    )
    parser.add_argument("--ephemeral", action="store_true", help="keep nothing")
    parser.add_argument(
        "--use-environment",
        action="store_true",
        help="use the TIDEGATE_* settings of the environment, and write to the database and the "
        "Redis that they name (else they are ignored)",
    )
    return parser


def _look_around(use_environment: bool) -> None:
    """Say which servers it will be; without ``--use-environment`` never somebody else's."""
    if use_environment:
        print(f"orderboard: {surroundings.describe(os.environ)}", flush=True)
    elif ignored := surroundings.leave_out(os.environ):
        print(
            f"orderboard: ignoring {', '.join(ignored)} (--use-environment uses them)", flush=True
        )


def _stack_options(options: argparse.Namespace, port: int) -> StackOptions:
    first = port + 1 if all(_is_free(port + 1 + number) for number in range(GATEWAYS)) else 0
    return StackOptions(
        folder=None if options.ephemeral else options.data,
        port=first,
        gateways=GATEWAYS,
        relays=1,
        settings={
            # The page comes from another port than the gateways, which is another origin.
            "TIDEGATE_ALLOWED_ORIGINS": f"http://{LOOPBACK}:{port},http://localhost:{port}",
        },
    )


async def _serve(stack: Stack, page: socket.socket, port: int) -> None:
    async with _pool(stack.postgres_dsn) as pool:
        async with pool.connection() as conn:
            await orders.create_tables(conn)
        writer = Writer(pool)
        web = Web(pool, writer, Controls(stack), stack.token_hmac_secret)
        server = _Server(
            uvicorn.Config(
                web.application(),
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=3,
            ),
            greeting=f"\n  The order board is open:  http://{LOOPBACK}:{port}\n\n"
            "  Two gateways, a relay, Postgres and Redis are running. Break them. Ctrl-C closes.\n",
        )
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(writer.run(stop))
            try:
                await server.serve(sockets=[page])
            finally:
                stop.set()
                await writing


class _Server(uvicorn.Server):
    """Greets once the page can be loaded."""

    def __init__(self, config: uvicorn.Config, greeting: str) -> None:
        super().__init__(config)
        self._greeting = greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        print(self._greeting, flush=True)


@asynccontextmanager
async def _pool(dsn: str) -> AsyncIterator[AsyncConnectionPool]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        await conn.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
    async with AsyncConnectionPool(
        dsn,
        min_size=2,
        max_size=POOL_SIZE,
        timeout=POOL_TIMEOUT_S,
        kwargs={"options": f"-c search_path={SCHEMA}"},
        open=False,
    ) as pool:
        yield pool


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise OSError(
            f"cannot listen on port {port} ({reason}): give another with --port"
        ) from None
    return listener


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError):
            return False
    return True


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
