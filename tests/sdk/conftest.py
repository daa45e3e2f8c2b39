"""Fixtures for clients of the stock SDKs.

- ``stack``: one relay and two gateways, shared by the tests of a module, which use rooms of
  their own.
- ``open_client``: makes a client of each SDK in turn, closed at the end of the test.
- ``room``: a room's name of this test alone.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack

import psycopg
import pytest
from psycopg import sql

from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
from outbox.migrations import migrate
from tests.processes import Processes
from tests.sdk import packages
from tests.sdk.client import Client, OpenClient, Tokens
from tests.sdk.door import Door
from tests.sdk.node_client import NodeProgram
from tests.sdk.python_client import PythonClient
from tests.sdk.stack import Stack


@pytest.fixture(scope="module")
def stack(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    migrate(postgres.dsn(name))
    with EmbeddedRedis() as redis:
        processes = Processes(tmp_path_factory.mktemp("sdk") / "processes")
        try:
            yield Stack(processes, postgres.dsn(name), redis.url)
        finally:
            processes.stop()
        processes.check_logs()


@pytest.fixture(scope="session")
def node(require: Callable[[str], str]) -> str:
    return packages.node(require)


@pytest.fixture(params=["javascript", "python"])
async def open_client(request: pytest.FixtureRequest) -> AsyncIterator[OpenClient]:
    async with AsyncExitStack() as ends:
        program: NodeProgram | None = None
        if request.param == "javascript":
            program = NodeProgram(request.getfixturevalue("node"))
            await ends.enter_async_context(program)

        async def opened(url: str, token: str = "", tokens: Tokens | None = None) -> Client:
            client: Client
            if program is None:
                client = PythonClient(url, token, tokens)
            else:
                client = await program.open(secrets.token_hex(4), url, token, tokens)
            ends.push_async_callback(client.close)
            return client

        yield opened


@pytest.fixture
async def door(stack: Stack) -> AsyncIterator[Door]:
    async with Door(stack.ports) as opened:
        yield opened


@pytest.fixture
def room() -> str:
    return f"orders:{secrets.token_hex(6)}"
