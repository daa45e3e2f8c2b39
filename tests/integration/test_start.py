"""Everything starts at once, in any order: what is waited for, and what ends a start."""

import asyncio
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psycopg
import pytest
import redis as redis_client
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from websockets.exceptions import InvalidStatus

from gateway.dev import Stack as DevStack
from gateway.dev import StackOptions
from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
from gateway.embedded.process import free_port
from outbox.errors import AccessRefused
from outbox.layout import SCHEMA_VERSION
from outbox.migrations import migrate
from tests.client import Client
from tests.integration.conftest import API_KEY, Stack, token
from tests.probe import until
from tests.processes import Process, Processes

NOWHERE_DSN = "postgresql://app:hunter2@127.0.0.1:1/shop"
NOWHERE_URL = "redis://:hunter2@127.0.0.1:1/0"
SCHEMA = "waiting for the schema (tidegate migrate)"
PROMPT_S = 5.0
NEWER = """
import sys
import outbox.layout
outbox.layout.OLDEST_SCHEMA = outbox.layout.SCHEMA_VERSION = {version}
outbox.layout.version_problem.__defaults__ = ({version},)
from gateway.__main__ import main
sys.argv[0] = "tidegate"
sys.exit(main())
"""
"""This code as it would be if it needed a schema of that version."""


def start_gateway(stack: Stack, *arguments: str, name: str = "gateway", **env: str) -> Process:
    """Starts a gateway and waits for nothing."""
    port = free_port()
    gateway = stack.processes.start(
        name, "gateway", "--port", str(port), *arguments, **{**stack.settings, **env}
    )
    gateway.port = port
    return gateway


async def reason(gateway: Process) -> str | None:
    """Why ``/readyz`` says that it is not ready; None while nothing listens."""
    assert gateway.returncode is None, gateway.text()
    try:
        async with httpx.AsyncClient() as http:
            answer = await http.get(f"{gateway.url}/readyz")
            assert (await http.get(f"{gateway.url}/healthz")).status_code == 200
    except httpx.TransportError:
        return None
    state = answer.json()
    assert (answer.status_code == 200) == state["ready"]
    return state.get("reason", "none")


async def until_reason(gateway: Process, wanted: str) -> None:
    async def given() -> bool:
        return await reason(gateway) == wanted

    await until(given, f"/readyz says {wanted!r}")


async def turns_clients_away(gateway: Process) -> None:
    with pytest.raises(InvalidStatus) as caught:
        async with Client(gateway.websocket_url):
            pass
    assert caught.value.response.status_code == 503
    async with httpx.AsyncClient() as http:
        answer = await http.post(
            f"{gateway.url}/api/publish",
            json={"channel": "orders:1", "data": 1},
            headers={"X-API-Key": API_KEY},
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, 100)


async def delivers(stack: Stack, gateway: Process) -> None:
    """A client connects and is given what is published from here on."""
    await asyncio.to_thread(gateway.wait_ready)
    room = f"orders:{secrets.token_hex(5)}"
    async with Client(gateway.websocket_url) as client:
        await client.greet(token(now=time.time()))
        await client.subscribe(room)
        await asyncio.to_thread(stack.publish, room, 1, 2)
        await client.until_offset(room, 2)


def warnings(process: Process, text: str) -> int:
    return len(re.findall(rf'"event": "{re.escape(text)}"', process.text()))


@pytest.fixture
def servers() -> Iterator[tuple[EmbeddedPostgres, EmbeddedRedis]]:
    """Both, for tests that take them away."""
    with EmbeddedPostgres() as postgres, EmbeddedRedis() as redis:
        migrate(postgres.dsn())
        yield postgres, redis


