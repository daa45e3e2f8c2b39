"""The gateway as processes: one or several workers on one port, from start to drain."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import structlog

from gateway.app import application
from gateway.embedded.child import die_with_parent
from gateway.faults import explain
from gateway.logs import configure
from gateway.settings import Settings
from gateway.transport import CLOSE_TIMEOUT_S, Server
from gateway.worker import Worker
from outbox.backoff import Backoff

STEADY_S = 30.0
"""A worker that lived so long is taken for healthy: the next back-off begins small again."""

log = structlog.get_logger(__name__)


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


def run_worker(settings: Settings, sock: socket.socket) -> int:
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


async def _serve(settings: Settings, sock: socket.socket) -> int:
    worker = Worker(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await worker.start()
        server = Server(
            application(worker), settings.message_max_bytes, settings.client_buffer_bytes
        )
        serving = asyncio.ensure_future(server.serve(sock))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((serving, stopping, worker.failed), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await worker.drain()
        server.stop()
        await serving
        return 1 if worker.failed.done() else 0
    finally:
        await worker.stop()


def serve(settings: Settings, workers: int = 1) -> int:
    """Serve with this many processes on one port until told to stop; gives the exit code."""
    sock = listen(settings.host, settings.port)
    if workers == 1:
        return run_worker(settings, sock)
    return Supervisor(settings, sock, workers).run()


class Supervisor:
    """Keeps worker processes alive that share one listening socket."""

    def __init__(self, settings: Settings, sock: socket.socket, workers: int) -> None:
        self._settings = settings
        self._socket = sock
        self._stopping = False
        self._processes: list[BaseProcess | None] = [None] * workers
        self._backoffs = [Backoff(0.2, 10.0) for _ in range(workers)]
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
        processes = [process for process in self._processes if process is not None]
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                log.error("worker did not end in time", pid=process.pid)
                process.kill()
                process.join()
            # One that was still starting did not know the signal yet, and had nothing to drain.
            if process.exitcode != -signal.SIGTERM:
                code = code or abs(process.exitcode or 0)
        return code

    def _tend(self) -> None:
        now = time.monotonic()
        for index, process in enumerate(self._processes):
            if process is not None and not process.is_alive():
                log.error("worker ended", pid=process.pid, exit_code=process.exitcode)
                if now - self._start_at[index] > STEADY_S:
                    self._backoffs[index].reset()
                self._start_at[index] = now + self._backoffs[index].next_s()
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


def _run_child(settings: Settings, sock: socket.socket, parent: int) -> None:
    """A worker process: ends when its parent does, however that ended."""
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
