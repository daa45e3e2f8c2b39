"""The gateway as processes: one or several workers on one port, from start to drain."""

import asyncio
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import structlog

from gateway.app import application
from gateway.embedded.child import die_with_parent
from gateway.faults import explain
from gateway.logs import configure
from gateway.settings import Settings
from gateway.transport import Server
from gateway.websocket import CLOSE_TIMEOUT_S
from gateway.worker import Worker
from outbox import tasks
from outbox.backoff import Backoff

GARBAGE_THRESHOLD = 20_000
"""New objects until the garbage collector looks at them; each client that comes brings some ten."""
LISTEN_AFTER_S = 1.0
"""A worker listens when it is ready or has to wait, at the latest after this time."""
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


def run_worker(
    settings: Settings, sock: socket.socket, started: Callable[[], None] = lambda: None
) -> int:
    """Serve in this process until SIGTERM or SIGINT; gives the exit code.

    ``started`` is called when all that it needs was there. Raises as ``Worker.start`` does.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(settings, sock, started))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop  # noqa: PLC0415  absent on some platforms
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _serve(settings: Settings, sock: socket.socket, started: Callable[[], None]) -> int:
    worker = Worker(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = Server(application(worker))
    starting = asyncio.create_task(worker.start())
    stopping = asyncio.create_task(stop.wait())
    waiting = asyncio.create_task(worker.waiting.begun.wait())
    serving: asyncio.Task[None] | None = None
    try:
        # Where there is nothing to wait for, no client meets a gateway that is not ready.
        await _first(starting, stopping, waiting, timeout_s=LISTEN_AFTER_S)
        if starting.done():
            starting.result()
        serving = asyncio.create_task(server.serve(sock))
        await _first(starting, stopping, serving)
        if starting.done():
            starting.result()
            started()
            spare_the_garbage_collector()
            await _first(serving, stopping, worker.failed)
        await worker.drain()
        return 1 if worker.failed.done() else 0
    finally:
        await tasks.end((starting, stopping, waiting))
        try:
            if serving is not None:
                server.stop()
                await serving
        finally:
            await worker.stop()


def spare_the_garbage_collector() -> None:
    """What is there now stays to the end of the process: no collection needs to visit it. And
    connections make no cycles that matter, so it may look for them seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD, 20, 20)


async def _first(*futures: "asyncio.Future[Any]", timeout_s: float | None = None) -> None:
    """Wait until one of them is done, or for so long."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def serve(settings: Settings, workers: int = 1) -> int:
    """Serve with this many processes on one port until told to stop; gives the exit code."""
    sock = listen(settings.host, settings.port)
    if workers == 1:
        return run_worker(settings, sock)
    return Supervisor(settings, sock, workers).run()


class CannotStart(Exception):
    """What no waiting would mend, in one line for the operator."""


@dataclass(slots=True)
class _Child:
    """A worker process."""

    process: BaseProcess
    tells: "Connection[None, str | None]"
    """None when it is ready, or in one line why it cannot start."""


class Supervisor:
    """Keeps worker processes alive that share one listening socket."""

    def __init__(self, settings: Settings, sock: socket.socket, workers: int) -> None:
        self._settings = settings
        self._socket = sock
        self._stopping = False
        self._started = False
        """Whether any worker was ever ready: what refuses another one afterwards may pass."""
        self._children: list[_Child | None] = [None] * workers
        self._backoffs = [Backoff(0.2, 10.0) for _ in range(workers)]
        self._start_at = [0.0] * workers

    def run(self) -> int:
        """Until SIGTERM or SIGINT; then the workers drain.

        Raises CannotStart for what no waiting would mend, before any worker was ready.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        try:
            while not self._stopping:
                self._tend()
                wait([child.process.sentinel for child in self._living()], timeout=0.2)
        finally:
            code = self._end()
        return code

    def _end(self) -> int:
        deadline = time.monotonic() + self._settings.drain_timeout_s + CLOSE_TIMEOUT_S
        code = 0
        processes = [child.process for child in self._living()]
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

    def _living(self) -> list[_Child]:
        return [child for child in self._children if child is not None]

    def _tend(self) -> None:
        now = time.monotonic()
        for index, child in enumerate(self._children):
            if child is not None and not self._tend_one(child):
                if now - self._start_at[index] > STEADY_S:
                    self._backoffs[index].reset()
                self._start_at[index] = now + self._backoffs[index].next_s()
                self._children[index] = None
            if self._children[index] is None and now >= self._start_at[index]:
                self._start_at[index] = now
                self._children[index] = self._spawn()

    def _tend_one(self, child: _Child) -> bool:
        """Whether it lives. Raises CannotStart."""
        alive = child.process.is_alive()
        with suppress(EOFError):
            while child.tells.poll():
                problem = child.tells.recv()
                if problem is None:
                    self._started = True
                elif not self._started:
                    raise CannotStart(problem)
                else:
                    log.error("worker cannot start", error=problem)
        if not alive:
            log.error("worker ended", pid=child.process.pid, exit_code=child.process.exitcode)
            child.tells.close()
        return alive

    def _spawn(self) -> _Child:
        context = get_context("spawn")
        tells, told = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_child, args=(self._settings, self._socket, told, os.getpid())
        )
        process.start()
        told.close()
        return _Child(process, tells)

    def _stop(self, _number: int, _frame: Any) -> None:
        self._stopping = True


def _run_child(
    settings: Settings, sock: socket.socket, told: "Connection[str | None, None]", parent: int
) -> None:
    """A worker process: ends when its parent does, however that ended."""
    configure(settings.log_format, settings.log_level)
    die_with_parent(parent, signal.SIGTERM)
    try:
        sys.exit(run_worker(settings, sock, partial(told.send, None)))
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        told.send("; ".join(explained[1]))
        sys.exit(explained[0])
