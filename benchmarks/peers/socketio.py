"""socket.io with its Redis Streams adapter."""

import json
import re
import secrets
import shutil
import subprocess
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.load import Load
from benchmarks.peers.peer import INSTALL, texts
from benchmarks.program import Program

FOLDER = Path(__file__).parent
PROGRAM = FOLDER / "socketio.mjs"
ENDPOINT = "/socket.io/?EIO=4&transport=websocket"
NODE_LEAST = 20
TIMEOUT_S = 300.0


class SocketIO:
    """A process that serves the clients and one that emits, with Redis between them."""

    name = "socket.io"

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        stream = f"socket.io-{secrets.token_hex(4)}"

        def program(role: str, cores: frozenset[int]) -> Program:
            node = shutil.which("node")
            assert node is not None
            command = [node, str(PROGRAM), role, bench.servers.redis.url, stream]
            started = Program(f"socketio.mjs {role}", command, cores)
            stack.callback(started.stop)
            return started

        server = program("serve", bench.cores.server)
        port: int = server.answer()["port"]
        self._sender = program("send", bench.cores.rest)
        server.answer()  # they know of each other
        self._sender.answer()
        self.pid = server.pid
        self.load = stack.enter_context(
            Load(port, bench.cores.load, path=ENDPOINT, protocol="socketio")
        )
        self._texts = texts()

    def send(self, count: int) -> None:
        made = [text.encode() for text in islice(self._texts, count)]
        self._sender.tell(b"".join(b"send %d\n%b" % (len(text), text) for text in made))


def lacking() -> str | None:
    """Why it cannot run."""
    if (reason := _no_node()) is not None:
        return reason
    if not (FOLDER / "node_modules" / "socket.io").is_dir():
        return f"its npm packages are not installed: {INSTALL} does that"
    return None


def version() -> str:
    """Of what is installed."""
    said: str = json.loads((FOLDER / "node_modules/socket.io/package.json").read_text())["version"]
    return said


def install() -> str | None:
    """Install the packages as they are locked; why that did not work."""
    if (reason := _no_node()) is not None:
        return reason
    if _installed_as_locked():
        return None
    npm = shutil.which("npm")
    if npm is None:
        return "npm is not installed"
    try:
        done = subprocess.run(
            [npm, "ci", "--ignore-scripts", "--loglevel=error"],
            cwd=FOLDER,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"npm ci took more than {TIMEOUT_S:g} s"
    return f"npm ci failed: {done.stderr.strip()[-300:]}" if done.returncode else None


def _installed_as_locked() -> bool:
    """``npm ci`` would remove what is there first, also where nothing can be fetched anew."""
    found = FOLDER / "node_modules" / ".package-lock.json"
    locked = FOLDER / "package-lock.json"
    return found.exists() and found.stat().st_mtime >= locked.stat().st_mtime


def _no_node() -> str | None:
    node = shutil.which("node")
    if node is None:
        return "Node.js is not installed"
    done = subprocess.run([node, "--version"], capture_output=True, text=True, check=False)
    found = re.match(r"v(\d+)", done.stdout)
    if found is None or int(found[1]) < NODE_LEAST:
        return f"Node.js {NODE_LEAST} or newer is needed, {done.stdout.strip() or 'none'} is there"
    return None
