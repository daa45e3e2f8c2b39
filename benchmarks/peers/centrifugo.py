"""Centrifugo with its Redis engine, compiled where there is a Go toolchain."""

import http.client
import json
import os
import secrets
import shutil
import subprocess
import time
from contextlib import ExitStack, closing

from benchmarks.bench import Bench
from benchmarks.load import ENDPOINT, PREFIX, Load
from benchmarks.peers.peer import BUILT, INSTALL, ROOM, SIZE_BYTES
from benchmarks.peers.server import accepts, server
from benchmarks.writer import payload
from gateway.embedded.process import LOOPBACK, free_port

MODULE = "github.com/centrifugal/centrifugo/v6"
VERSION = "v6.9.1"
PROGRAM = BUILT / "centrifugo"
BUILD_TIMEOUT_S = 1_800.0
SEND_TIMEOUT_S = 60.0
HISTORY = {"history_size": 300, "history_ttl": "600s"}
"""As long as a room's replay stream of Tidegate."""


class Centrifugo:
    """One node with history in Redis, published to by its HTTP API, a batch in one request."""

    name = "Centrifugo"

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        port = free_port()
        configuration = bench.folder / f"centrifugo-{port}.json"
        configuration.write_text(json.dumps(_configuration(bench.servers.redis.url, port)))
        process = stack.enter_context(
            server(
                [str(PROGRAM), "--config", str(configuration)],
                bench.cores.server,
                configuration.with_suffix(".log"),
                lambda: accepts(port),
            )
        )
        self.pid = process.pid
        self.load = stack.enter_context(Load(port, bench.cores.load, path=ENDPOINT))
        client = http.client.HTTPConnection(LOOPBACK, port, timeout=SEND_TIMEOUT_S)
        self._client = stack.enter_context(closing(client))

    def send(self, count: int) -> None:
        one = b'{"publish":{"channel":"%b","data":%b}}'
        room = ROOM.encode()
        commands = b",".join(
            one % (room, payload(SIZE_BYTES, time.monotonic_ns())) for _ in range(count)
        )
        self._client.request(
            "POST",
            "/api/batch",
            b'{"commands":[%b]}' % commands,
            {"Content-Type": "application/json"},
        )
        answer = self._client.getresponse()
        said = json.loads(answer.read())
        refused = [reply for reply in said["replies"] if "error" in reply]
        if refused:
            raise ConnectionError(f"Centrifugo refuses {len(refused)} messages: {refused[0]}")


def _configuration(redis_url: str, port: int) -> dict[str, object]:
    return {
        "http_server": {"address": LOOPBACK, "port": str(port)},
        "http_api": {"insecure": True},
        # No token is asked for. Pings have a cost of their own, which is not that of a delivery.
        "client": {"insecure": True, "ping_interval": "3600s", "pong_timeout": "60s"},
        "channel": {
            "namespaces": [{"name": PREFIX.removesuffix(":"), "force_recovery": True, **HISTORY}]
        },
        "engine": {
            "type": "redis",
            "redis": {"address": redis_url, "prefix": f"centrifugo-{secrets.token_hex(4)}"},
        },
        "log": {"level": "warn"},
    }


def lacking() -> str | None:
    """Why it cannot run."""
    if PROGRAM.exists():
        return None
    if shutil.which("go") is None:
        return "there is no Go toolchain (go) to build it with"
    return f"it is not built: {INSTALL} does that, or says why not"


def version() -> str:
    """Of what is built."""
    return VERSION.removeprefix("v")


def install() -> str | None:
    """Compile it, which takes minutes; why that did not work."""
    go = shutil.which("go")
    if PROGRAM.exists() or go is None:
        return lacking()
    BUILT.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            [go, "install", f"{MODULE}@{VERSION}"],
            env={"GOTOOLCHAIN": "local", **os.environ, "GOBIN": str(BUILT)},
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"go install took more than {BUILD_TIMEOUT_S:g} s"
    return f"go install failed: {done.stderr.strip()[-300:]}" if done.returncode else None
