"""TLS as the servers themselves speak it: one server, Sentinel, a cluster. Real commands."""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.embedded import EmbeddedRedis
from gateway.embedded.process import LOOPBACK, free_port
from tests.integration.conftest import TENANT, Stack, token
from tests.probe import until
from tests.processes import Process, Processes
from tests.redis_setups import Clustered, Replicated, order
from tests.redis_tls import Certificate, self_signed, servers_with_tls
from tests.traffic import Traffic

PASSWORD = "password-of-the-server"


@pytest.fixture(autouse=True)
def servers(tmp_path: Path) -> Iterator[None]:
    folder = tmp_path / "program"
    folder.mkdir()
    with servers_with_tls(folder):
        yield


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return self_signed(tmp_path / "certificate")


@pytest.fixture
def stranger(tmp_path: Path) -> Certificate:
    """Another authority."""
    return self_signed(tmp_path / "stranger")


class Server:
    """One server; its plain port is for its administration."""

    def __init__(self, certificate: Certificate, **settings: str) -> None:
        self._port = free_port()
        self._certificate = certificate
        tls = {"tls-port": str(self._port), **certificate.settings}
        self.redis = EmbeddedRedis(settings=tls | settings, password=PASSWORD)

    def url_with(self, options: str) -> str:
        return f"rediss://:{PASSWORD}@{LOOPBACK}:{self._port}/0?{options}"

    @property
    def url(self) -> str:
        return self.url_with(self._certificate.options)


async def run(stack: Stack, *arguments: str, code: int = 0, **settings: str) -> str:
    name = f"{arguments[0]}-{secrets.token_hex(3)}"
    process = stack.processes.start(name, *arguments, **(stack.settings | settings))
    assert await asyncio.to_thread(process.wait, 60) == code, process.text()
    return process.text()


async def started(stack: Stack, count: int) -> list[Process]:
    """A relay and gateways."""
    stack.relay()
    names = [f"gateway-{number}" for number in range(count)]
    return await asyncio.gather(*(asyncio.to_thread(stack.gateway, name) for name in names))


def traffic(stack: Stack, gateways: list[Process]) -> Traffic:
    rooms = [f"orders:{secrets.token_hex(4)}" for _ in range(8)]
    return Traffic(stack.dsn, gateways, rooms, token(now=time.time()))


async def trusts_only_the_right_authority(stack: Stack, wrong: str) -> None:
    """What a command says that is told to trust another one."""
    said = await run(stack, "verify", code=1, TIDEGATE_REDIS_URL=wrong)
    (line,) = said.strip().splitlines()
    assert line.startswith("tidegate: Redis: ")
    assert "ssl_ca_certs" in line
    assert PASSWORD not in line


async def test_one_server(
    migrated: str, processes: Processes, certificate: Certificate, stranger: Certificate
) -> None:
    server = Server(certificate)
    with server.redis:
        stack = Stack(migrated, server, processes)  # type: ignore[arg-type]
        gateways = await started(stack, 1)
        async with traffic(stack, gateways) as flowing:
            await flowing.more(50)
            await asyncio.to_thread(server.redis.restart)
            await flowing.more(50)
            await flowing.settle()
        assert "all is well" in await run(stack, "verify")
        await run(stack, "status")
        room = next(iter(flowing.published))
        assert "Redis: the content is gone" in await run(stack, "redact", TENANT, room, "1")
        await trusts_only_the_right_authority(stack, server.url_with(stranger.options))
        await trusts_only_the_right_authority(stack, server.url_with(""))
        processes.stop()


async def test_a_server_that_asks_for_the_clients_certificate(
    migrated: str, processes: Processes, certificate: Certificate
) -> None:
    server = Server(certificate, **{"tls-auth-clients": "yes"})
    own = f"ssl_certfile={certificate.public}&ssl_keyfile={certificate.private}"
    with server.redis:
        stack = Stack(migrated, server, processes)  # type: ignore[arg-type]
        with_own = server.url_with(f"{certificate.options}&{own}")
        said = await run(stack, "verify", code=1, TIDEGATE_REDIS_URL=with_own)
        assert "Redis has epoch (none)" in said
        said = await run(stack, "verify", code=1)
        (line,) = said.strip().splitlines()
        assert line.startswith("tidegate: Redis: ")
        assert "ssl_certfile" in line


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("rediss://:{password}@127.0.0.1:{plain}", "rediss"),
        ("rediss://:{password}@localhost:{tls}?{ca}", "ssl_check_hostname"),
        ("rediss://:{password}@127.0.0.1:{tls}?ssl_ca_certs=/nowhere/ca.pem", "ssl_ca_certs"),
        ("rediss://:{password}@127.0.0.1:{tls}?ssl_ca_certs={key}", "ssl_ca_certs"),
        ("rediss://:{password}@127.0.0.1:{tls}?ssl_certfile=/nowhere/a.pem", "ssl_certfile"),
    ],
)
async def test_what_is_wrong_is_told_in_one_line(
    migrated: str, processes: Processes, certificate: Certificate, url: str, named: str
) -> None:
    server = Server(certificate)
    with server.redis:
        stack = Stack(migrated, server, processes)  # type: ignore[arg-type]
        parts = {"plain": server.redis.port, "tls": server._port, "key": certificate.private}
        wrong = url.format(password=PASSWORD, ca=certificate.options, **parts)
        said = await run(stack, "verify", code=1, TIDEGATE_REDIS_URL=wrong)
        (line,) = said.strip().splitlines()
        assert line.startswith("tidegate: Redis: ")
        assert named in line
        assert PASSWORD not in line


async def test_sentinel_with_a_failover(
    migrated: str,
    processes: Processes,
    tmp_path: Path,
    certificate: Certificate,
    stranger: Certificate,
) -> None:
    with Replicated(tmp_path, certificate) as replicated:
        stack = Stack(migrated, replicated, processes)  # type: ignore[arg-type]
        gateways = await started(stack, 2)
        async with traffic(stack, gateways) as flowing:
            await flowing.more(50)
            master, replica = replicated.server("master"), replicated.server("slave")
            successor = replicated.named_port(replica)
            os.kill(master.pid, signal.SIGKILL)
            await until_true(lambda: replicated.named() == {successor})
            await flowing.more(100)
            await flowing.settle()
        assert "all is well" in await run(stack, "verify")
        await trusts_only_the_right_authority(stack, replicated.url_with(stranger))
        processes.stop()


async def test_a_cluster_with_a_failover(
    migrated: str, processes: Processes, certificate: Certificate, stranger: Certificate
) -> None:
    with Clustered(certificate) as cluster:
        stack = Stack(migrated, cluster, processes)  # type: ignore[arg-type]
        gateways = await started(stack, 2)
        async with traffic(stack, gateways) as flowing:
            await flowing.more(50)
            victim = cluster.masters()[0]
            successor = cluster.replica_of(victim)
            victim.kill()
            await until_true(lambda: order(successor, "ROLE")[0] == "master")
            await flowing.more(100)
            await flowing.settle()
        assert "all is well" in await run(stack, "verify")
        await trusts_only_the_right_authority(stack, cluster.url_with(stranger))
        processes.stop()


async def until_true(condition: Any) -> None:
    await until(lambda: asyncio.to_thread(condition), "failover", timeout_s=30)
