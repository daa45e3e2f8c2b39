"""Who may talk to the demo: the page it served itself, on this machine.

The page has buttons that kill processes. It listens on loopback only, but any web page in the same
browser can send requests to loopback. So: a ``Host`` that is not a loopback name is refused (DNS
rebinding), and everything except the page and its static files asks for a token that is made at the
start, stands in the page, and cannot be read or sent from another origin.
"""

import secrets
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

TOKEN_HEADER = "X-Orderboard-Token"  # noqa: S105
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
OPEN_PATHS = ("/static/",)


class Guard:
    """ASGI middleware; also sets the headers that keep the page to itself."""

    def __init__(self, app: ASGIApp, token: str, gateway_ports: tuple[int, ...]) -> None:
        self._app = app
        self._token = token
        sockets = " ".join(
            f"ws://{host}:{port}" for host in ("127.0.0.1", "localhost") for port in gateway_ports
        )
        self._headers = [
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (
                b"content-security-policy",
                f"default-src 'self'; connect-src 'self' {sockets}; frame-ancestors 'none';"
                " base-uri 'none'; form-action 'none'".encode(),
            ),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = self._problem(scope["path"], Headers(scope=scope))
        if problem is not None:
            await PlainTextResponse(problem, status_code=403)(scope, receive, send)
            return

        async def send_with_headers(message: dict) -> None:  # type: ignore[type-arg]
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        await self._app(scope, receive, send_with_headers)  # type: ignore[arg-type]

    def _problem(self, path: str, headers: Headers) -> str | None:
        host = headers.get("host", "")
        if _hostname(host) not in LOOPBACK:
            return "This demo answers on 127.0.0.1 and localhost only.\n"
        if path == "/" or path.startswith(OPEN_PATHS):
            return None
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            return "This demo answers to its own page only.\n"
        if not secrets.compare_digest(headers.get(TOKEN_HEADER, "").encode(), self._token.encode()):
            return "The page is from an earlier run: reload it.\n"
        return None


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
