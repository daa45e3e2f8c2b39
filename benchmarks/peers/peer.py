"""What a peer is, and the messages that all of them carry."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from benchmarks.load import PREFIX, Load
from benchmarks.writer import payload

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "peers"
"""What was compiled for the peers, and why something was not."""
ROOM = f"{PREFIX}0"
SIZE_BYTES = 100
INSTALL = "make bench-peers"


class Peer(Protocol):
    """A running system: a sender's way into it, and the clients that listen."""

    pid: int
    """The process that holds the connections."""
    load: Load

    def send(self, count: int) -> None:
        """Send so many messages at once, each to every client."""
        ...


def texts() -> Iterator[str]:
    """Messages as Tidegate's gateway writes them, each with the next offset."""
    offset = 0
    while True:
        offset += 1
        data = payload(SIZE_BYTES, time.monotonic_ns()).decode()
        yield f'{{"push":{{"channel":"{ROOM}","pub":{{"data":{data},"offset":{offset}}}}}}}'
