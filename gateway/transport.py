"""Uvicorn, and all that is known here of its internals.

``HandshakeProtocol`` is uvicorn's sans-I/O WebSocket protocol for as long as Starlette decides over
a client. Then ``take_over`` hands the transport to ``gateway.websocket``, and the task, the queue
and the protocol object of the handshake are let go. What this relies on (uvicorn >= 0.53, < 0.55)
``tests/contract/test_transport.py`` holds:

* ``HttpToolsProtocol.data_received`` calls ``handle_websocket_upgrade`` while it handles
  ``HttpParserUpgrade``, whose argument says where the request ended; the request is then given to
  the new protocol, which is set on the transport last;
* ``WebSocketsSansIOProtocol`` has ``transport``, ``scope``, ``connections``, ``disconnected``,
  ``handshake_complete``, ``handshake_initiated``; ``handle_connect`` sets ``scope`` and creates the
  task that runs the application later;
* ``run_asgi`` closes ``transport`` when the application returns, and does nothing more with it;
* ``connections`` is what ``Server`` shuts down at its end, by ``shutdown`` of each, and waits for;
* ``Server.serve`` ends when ``should_exit`` is set, and closes all connections itself then: it is
  set only after the drain.
"""

import asyncio
import socket
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

from gateway.websocket import WebSocket

EXTENSION = "tidegate.handshake"
EARLY_MAX_BYTES = 65_536


class RequestProtocol(HttpToolsProtocol):
    """Keeps what a client sent right behind its handshake request."""

    _chunk = b""

    def data_received(self, data: bytes) -> None:
        self._chunk = data
        super().data_received(data)
        self._chunk = b""

    def handle_websocket_upgrade(self) -> None:
        upgrade = sys.exc_info()[1]
        super().handle_websocket_upgrade()
        if isinstance(upgrade, httptools.HttpParserUpgrade):
            early = self._chunk[upgrade.args[0] :]
            protocol = self.transport.get_protocol()
            if early and isinstance(protocol, HandshakeProtocol):
                protocol.data_received(early)


class HandshakeProtocol(WebSocketsSansIOProtocol):
    """One client until the application has decided."""

    _early: bytes = b""
    """What the client sent before it was answered."""

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        scope = getattr(self, "scope", None)
        if scope is not None:
            cast(dict[str, Any], scope["extensions"])[EXTENSION] = self

    def data_received(self, data: bytes) -> None:
        if not self.handshake_initiated:
            super().data_received(data)
        elif len(self._early) + len(data) <= EARLY_MAX_BYTES:
            self._early += data
        else:
            self.transport.abort()

    def take_over(self, message_max_bytes: int, buffer_bytes: int) -> WebSocket | None:
        """The transport under a protocol of its own; None if it is gone."""
        transport = self.transport
        if self.disconnected or transport.is_closing():
            return None
        self.connections.discard(self)
        siblings = cast(set[WebSocket], self.connections)
        taken = WebSocket(transport, siblings, message_max_bytes, buffer_bytes, self._early)
        self.transport = cast(asyncio.Transport, _Taken())
        # They refer to each other; without this the garbage collector would have to find them.
        cast(dict[str, Any], self.scope["extensions"]).clear()
        return taken


class _Taken:
    """What is left to uvicorn of a transport that was taken over."""

    def close(self) -> None:
        """Called when the application returns, which here does not end the connection."""

    def is_closing(self) -> bool:
        return True


def take_over(
    scope: MutableMapping[str, Any], message_max_bytes: int, buffer_bytes: int
) -> WebSocket | None:
    """The socket behind a WebSocket that was just accepted; None if the peer has gone meanwhile.

    Its reading is paused: ``gateway.websocket.WebSocket.listen`` begins it. Call it in the task of
    the application, and return from there afterwards.
    """
    handshake = scope.get("extensions", {}).get(EXTENSION)
    if not isinstance(handshake, HandshakeProtocol):
        raise RuntimeError("the gateway runs on its own server only: use `tidegate gateway`")
    return handshake.take_over(message_max_bytes, buffer_bytes)


class Server:
    """Uvicorn around one application, on sockets that are listening already."""

    def __init__(self, app: ASGIApp) -> None:
        self._server = _Server(
            uvicorn.Config(
                app,
                ws=HandshakeProtocol,
                http=RequestProtocol,
                lifespan="off",
                log_config=None,
                access_log=False,
                ws_ping_interval=None,
                ws_per_message_deflate=False,
                timeout_graceful_shutdown=2,
                server_header=False,
                proxy_headers=False,
            )
        )

    async def serve(self, sock: socket.socket) -> None:
        """Accept connections until ``stop``; then all that are left are closed at once."""
        await self._server.serve(sockets=[sock])

    def stop(self) -> None:
        """Have ``serve`` end."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would close every connection at once, before the drain."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