@pytest.mark.parametrize(
    ("missing", "workers"),
    [("Postgres", 1), ("Redis", 1), ("Postgres and Redis", 1), ("Postgres and Redis", 2)],
)
async def test_stores_may_come_after_those_who_need_them(
    servers: tuple[EmbeddedPostgres, EmbeddedRedis],
    processes: Processes,
    missing: str,
    workers: int,
) -> None:
    postgres, redis = servers
    stack = Stack(postgres.dsn(), redis, processes)
    absent = [s for s in servers if type(s).__name__.removeprefix("Embedded") in missing]
    for server in absent:
        await asyncio.to_thread(server.kill)
    gateway = start_gateway(stack, "--workers", str(workers))
    relay = stack.relay()
    await until_reason(gateway, f"waiting for {missing}")
    await turns_clients_away(gateway)
    for server in absent:
        name = type(server).__name__.removeprefix("Embedded").lower()
        await asyncio.to_thread(relay.wait_log, f"{name}: trouble")
    for store in missing.split(" and "):
        await until(
            lambda store=store: warnings(gateway, f"waiting for {store}") >= workers,  # type: ignore[misc]
            "all workers have said what they wait for",
        )
    for server in absent:
        await asyncio.to_thread(server.restart)
    await until(lambda: warnings(gateway, "gateway ready") == workers, "all workers are ready")
    await delivers(stack, gateway)
    for store in missing.split(" and "):
        # One for each cause: out of reach, and perhaps "starting up".
        assert warnings(gateway, f"waiting for {store}") <= 3 * workers
    for process in (gateway, relay):
        assert process.returncode is None
        assert conninfo_to_dict(stack.dsn)["password"] not in process.text()
        process.signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0


async def test_a_schema_that_is_not_there_yet_is_waited_for(
    database: str, redis: EmbeddedRedis, processes: Processes
) -> None:
    stack = Stack(database, redis, processes)
    gateway = start_gateway(stack)
    relay = stack.relay()
    await until_reason(gateway, SCHEMA)
    await turns_clients_away(gateway)
    for process in (gateway, relay):
        await asyncio.to_thread(process.wait_log, "has no schema .* run `tidegate migrate`")
    await asyncio.to_thread(migrate, database)
    await delivers(stack, gateway)
    assert warnings(gateway, SCHEMA) == 1


async def test_a_schema_that_is_too_old_is_waited_for(stack: Stack, processes: Processes) -> None:
    newer = NEWER.format(version=SCHEMA_VERSION + 1)
    port = free_port()
    gateway = processes.start_python(
        "gateway", "-c", newer, "gateway", "--port", str(port), **stack.settings
    )
    gateway.port = port
    relay = processes.start_python("relay", "-c", newer, "relay", **stack.settings)
    await until_reason(gateway, SCHEMA)
    await asyncio.to_thread(
        relay.wait_log, f"version {SCHEMA_VERSION}, needed is {SCHEMA_VERSION + 1}: run `tidegate"
    )
    with psycopg.connect(stack.dsn) as connection:
        connection.execute("UPDATE tidegate.meta SET schema_version = schema_version + 1")
    await delivers(stack, gateway)


async def test_a_redis_that_loads_its_data_is_waited_for(
    migrated: str, processes: Processes
) -> None:
    settings = {
        "enable-debug-command": "yes",
        # So that it answers while it loads.
        "loading-process-events-interval-bytes": "1024",
    }
    with EmbeddedRedis(settings=settings) as redis:
        with redis_client.Redis.from_url(redis.url) as connection:
            for number in range(400):
                connection.set(f"filler:{number}", b"x" * 4_096)
            connection.save()
        redis.kill()
        stack = Stack(migrated, redis, processes)
        gateway = start_gateway(stack)
        relay = stack.relay()
        await until_reason(gateway, "waiting for Redis")
        redis._settings["key-load-delay"] = "50000"
        loading = asyncio.create_task(asyncio.to_thread(redis.restart))
        await asyncio.to_thread(gateway.wait_log, "loading the dataset")
        assert await reason(gateway) == "waiting for Redis"
        with redis_client.Redis.from_url(redis.url) as connection:
            connection.config_set("key-load-delay", "0")
        await loading
        await delivers(stack, gateway)
        assert relay.returncode is None


# SIGTERM while it waits


