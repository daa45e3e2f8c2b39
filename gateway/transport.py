"""Uvicorn, and all that is known here of its internals.

``HubProtocol`` is uvicorn's sans-I/O WebSocket protocol with a second way in: Starlette does the
handshake and the reading, while the hub writes finished frames straight to the transport. What
this relies on (uvicorn >= 0.53, < 0.55) ``tests/integration/test_transport_contract.py`` holds:

* attributes ``conn`` (websockets' ``ServerProtocol``), ``transport``, ``scope``, ``queue``,
  ``frames``, ``curr_msg_data_type``, ``close_sent``, ``close_timer``, ``read_paused``;
* ``handle_connect`` sets ``scope`` and creates the task that runs the application later;
* ``pause_writing`` and ``resume_writing`` are the transport's flow control;
* ``run_asgi`` leaves the transport open at its end if ``close_timer`` is set;
* ``Server.serve`` ends when ``should_exit`` is set, and closes all connections itself then: it is
  set only after the drain.
"""

import socket
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

CLOSE_TIMEOUT_S = 5.0
"""How long a peer has to answer a close frame before the transport is cut."""
EXTENSION = "tidegate.socket"

log = structlog.get_logger(__name__)


class Listener(Protocol):
    """What is told of the socket's buffer and end, synchronously."""

    def filled(self) -> None: ...

    def drained(self) -> None: ...

    def closed(self) -> None: ...


class HubProtocol(WebSocketsSansIOProtocol):
    """Implements ``gateway.connection.Socket``."""

    buffer_bytes = 1_048_576
    """Ceiling of the write buffer; ``serve`` sets it for the process."""

    full = False
    _listener: Listener | None = None

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        scope = getattr(self, "scope", None)
        if scope is not None:
            extensions = cast(dict[str, Any], scope["extensions"])
            extensions[EXTENSION] = self
            self.transport.set_write_buffer_limits(self.buffer_bytes)

    def listen(self, listener: Listener) -> None:
        """Report to ``listener`` from now on."""
        self._listener = listener
        if self.disconnected:
            listener.closed()

    def write(self, frame: bytes) -> None:
        if not self.close_sent and not self.disconnected:
            self.transport.write(frame)

    def buffered_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    async def room_to_write(self) -> None:
        """Wait until the write buffer is below its ceiling."""
        await self.writable.wait()

    def close(self, code: int, reason: str) -> None:
        if self.close_sent or self.disconnected or self.transport.is_closing():
            return
        self.conn.send_close(code, reason)
        self._end(code, reason)

    def _end(self, code: int, reason: str) -> None:
        """A close frame is ready to be sent: send it, tell the application, set a time limit."""
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.writable.set()
        # Not `transport.close`, which waits for the buffer: a peer that reads nothing never ends.
        self.close_timer = self.loop.call_later(CLOSE_TIMEOUT_S, self.transport.abort)

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                log.info("invalid UTF-8 from a client")
                if not self.close_sent:
                    self.conn.send_close(1007, "invalid UTF-8")
                    self._end(1007, "invalid UTF-8")
                return
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        error = self.conn.parser_exc
        log.info("client broke the WebSocket protocol", error=f"{type(error).__name__}: {error}")
        super().handle_parser_exception()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.full = True
        if self._listener is not None:
            self._listener.filled()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.full = False
        if self._listener is not None:
            self._listener.drained()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._listener is not None:
            self._listener.closed()
            self._listener = None


def socket_of(scope: MutableMapping[str, Any]) -> HubProtocol:
    """The socket behind an accepted WebSocket."""
    found = scope.get("extensions", {}).get(EXTENSION)
    if not isinstance(found, HubProtocol):
        raise RuntimeError("the gateway runs on its own server only: use `tidegate gateway`")
    return found


class Server:
    """Uvicorn around one application, on sockets that are listening already."""

    def __init__(self, app: ASGIApp, message_max_bytes: int, buffer_bytes: int) -> None:
        """The largest frame of a client, and the ceiling of each write buffer."""
        HubProtocol.buffer_bytes = buffer_bytes
        self._server = _Server(
            uvicorn.Config(
                app,
                ws=HubProtocol,
                http="httptools",
                lifespan="off",
                log_config=None,
                access_log=False,
                ws_max_size=message_max_bytes,
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
