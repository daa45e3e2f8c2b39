"""Redis beyond one server, on loopback: a cluster of six nodes, a master with three sentinels."""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from gateway.embedded import EmbeddedRedis
from gateway.embedded.process import LOOPBACK, free_port, start_child, stop_child
from gateway.embedded.redis import find_program
from tests.redis_tls import Certificate

PASSWORD = "password-of-all-nodes"
SENTINEL_PASSWORD = "password-of-the-sentinels"
MASTER = "tidegate-master"
NODE_TIMEOUT_MS = 1_000
"""After which silence a node counts as failed: short, for the tests' sake."""
SLOTS = 16_384
NO_RETRY = Retry(NoBackoff(), 0)


def until(ready: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """Polls until ``ready`` gives something true, which is returned; errors of Redis count as
    not yet."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        seen: Any = None
        try:
            if seen := ready():
                return seen
        except redis.RedisError as error:
            seen = error
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what} ({seen!r})"
        time.sleep(0.02)


def admin(server: EmbeddedRedis) -> Any:
    """A client of one server, for orders to it."""
    return redis.Redis(
        host=LOOPBACK,
        port=server.port,
        password=PASSWORD,
        decode_responses=True,
        socket_timeout=5,
        retry=NO_RETRY,
    )


def order(server: EmbeddedRedis, *command: Any) -> Any:
    """Sends one command to one server."""
    client = admin(server)
    try:
        return client.execute_command(*command)
    finally:
        client.close()


def cut_replication(replica: EmbeddedRedis) -> None:
    """From now on the replica has no link to its master and lags behind, without knowing why."""
    order(replica, "CONFIG", "SET", "masterauth", "wrong")
    order(replica, "CLIENT", "KILL", "TYPE", "master")
    until(
        lambda: admin_info(replica, "replication")["master_link_status"] == "down",
        "the replica is cut off",
    )


def mend_replication(replica: EmbeddedRedis) -> None:
    order(replica, "CONFIG", "SET", "masterauth", PASSWORD)


def admin_info(server: EmbeddedRedis, section: str) -> dict[str, Any]:
    client = admin(server)
    try:
        return cast(dict[str, Any], client.info(section))
    finally:
        client.close()


def readers(server: EmbeddedRedis) -> int:
    """Connections to it that are in a blocking read."""
    client = admin(server)
    try:
        return sum(one["cmd"] == "xreadgroup" for one in client.client_list())
    finally:
        client.close()


def tls_port(server: EmbeddedRedis) -> int:
    """Where it speaks TLS; 0: nowhere."""
    return int(order(server, "CONFIG GET", "tls-port")["tls-port"])


class Replicated:
    """A master and its replica, watched by three sentinels; with a certificate all of them speak
    TLS with one another and, at the addresses that they name, with clients."""

    def __init__(self, folder: Path, certificate: Certificate | None = None) -> None:
        self._folder = folder
        self._certificate = certificate
        self._stack = ExitStack()
        self.servers: list[EmbeddedRedis] = []
        self.sentinel_ports: list[int] = []
        self.sentinel_tls_ports: list[int] = []

    def __enter__(self) -> Self:
        settings = {"masterauth": PASSWORD, "repl-diskless-sync-delay": "0"}
        master = EmbeddedRedis(settings=settings | self._tls(), password=PASSWORD)
        self.servers.append(self._stack.enter_context(master))
        settings["replicaof"] = f"{LOOPBACK} {self.named_port(master)}"
        replica = EmbeddedRedis(settings=settings | self._tls(), password=PASSWORD)
        self.servers.append(self._stack.enter_context(replica))
        until(lambda: admin_info(replica, "replication")["master_link_status"] == "up", "a replica")
        for number in range(3):
            self._stack.enter_context(self._sentinel(number, self.named_port(master)))
        for port in self.sentinel_ports:
            until(lambda port=port: self._knows_all(port), "sentinels know one another")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _tls(self) -> dict[str, str]:
        if self._certificate is None:
            return {}
        return {"tls-port": str(free_port()), **self._certificate.settings}

    def named_port(self, server: EmbeddedRedis) -> int:
        """Under which port others know it."""
        return server.port if self._certificate is None else tls_port(server)

    @property
    def url(self) -> str:
        return self.url_with(self._certificate)

    def url_with(self, trusted: Certificate | None) -> str:
        """The URL with another certificate to trust."""
        ports = self.sentinel_ports if self._certificate is None else self.sentinel_tls_ports
        hosts = ",".join(f"{LOOPBACK}:{port}" for port in ports)
        tls = "" if trusted is None else f"&tls=true&{trusted.options}"
        return (
            f"redis+sentinel://:{PASSWORD}@{hosts}/{MASTER}/0"
            f"?sentinel_password={SENTINEL_PASSWORD}{tls}"
        )

    def server(self, role: str) -> EmbeddedRedis:
        """The server that calls itself ``master`` or ``slave``."""
        (found,) = [s for s in self.servers if s.alive and order(s, "ROLE")[0] == role]
        return found

    def named(self) -> set[int]:
        """The ports of the masters that the sentinels name: one, if they agree."""
        ports = set()
        for sentinel in self.sentinel_ports:
            client = self._asking(sentinel)
            answer = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)
            client.close()
            ports.add(int(answer[1]))
        return ports

    @contextmanager
    def _sentinel(self, number: int, master_port: int) -> Iterator[None]:
        port = free_port()
        self.sentinel_ports.append(port)
        folder = self._folder / f"sentinel-{number}"
        folder.mkdir(parents=True)
        lines = [
            f"port {port}",
            f"bind {LOOPBACK}",
            f"dir {folder}",
            f"requirepass {SENTINEL_PASSWORD}",
            f"sentinel sentinel-pass {SENTINEL_PASSWORD}",
            f"sentinel monitor {MASTER} {LOOPBACK} {master_port} 2",
            f"sentinel auth-pass {MASTER} {PASSWORD}",
            f"sentinel down-after-milliseconds {MASTER} {NODE_TIMEOUT_MS}",
            f"sentinel failover-timeout {MASTER} 6000",
        ]
        tls = self._tls()
        lines += [f"{name} {value}" for name, value in tls.items()]
        self.sentinel_tls_ports.append(int(tls.get("tls-port", 0)))
        configuration = folder / "sentinel.conf"
        configuration.write_text("\n".join(lines) + "\n")
        with (folder / "log").open("wb") as log:
            process: subprocess.Popen[bytes] = start_child(
                [str(find_program().path), str(configuration), "--sentinel"], output=log
            )
        try:
            yield
        finally:
            stop_child(process, [])

    def _knows_all(self, port: int) -> bool:
        client = self._asking(port)
        try:
            answer = client.execute_command("SENTINEL", "MASTER", MASTER)
        finally:
            client.close()
        if isinstance(answer, list):
            answer = dict(zip(answer[::2], answer[1::2], strict=True))
        return int(answer["num-other-sentinels"]) == 2 and int(answer["num-slaves"]) == 1

    def _asking(self, port: int) -> Any:
        return redis.Redis(
            host=LOOPBACK,
            port=port,
            password=SENTINEL_PASSWORD,
            decode_responses=True,
            socket_timeout=2,
            retry=NO_RETRY,
        )


class Clustered:
    """Three masters with a replica each; with a certificate the nodes speak TLS with one another
    and, at the addresses that they name to it, with a client that does."""

    def __init__(self, certificate: Certificate | None = None) -> None:
        self._certificate = certificate
        self._stack = ExitStack()
        self.servers: list[EmbeddedRedis] = []
        self._ids: dict[str, EmbeddedRedis] = {}

    def __enter__(self) -> Self:
        for _ in range(6):
            settings = {
                "cluster-enabled": "yes",
                "cluster-port": str(free_port()),
                "cluster-node-timeout": str(NODE_TIMEOUT_MS),
                "cluster-replica-validity-factor": "0",
                "cluster-require-full-coverage": "no",
                "masterauth": PASSWORD,
                "repl-diskless-sync-delay": "0",
                "maxmemory": "0",
            }
            if self._certificate is not None:
                settings |= {"tls-port": str(free_port()), "tls-cluster": "yes"}
                settings |= self._certificate.settings
            server = EmbeddedRedis(settings=settings, password=PASSWORD)
            self.servers.append(self._stack.enter_context(server))
        self._form()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _form(self) -> None:
        masters, replicas = self.servers[:3], self.servers[3:]
        bounds = [0, SLOTS // 3, 2 * SLOTS // 3, SLOTS]
        for number, server in enumerate(self.servers):
            order(server, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for master, first, end in zip(masters, bounds, bounds[1:], strict=False):
            order(master, "CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for server in self.servers:
            self._ids[order(server, "CLUSTER", "MYID")] = server
            bus_port = int(order(server, "CONFIG GET", "cluster-port")["cluster-port"])
            port = self._named_port(server)
            order(masters[0], "CLUSTER", "MEET", LOOPBACK, port, bus_port)
        for server in self.servers:
            until(lambda server=server: len(self._nodes(server)) == 6, "all nodes have met")
        for master, replica in zip(masters, replicas, strict=True):
            order(replica, "CLUSTER", "REPLICATE", self.id_of(master))
        self.until_healthy()

    def until_healthy(self) -> None:
        """Waits until every node sees a complete cluster and every replica follows its master."""
        until(lambda: all(self._is_healthy(server) for server in self.servers), "a whole cluster")

    def _is_healthy(self, server: EmbeddedRedis) -> bool:
        if order(server, "CLUSTER INFO")["cluster_state"] != "ok":
            return False
        nodes = self._nodes(server)
        if len(nodes) != 6 or sum("master" in node["flags"] for node in nodes.values()) != 3:
            return False
        if any("fail" in node["flags"] for node in nodes.values()):
            return False
        replication = admin_info(server, "replication")
        return bool(replication["role"] == "master" or replication["master_link_status"] == "up")

    @staticmethod
    def _nodes(server: EmbeddedRedis) -> dict[str, Any]:
        return cast(dict[str, Any], order(server, "CLUSTER NODES"))

    def _named_port(self, server: EmbeddedRedis) -> int:
        return server.port if self._certificate is None else tls_port(server)

    @property
    def url(self) -> str:
        return self.url_with(self._certificate)

    def url_with(self, trusted: Certificate | None) -> str:
        """The URL with another certificate to trust."""
        hosts = ",".join(f"{LOOPBACK}:{self._named_port(server)}" for server in self.servers[1:4])
        tls = "" if trusted is None else f"?tls=true&{trusted.options}"
        return f"redis+cluster://:{PASSWORD}@{hosts}{tls}"

    def id_of(self, server: EmbeddedRedis) -> str:
        (found,) = [id for id, one in self._ids.items() if one is server]
        return found

    def masters(self) -> list[EmbeddedRedis]:
        return [s for s in self.servers if s.alive and order(s, "ROLE")[0] == "master"]

    def owner(self, key: str) -> EmbeddedRedis:
        """The master that serves the key's slot, as the first living node sees it."""
        seen = next(server for server in self.servers if server.alive)
        slot = key_slot(key.encode())
        for first, last, (_, _, id, *_), *_ in self._ranges(seen):
            if first <= slot <= last:
                return self._ids[id]
        raise AssertionError(f"nobody serves {key}")

    @staticmethod
    def _ranges(server: EmbeddedRedis) -> Sequence[Any]:
        # In two words, so that redis-py does not turn the answer into something else.
        return cast(Sequence[Any], order(server, "CLUSTER", "SLOTS"))

    def replica_of(self, master: EmbeddedRedis) -> EmbeddedRedis:
        for server in self.servers:
            if server.alive:
                role = order(server, "ROLE")
                if role[0] == "slave" and int(role[2]) == self._named_port(master):
                    return server
        raise AssertionError("it has no replica")


class Migration:
    """The move of a key's slot to another node, step by step."""

    def __init__(self, cluster: Clustered, key: str, target: EmbeddedRedis) -> None:
        self._cluster = cluster
        self._slot = key_slot(key.encode())
        self._source = cluster.owner(key)
        self._target = target

    def open(self) -> None:
        source, target = self._cluster.id_of(self._source), self._cluster.id_of(self._target)
        order(self._target, "CLUSTER", "SETSLOT", self._slot, "IMPORTING", source)
        order(self._source, "CLUSTER", "SETSLOT", self._slot, "MIGRATING", target)

    def move(self, only: Callable[[str], bool] = lambda key: True) -> int:
        """Moves the keys for which ``only`` holds; how many."""
        keys = order(self._source, "CLUSTER", "GETKEYSINSLOT", self._slot, 10_000)
        moved = [key for key in keys if only(key)]
        for key in moved:
            order(
                self._source,
                *("MIGRATE", LOOPBACK, self._target.port, key, 0, 5_000, "AUTH", PASSWORD),
            )
        return len(moved)

    def at_once(self) -> None:
        """The whole move in one, by the servers themselves. Raises redis.ResponseError if they
        cannot: Valkey can from version 9 on."""
        target = self._cluster.id_of(self._target)
        order(
            self._source,
            *("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", self._slot, self._slot, "NODE", target),
        )

    def close(self) -> None:
        """Moves what is left, then has all masters know the new owner."""
        while self.move():
            pass
        target = self._cluster.id_of(self._target)
        order(self._target, "CLUSTER", "SETSLOT", self._slot, "NODE", target)
        for master in self._cluster.masters():
            order(master, "CLUSTER", "SETSLOT", self._slot, "NODE", target)
