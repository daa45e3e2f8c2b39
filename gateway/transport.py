"""Uvicorn, and all that is known here of its internals.

``HubProtocol`` is uvicorn's sans-I/O WebSocket protocol with a second way in: Starlette does the
handshake and the reading, while the hub writes finished frames straight to the transport. What
this relies on (uvicorn >= 0.53, < 0.55) ``tests/integration/test_transport_contract.py`` holds:

* attributes ``conn`` (websockets' ``ServerProtocol``), ``transport``, ``scope``, ``queue``,
  ``frames``, ``curr_msg_data_type``, ``close_sent``, ``close_timer``, ``read_paused``;
* ``handle_connect`` sets ``scope`` and creates the task that runs the application later;
* ``pause_writing`` and ``resume_writing`` are the transport's flow control;
* ``run_asgi`` leaves the transport open at its end if ``close_timer`` is set; ``handle_close``
  then closes it, and ``connection_lost`` cancels the timer;
* data after a broken frame reaches ``handle_parser_exception`` again;
* ``Server.serve`` ends when ``should_exit`` is set, and closes all connections itself then: it is
  set only after the drain.
"""

import asyncio
import socket
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
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
    _ending = False
    """Whether nothing may be written any more: a close frame was sent or has come."""
    _cut_timer: asyncio.TimerHandle | None = None

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
        if self._ending:
            listener.closed()

    def write(self, frame: bytes) -> None:
        if not self._ending:
            self.transport.write(frame)

    def buffered_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    async def room_to_write(self) -> None:
        """Wait until the write buffer is below its ceiling."""
        await self.writable.wait()

    def close(self, code: int, reason: str) -> None:
        if not self._ending:
            self.conn.send_close(code, reason)
            self._end(code, reason)

    def _end(self, code: int, reason: str) -> None:
        """A close frame is ready to be sent: send it, and tell the application."""
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self._cut_later()
        self.close_timer = self._cut_timer

    def _cut_later(self) -> None:
        """Set a time limit: `transport.close` waits for the buffer, and a peer that reads nothing
        would keep its socket for ever."""
        self._ending = True
        self.writable.set()
        if self._cut_timer is None:
            self._cut_timer = self.loop.call_later(CLOSE_TIMEOUT_S, self.transport.abort)
        if self._listener is not None:
            self._listener.closed()

    def _stop_cut_timer(self) -> None:
        if self._cut_timer is not None:
            self._cut_timer.cancel()
            self._cut_timer = None

    def eof_received(self) -> None:
        super().eof_received()
        self._cut_later()

    def handle_close(self, event: Frame) -> None:
        super().handle_close(event)
        self._stop_cut_timer()
        self._cut_later()

    def handle_ping(self) -> None:
        # A peer that pings and does not read gets no pongs: they would have no bound.
        pong = b"".join(self.conn.data_to_send())
        if not self.full and not self._ending:
            self.transport.write(pong)

    def handle_cont(self, event: Frame) -> None:
        # Empty fragments count for nothing in the largest size of a message.
        if event.data or event.fin:
            super().handle_cont(event)

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
        sent = self.conn.close_sent
        if sent is None or not self.handshake_complete:
            self.transport.abort()
        elif not self.close_sent:
            error = self.conn.parser_exc
            log.info(
                "client broke the WebSocket protocol", error=f"{type(error).__name__}: {error}"
            )
            self._end(sent.code, sent.reason)
            # Closed with data unread, TCP would drop the close frame: what comes is discarded.
            self.transport.write_eof()

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
        self._ending = True
        self._stop_cut_timer()
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
