"""What the Redis URL may be, and that each form of one server leads to it."""

import asyncio
import re
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.embedded import EmbeddedRedis
from gateway.operate.status import read_status
from outbox.errors import OutboxError
from outbox.redis import client as redis_client
from outbox.redis.connect import check, connect
from outbox.redis.url import Login, RedisUrl, RedisUrlError, Tls, parse_redis_url
from tests.client import Client
from tests.integration.conftest import Stack, token
from tests.redis_tls import Certificate, self_signed

LOOPBACK = "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("redis://host", RedisUrl("server", (("host", 6379),))),
        (
            "redis://ann:p%40%2F@host:1234/5",
            RedisUrl("server", (("host", 1234),), db=5, login=Login("ann", "p@/")),
        ),
        ("redis://:pw@[::1]:7/", RedisUrl("server", (("::1", 7),), login=Login("", "pw"))),
        ("redis://host?db=3", RedisUrl("server", (("host", 6379),), db=3)),
        ("rediss://host", RedisUrl("server", (("host", 6379),), tls=Tls())),
        (
            "rediss://host?ssl_ca_certs=/ca.pem&ssl_check_hostname=no",
            RedisUrl("server", (("host", 6379),), tls=Tls("/ca.pem", check_hostname=False)),
        ),
        (
            "rediss://host?ssl_cert_reqs=none",
            RedisUrl(
                "server", (("host", 6379),), tls=Tls(check_hostname=False, verification="none")
            ),
        ),
        (
            "unix://:pw@/run/redis.sock?db=2",
            RedisUrl("server", (), "/run/redis.sock", 2, Login("", "pw")),
        ),
        (
            "redis+sentinel://u:pw@a,b:1/main/4?sentinel_username=s&sentinel_password=t&tls=true",
            RedisUrl(
                "sentinel",
                (("a", 26379), ("b", 1)),
                db=4,
                login=Login("u", "pw"),
                tls=Tls(),
                master="main",
                sentinel_login=Login("s", "t"),
            ),
        ),
        (
            "redis+cluster://:pw@a:1,[fe80::2]:2,c",
            RedisUrl("cluster", (("a", 1), ("fe80::2", 2), ("c", 6379)), login=Login("", "pw")),
        ),
    ],
)
def test_a_url_is_taken_apart(text: str, parts: RedisUrl) -> None:
    assert parse_redis_url(text) == parts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be like redis://host:6379/0"),
        ("localhost:6379", "must be like redis://"),
        ("redis:host", "must be like redis://"),
        ("http://host", "must be like redis://"),
        ("redis://", "has no host"),
        ("redis://host:port", "a port that is not a number from 1 to 65535"),
        ("redis://host:0", "a port that is not a number from 1 to 65535"),
        ("redis://host:65536", "a port that is not a number from 1 to 65535"),
        ("redis://a,b", "several hosts"),
        ("redis://host/zero", "a database that is not a number"),
        ("redis://host?db=x", "a database that is not a number"),
        ("redis://host?speed=high", "the option speed, which is not one of db"),
        ("redis://host?socket_timeout=1", "the option socket_timeout"),
        ("redis://host?db", "not like ?name=value"),
        ("redis://host#1", "percent-encode it"),
        ("redis://[::1", "malformed"),
        ("redis://[::1]x", "an IPv6 address"),
        ("unix://relative/path", "whole path"),
        ("rediss://host?ssl_cert_reqs=maybe", "required, optional, none"),
        ("rediss://host?ssl_check_hostname=maybe", "neither true nor false"),
        ("redis+sentinel://host", "no name of a master"),
        ("redis+sentinel://host/", "no name of a master"),
        ("redis+sentinel://host,/main", "no host"),
        ("redis+cluster://host/1", "only the one"),
        ("redis+cluster://host?db=1", "the option db"),
    ],
)
def test_a_malformed_url_is_told_in_one_line(text: str, said: str) -> None:
    with pytest.raises(RedisUrlError) as caught:
        parse_redis_url(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(OutboxError, match="the Redis URL"):
        connect(text)


@pytest.mark.parametrize(
    "password", ["ab/zq", "ab?zq=1", "ab#zq", "ab:zq", "ab@zq", "zq", "1?zq=2", "%zq", "[zq"]
)
@pytest.mark.parametrize("form", ["redis", "rediss", "unix", "redis+sentinel", "redis+cluster"])
def test_no_part_of_a_password_is_told(form: str, password: str) -> None:
    with pytest.raises(RedisUrlError) as caught:
        parse_redis_url(f"{form}://ann:{password}@host:99999/nothing?wrong=1")
    assert "zq" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "zq" not in repr(parse_redis_url("redis://:zq@host"))


async def serves(client: redis_client.Client) -> bool:
    try:
        await check(client)
        return await client.pipelined([("SET", "a", 1), ("GET", "a")]) == [True, b"1"]
    finally:
        await client.aclose()


async def test_over_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with EmbeddedRedis(settings={"unixsocket": str(path)}, password="secret"):
        assert await serves(connect(f"unix://:secret@{path}?db=3"))


@asynccontextmanager
async def tls_in_front_of(port: int, certificate: Certificate) -> AsyncIterator[int]:
    """A port that speaks TLS and passes on to another: not every server was built with TLS."""

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(LOOPBACK, port)
        await asyncio.gather(
            passed_on(reader, inner_writer),
            passed_on(inner_reader, writer),
            return_exceptions=True,
        )

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.public, certificate.private)
    door = await asyncio.start_server(serve, LOOPBACK, 0, ssl=context)
    async with door:
        yield door.sockets[0].getsockname()[1]


async def test_over_tls(redis: EmbeddedRedis, tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    password = urlsplit(redis.url).password
    async with tls_in_front_of(redis.port, certificate) as port:
        address = f"rediss://:{password}@{LOOPBACK}:{port}/1"
        assert await serves(connect(f"{address}?{certificate.options}"))
        assert await serves(connect(f"{address}?ssl_cert_reqs=none"))
        with pytest.raises(RedisConnectionError, match="certificate verify failed"):
            await serves(connect(address))


async def test_the_rights_that_the_page_names_suffice(stack: Stack, room: str) -> None:
    page = (Path(__file__).parents[2] / "docs/operate/redis.md").read_text()
    (rights,) = re.findall(r"^ACL SETUSER tidegate on >password (.+)$", page, re.M)
    admin = connect(stack.redis.url)
    try:
        await admin.execute_command(
            "ACL", "SETUSER", "tidegate", "on", ">password", *rights.split()
        )
        stack.redis = Restricted(stack.redis.port)  # type: ignore[assignment]
        stack.relay()
        gateway = await asyncio.to_thread(stack.gateway)
        async with Client(gateway.websocket_url) as client:
            await client.greet(token(now=time.time()))
            await client.subscribe(room)
            stack.publish(room, 1, 2)
            await client.until_offset(room, 2)
            await client.subscribe(f"{room}-another")
            stack.publish(f"{room}-another", 3)
            await client.until_offset(f"{room}-another", 1)
        # Blocked reads were ended.
        unblocked = (await admin.info("commandstats"))["cmdstat_client|unblock"]
        assert unblocked["calls"] > 0
        assert unblocked["rejected_calls"] == unblocked["failed_calls"] == 0
        assert (await read_status(stack.dsn, stack.redis.url)).problems == ()
        refused = await admin.execute_command("ACL", "LOG")
        assert refused == []
    finally:
        await admin.aclose()


class Restricted:
    """The server as the restricted user reaches it."""

    def __init__(self, port: int) -> None:
        self.url = f"redis://tidegate:password@{LOOPBACK}:{port}/0"