@asynccontextmanager
async def silent_server() -> AsyncIterator[int]:
    """The port of one that lets everybody in and says nothing."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        yield silent.getsockname()[1]


async def ends_promptly(process: Process) -> None:
    began_s = time.monotonic()
    process.signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 30) == 0, process.text()
    assert time.monotonic() - began_s < PROMPT_S


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_gateway_that_waits_ends_at_once(stack: Stack, workers: int) -> None:
    gateway = start_gateway(
        stack,
        "--workers",
        str(workers),
        TIDEGATE_POSTGRES_DSN=NOWHERE_DSN,
        TIDEGATE_REDIS_URL=NOWHERE_URL,
    )
    await until_reason(gateway, "waiting for Postgres and Redis")
    await until(lambda: warnings(gateway, "waiting for Redis") == workers, "all workers wait")
    await ends_promptly(gateway)
    assert "hunter2" not in gateway.text()


async def test_servers_that_say_nothing_hold_up_neither_the_probes_nor_the_end(
    stack: Stack,
) -> None:
    async with silent_server() as port:
        nowhere = {
            "TIDEGATE_POSTGRES_DSN": f"postgresql://app@127.0.0.1:{port}/shop",
            "TIDEGATE_REDIS_URL": f"redis://127.0.0.1:{port}/0",
        }
        gateway = start_gateway(stack, **nowhere)
        await until_reason(gateway, "starting")
        await turns_clients_away(gateway)
        await ends_promptly(gateway)
        relay = stack.processes.start_relay(**nowhere)
        await asyncio.to_thread(relay.wait_log, "relay started")
        await ends_promptly(relay)


async def test_a_relay_that_waits_ends_at_once(processes: Processes) -> None:
    relay = processes.start_relay(TIDEGATE_POSTGRES_DSN=NOWHERE_DSN, TIDEGATE_REDIS_URL=NOWHERE_URL)
    await asyncio.to_thread(relay.wait_log, "redis: trouble")
    await asyncio.to_thread(relay.wait_log, "postgres: trouble")
    await ends_promptly(relay)


# What no waiting mends


@pytest.fixture
def role(migrated: str) -> Iterator[str]:
    """A role without rights, whose password is ``right``."""
    name = f"role_{secrets.token_hex(6)}"
    execute(migrated, "CREATE ROLE {} LOGIN PASSWORD 'right'", name)
    yield name
    execute(migrated, "DROP OWNED BY {}", name)
    execute(migrated, "DROP ROLE {}", name)


def execute(dsn: str, statement: str, name: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(sql.Identifier(name)))  # type: ignore[arg-type]


def wrong_password(stack: Stack, role: str) -> dict[str, str]:
    return {"TIDEGATE_POSTGRES_DSN": make_conninfo(stack.dsn, user=role, password="wrong")}


def no_database(stack: Stack, role: str) -> dict[str, str]:
    return {"TIDEGATE_POSTGRES_DSN": make_conninfo(stack.dsn, dbname="missing")}


def no_rights(stack: Stack, role: str) -> dict[str, str]:
    return {"TIDEGATE_POSTGRES_DSN": make_conninfo(stack.dsn, user=role, password="right")}


def newer_schema(stack: Stack, role: str) -> dict[str, str]:
    with psycopg.connect(stack.dsn) as connection:
        connection.execute("UPDATE tidegate.meta SET schema_version = 99, oldest_reader = 99")
    return {}


def wrong_redis_password(stack: Stack, role: str) -> dict[str, str]:
    # Told at once, whatever else is missing.
    url = re.sub(r"//:.*@", "//:wrong@", stack.redis.url)
    return {"TIDEGATE_REDIS_URL": url, "TIDEGATE_POSTGRES_DSN": NOWHERE_DSN}


def no_redis_password(stack: Stack, role: str) -> dict[str, str]:
    return {"TIDEGATE_REDIS_URL": re.sub(r"//:.*@", "//", stack.redis.url)}


def no_redis_database(stack: Stack, role: str) -> dict[str, str]:
    return {"TIDEGATE_REDIS_URL": stack.redis.url.removesuffix("/0") + "/99"}


def no_redis_rights(stack: Stack, role: str) -> dict[str, str]:
    with redis_client.Redis.from_url(stack.redis.url) as connection:
        connection.execute_command("ACL", "SETUSER", "poor", "on", ">poor", "~none:*", "+@all")
    return {"TIDEGATE_REDIS_URL": re.sub(r"//:.*@", "//poor:poor@", stack.redis.url)}


CHECK_DSN = ": check TIDEGATE_POSTGRES_DSN"
CHECK_URL = ": check TIDEGATE_REDIS_URL"
LINES: dict[Callable[[Stack, str], dict[str, str]], str] = {
    wrong_password: rf"Postgres: password authentication failed .*{CHECK_DSN}",
    no_database: rf'Postgres: database "missing" does not exist{CHECK_DSN}',
    no_rights: r"Postgres: permission denied .*: its owner must run `SELECT tidegate\.allow_.*`",
    newer_schema: r"the schema has version 99 .*: upgrade Tidegate",
    wrong_redis_password: rf"Redis: (invalid username-password pair|WRONGPASS).*{CHECK_URL}",
    no_redis_password: rf"Redis: Authentication required{CHECK_URL}",
    no_redis_database: rf"Redis: DB index is out of range{CHECK_URL}",
    no_redis_rights: rf"Redis: .* permissions .*{CHECK_URL}",
}


# What Postgres refuses a relay stands in test_admission.
RELAY = (newer_schema, wrong_redis_password, no_redis_password, no_redis_database, no_redis_rights)


@pytest.mark.parametrize(
    ("command", "mistake"),
    [
        *(pytest.param("gateway", mistake, id=f"gateway {mistake.__name__}") for mistake in LINES),
        *(pytest.param("relay", mistake, id=f"relay {mistake.__name__}") for mistake in RELAY),
        pytest.param("workers", wrong_password, id="workers wrong_password"),
        pytest.param("workers", wrong_redis_password, id="workers wrong_redis_password"),
    ],
)
async def test_what_no_waiting_mends_ends_the_start_with_one_line(
    stack: Stack, role: str, mistake: Callable[[Stack, str], dict[str, str]], command: str
) -> None:
    env = mistake(stack, role)
    if command == "relay":
        process = stack.processes.start_relay(**{**stack.settings, **env})
    else:
        arguments = ("--workers", "2") if command == "workers" else ()
        process = start_gateway(stack, *arguments, **env)
    assert await asyncio.to_thread(process.wait, 30) == 1, process.text()
    (line,) = re.findall(r"^tidegate: (.*)$", process.text(), re.MULTILINE)
    assert re.fullmatch(LINES[mistake], line), line


async def test_what_refuses_a_worker_later_does_not_end_the_others(stack: Stack, role: str) -> None:
    with psycopg.connect(stack.dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("SELECT tidegate.allow_gateway({})").format(sql.Literal(role)))
    stack.relay()
    gateway = start_gateway(stack, "--workers", "2", **no_rights(stack, role))
    await until(lambda: warnings(gateway, "gateway ready") == 2, "both workers are ready")
    execute(stack.dsn, "ALTER ROLE {} PASSWORD 'other'", role)
    kill_one_worker(gateway)
    await asyncio.to_thread(gateway.wait_log, "worker cannot start")
    assert re.search("password authentication failed", gateway.text())
    await delivers(stack, gateway)
    execute(stack.dsn, "ALTER ROLE {} PASSWORD 'right'", role)
    await until(lambda: warnings(gateway, "gateway ready") == 3, "it is replaced")
    await ends_promptly(gateway)


def kill_one_worker(gateway: Process) -> None:
    """The last of its children: multiprocessing starts a tracker of its own before the first."""
    children = Path(f"/proc/{gateway.pid}/task/{gateway.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)


@pytest.mark.parametrize(
    ("settings", "error", "line"),
    [
        (
            {"TIDEGATE_REDIS_URL": NOWHERE_URL},
            redis_client.ConnectionError,
            "Error 111 connecting to 127.0.0.1:1",
        ),
        ({"TIDEGATE_POSTGRES_DSN": NOWHERE_DSN}, psycopg.OperationalError, "Connection refused"),
    ],
)
def test_the_development_stack_does_not_wait_for_servers_that_it_is_given(
    stack: Stack, settings: dict[str, str], error: type[Exception], line: str
) -> None:
    options = StackOptions(folder=None, port=0, settings={**stack.settings, **settings})
    with pytest.raises(error, match=line):
        DevStack(options, lambda _: None).start()


def test_the_development_stack_tells_a_wrong_password(stack: Stack) -> None:
    options = StackOptions(
        folder=None, port=0, settings={**stack.settings, **no_redis_password(stack, "")}
    )
    with pytest.raises(AccessRefused, match="Redis: Authentication required: check TIDEGATE_REDIS"):
        DevStack(options, lambda _: None).start()
