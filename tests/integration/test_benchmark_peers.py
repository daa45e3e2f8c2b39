"""Each system beside which Tidegate is measured carries every message, once and in order."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from benchmarks import native
from benchmarks.bench import SMOKE, Bench
from benchmarks.peers import centrifugo, nats, socketio
from benchmarks.peers.centrifugo import Centrifugo
from benchmarks.peers.nats import NATS
from benchmarks.peers.own import Notify, PubSub, SendText, Tidegate
from benchmarks.peers.peer import Peer
from benchmarks.peers.socketio import SocketIO
from benchmarks.processor import Cores
from benchmarks.servers import Servers
from tests.conftest import SOURCE
from tests.requirements import lacking

ANYWHERE = frozenset(os.sched_getaffinity(0))
LISTENERS = 5
PACKAGED = {SocketIO.name: socketio, NATS.name: nats, Centrifugo.name: centrifugo}
PeerKind = Callable[[Bench, ExitStack], Peer]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    try:
        native.compiler()
    except native.NoCompiler as error:
        lacking("cc", str(error))
    folder: Path = tmp_path_factory.mktemp("peers")
    with Servers(folder, ANYWHERE, fsync=False, source=SOURCE) as servers:
        cores = Cores(ANYWHERE, ANYWHERE, ANYWHERE, ANYWHERE)
        yield Bench(SMOKE, cores, servers, Random(1), folder, lambda line: None)


@pytest.mark.parametrize(
    "kind",
    [Tidegate, SendText, Notify, PubSub, SocketIO, NATS, Centrifugo],
    ids=lambda kind: kind.name,
)
def test_a_peer_delivers(bench: Bench, kind: PeerKind) -> None:
    name = kind.name  # type: ignore[attr-defined]
    reason = PACKAGED[name].lacking() if name in PACKAGED else None
    if reason is not None:
        lacking("peers", reason)
    with ExitStack() as stack:
        peer = kind(bench, stack)
        peer.load.open(LISTENERS)
        peer.send(1)
        peer.send(30)
        peer.load.reach(31 * LISTENERS)
        report = peer.load.report()
    assert report["deliveries"] == len(report.every_latency) == 31 * LISTENERS
    assert report["open"] == LISTENERS
    assert report["highest"] == report["lowest"] == 31
