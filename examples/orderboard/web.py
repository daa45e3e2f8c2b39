"""The demo's web application: the page, what it loads, and its buttons."""

import json
import secrets
import time
from importlib import resources
from pathlib import Path
from typing import Any

import psycopg
from joserfc import jwt
from joserfc.jwk import OctKey
from psycopg_pool import AsyncConnectionPool, PoolTimeout
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from examples.orderboard import board, truth
from examples.orderboard.controls import ControlFailed, Controls
from examples.orderboard.guard import TOKEN_HEADER, Guard
from examples.orderboard.orders import ROOM, TENANT
from examples.orderboard.writer import RATES_PER_S, Writer

STATIC = Path(str(resources.files(__package__))) / "static"
CLIENT_TOKEN_TTL_S = 600


class Web:
    """Handlers; each answers JSON, errors as ``{"error": one line}`` with status 4xx or 5xx."""

    def __init__(
        self, pool: AsyncConnectionPool, writer: Writer, controls: Controls, token_secret: str
    ) -> None:
        self._pool = pool
        self._writer = writer
        self._controls = controls
        self._key = OctKey.import_key(token_secret)
        self._page_token = secrets.token_urlsafe(24)

    def application(self) -> Starlette:
        """The ASGI application, behind its guard."""
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/client-token", self._client_token, methods=["POST"]),
                Route("/board", self._board),
                Route("/truth", self._truth),
                Route("/control/rate", self._rate, methods=["POST"]),
                Route("/control/{action}", self._control, methods=["POST"]),
                Route("/control/{action}/{name}", self._control, methods=["POST"]),
                Mount("/static", StaticFiles(directory=STATIC)),
            ],
            middleware=[
                Middleware(
                    Guard,
                    token=self._page_token,
                    gateway_ports=tuple(gateway.port for gateway in self._controls.gateways()),
                )
            ],
            exception_handlers={
                ControlFailed: _failed,
                psycopg.OperationalError: _no_database,
                PoolTimeout: _no_database,
            },
        )

    async def _page(self, request: Request) -> Response:
        config = {
            "tokenHeader": TOKEN_HEADER,
            "token": self._page_token,
            "room": ROOM,
            "rates": RATES_PER_S,
            "gateways": self._gateways(),
        }
        # No "<" in a script element's text: it could end the element.
        text = json.dumps(config).replace("<", "\\u003c")
        page = (STATIC / "index.html").read_text(encoding="utf-8")
        return HTMLResponse(page.replace("{{config}}", text))

    async def _client_token(self, request: Request) -> Response:
        """What every application does for its own users, after it has checked who they are."""
        now_s = int(time.time())
        claims = {
            "sub": "visitor",
            "tenant": TENANT,
            "iat": now_s,
            "exp": now_s + CLIENT_TOKEN_TTL_S,
        }
        return JSONResponse({"token": jwt.encode({"alg": "HS256"}, claims, self._key)})

    async def _board(self, request: Request) -> Response:
        async with self._pool.connection() as conn:
            state = await board.load(conn)
        return JSONResponse({**state, "rolled_back_number": self._writer.rolled_back_count})

    async def _truth(self, request: Request) -> Response:
        last = request.query_params.get("snapshot", "")
        number = request.query_params.get("rolled_back_number", "")
        if not truth.SNAPSHOT.fullmatch(last) or not (number.isascii() and number.isdigit()):
            return JSONResponse(
                {"error": "snapshot and rolled_back_number must come from the last answer"},
                status_code=400,
            )
        async with self._pool.connection() as conn:
            snapshot, committed = await truth.committed_since(conn, last)
        return JSONResponse(
            {
                "snapshot": snapshot,
                "committed": committed,
                "rolled_back": self._writer.rolled_back_since(int(number)),
                "rolled_back_number": self._writer.rolled_back_count,
                **self._state(),
            }
        )

    async def _rate(self, request: Request) -> Response:
        try:
            body: Any = await request.json()
        except ValueError:
            body = None
        rate = body.get("per_s") if isinstance(body, dict) else None
        if rate not in RATES_PER_S:
            return JSONResponse({"error": f"per_s must be one of {RATES_PER_S}"}, status_code=400)
        self._writer.rate_per_s = rate
        return JSONResponse(self._state())

    async def _control(self, request: Request) -> Response:
        action, name = request.path_params["action"], request.path_params.get("name")
        await self._controls.press(action, name)
        return JSONResponse(self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "gateways": self._gateways(),
            "relays_alive": self._controls.relays_alive(),
            "rate_per_s": self._writer.rate_per_s,
            "now_ms": time.time() * 1000,
        }

    def _gateways(self) -> list[dict[str, Any]]:
        return [
            {"name": gateway.name, "port": gateway.port, "alive": gateway.alive}
            for gateway in self._controls.gateways()
        ]


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=409)


async def _no_database(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "Postgres does not answer at the moment"}, status_code=503)
