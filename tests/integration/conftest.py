"""A running gateway with its relay, for the tests that do not break it: one for all of them."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest

from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
from gateway.tokens import sign
from publisher import Message, publish_many
from tests.processes import Process, Processes

SECRET = "a-secret-that-only-tests-know-of-0123456789"
API_KEY = "key-of-the-tests"
TENANT = "acme"
NAMESPACES = (
    '{"chat": {"publish": "anyone"}, "staff": {"subscribe": "authenticated"},'
    ' "secret": {"subscribe": "nobody"}, "fleeting": {"history_messages": 0},'
    ' "short": {"history_messages": 5}}'
)


@dataclass
class Stack:
    """One database, one Redis, a relay and gateways over them."""

    dsn: str
    redis: EmbeddedRedis
    processes: Processes

    @property
    def settings(self) -> dict[str, str]:
        return {
            "TIDEGATE_POSTGRES_DSN": self.dsn,
            "TIDEGATE_REDIS_URL": self.redis.url,
            "TIDEGATE_TOKEN_HMAC_SECRET": SECRET,
            "TIDEGATE_API_KEY": API_KEY,
            "TIDEGATE_ALLOW_ANONYMOUS": "true",
            "TIDEGATE_NAMESPACES": NAMESPACES,
            "TIDEGATE_LOG_FORMAT": "json",
        }

    def gateway(self, name: str = "gateway", *arguments: str, **settings: str) -> Process:
        return self.processes.start_gateway(name, *arguments, **{**self.settings, **settings})

    def relay(self, name: str = "relay") -> Process:
        return self.processes.start_relay(name, **self.settings)

    def publish(self, room: str, *payloads: object, tenant: str = TENANT) -> None:
        """One transaction for all."""
        with psycopg.connect(self.dsn) as connection:
            publish_many(connection, [Message(room, data, tenant=tenant) for data in payloads])


def token(
    user: str = "ann", tenant: str = TENANT, *, now: float, ttl_s: float | None = None
) -> str:
    return sign(SECRET, tenant, user, now=now, ttl_s=ttl_s)


@pytest.fixture
def room() -> str:
    """A room of the test's own."""
    return f"orders:{secrets.token_hex(5)}"


@pytest.fixture(scope="session")
def shared(
    postgres: EmbeddedPostgres,
    _template: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    """A stack that no test may break."""
    name = f"shared_{secrets.token_hex(6)}"
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {_template}")
    with EmbeddedRedis() as redis:
        processes = Processes(tmp_path_factory.mktemp("shared") / "processes")
        stack = Stack(postgres.dsn(name), redis, processes)
        try:
            stack.relay()
            stack.gateway()
            yield stack
        finally:
            processes.stop()
        processes.check_logs()


@pytest.fixture
def gateway(shared: Stack) -> Process:
    """The gateway of the shared stack."""
    return shared.processes.all["gateway"]


@pytest.fixture
def stack(migrated: str, redis: EmbeddedRedis, processes: Processes) -> Stack:
    """A stack of the test's own, with nothing started in it."""
    return Stack(migrated, redis, processes)
