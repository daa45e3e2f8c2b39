"""Uvicorn, and all that is known here of its internals.

``HubProtocol`` is uvicorn's sans-I/O WebSocket protocol with a second way in: Starlette does the
handshake and the reading, while the hub writes finished frames straight to the transport. What
this relies on (uvicorn >= 0.53, < 0.55) is held by ``tests/integration/test_server_contract.py``:

* attributes ``conn`` (websockets' ``ServerProtocol``), ``transport``, ``scope``, ``queue``,
  ``frames``, ``curr_msg_data_type``, ``close_sent``, ``close_timer``, ``read_paused``;
* ``handle_connect`` sets ``scope`` and creates the task that runs the application later;
* ``pause_writing`` and ``resume_writing`` are the transport's flow control;
* ``run_asgi`` leaves the transport open at its end if ``close_timer`` is set;
* ``Server.serve`` ends when ``should_exit`` is set, and closes all connections itself then: it is
  set only after the drain.
"""

import asyncio
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Protocol, cast

import structlog
import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

from gateway.embedded.child import die_with_parent

if TYPE_CHECKING:
    from gateway.settings import Settings

CLOSE_TIMEOUT_S = 5.0
"""How long a peer has to answer a close frame before the transport is cut."""
EXTENSION = "tidegate.socket"
STEADY_S = 30.0
"""A worker that lived so long is taken for healthy: the next back-off begins small again."""

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


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would close every connection at once, before the drain."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """The listening socket. Raises OSError, which names host and port, if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        reason = f"cannot listen: {error.strerror}"
        raise OSError(error.errno, reason, f"{host}:{port}") from None
    sock.set_inheritable(True)
    return sock


def run_worker(settings: "Settings", sock: socket.socket) -> int:
    """Serve in this process until SIGTERM or SIGINT; gives the exit code.

    Raises as ``Worker.start`` does.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(settings, sock))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop  # noqa: PLC0415  absent on some platforms
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _serve(settings: "Settings", sock: socket.socket) -> int:
    from gateway.app import application  # noqa: PLC0415  it imports this module
    from gateway.worker import Worker  # noqa: PLC0415

    worker = Worker(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await worker.start()
        HubProtocol.buffer_bytes = settings.client_buffer_bytes
        server = _Server(
            uvicorn.Config(
                application(worker),
                ws=HubProtocol,
                http="httptools",
                lifespan="off",
                log_config=None,
                access_log=False,
                ws_max_size=settings.message_max_bytes,
                ws_ping_interval=None,
                ws_per_message_deflate=False,
                timeout_graceful_shutdown=2,
                server_header=False,
                proxy_headers=False,
            )
        )
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((serving, stopping, worker.failed), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await worker.drain()
        server.should_exit = True
        await serving
        return 1 if worker.failed.done() else 0
    finally:
        await worker.stop()


def serve(settings: "Settings", workers: int = 1) -> int:
    """Serve with this many processes on one port until told to stop; gives the exit code."""
    sock = listen(settings.host, settings.port)
    if workers == 1:
        return run_worker(settings, sock)
    return Supervisor(settings, sock, workers).run()


class Supervisor:
    """Keeps worker processes alive that share one listening socket."""

    def __init__(self, settings: "Settings", sock: socket.socket, workers: int) -> None:
        self._settings = settings
        self._socket = sock
        self._stopping = False
        self._processes: list[BaseProcess | None] = [None] * workers
        self._failures = [0] * workers
        self._start_at = [0.0] * workers

    def run(self) -> int:
        """Until SIGTERM or SIGINT; then the workers drain."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        while not self._stopping:
            self._tend()
            wait([p.sentinel for p in self._processes if p is not None], timeout=0.2)
        deadline = time.monotonic() + self._settings.drain_timeout_s + CLOSE_TIMEOUT_S
        code = 0
        for process in self._processes:
            if process is None:
                continue
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                log.error("worker did not end in time", pid=process.pid)
                process.kill()
                process.join()
            code = code or abs(process.exitcode or 0)
        return code

    def _tend(self) -> None:
        now = time.monotonic()
        for index, process in enumerate(self._processes):
            if process is not None and not process.is_alive():
                log.error("worker ended", pid=process.pid, exit_code=process.exitcode)
                steady = now - self._start_at[index] > STEADY_S
                self._failures[index] = 0 if steady else self._failures[index] + 1
                back_off_s = min(10.0, 0.2 * 2 ** self._failures[index])
                self._start_at[index] = now + random.uniform(back_off_s / 2, back_off_s)
                self._processes[index] = None
            if self._processes[index] is None and now >= self._start_at[index]:
                self._start_at[index] = now
                self._processes[index] = self._spawn()

    def _spawn(self) -> BaseProcess:
        process = get_context("spawn").Process(
            target=_run_child, args=(self._settings, self._socket, os.getpid())
        )
        process.start()
        return process

    def _stop(self, _number: int, _frame: Any) -> None:
        self._stopping = True
        for process in self._processes:
            if process is not None and process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGTERM)


def _run_child(settings: "Settings", sock: socket.socket, parent: int) -> None:
    """A worker process: ends when its parent does, however that ended."""
    from gateway.faults import explain  # noqa: PLC0415  imported in the child only
    from gateway.logs import configure  # noqa: PLC0415

    configure(settings.log_format, settings.log_level)
    die_with_parent(parent, signal.SIGTERM)
    try:
        sys.exit(run_worker(settings, sock))
    except Exception as error:
        told = explain(error)
        if told is None:
            raise
        log.error("worker cannot start", error="; ".join(told[1]))
        sys.exit(told[0])
