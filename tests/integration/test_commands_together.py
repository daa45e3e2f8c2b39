"""relay, gateway, publish, tail and status as one installation."""

import asyncio
import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

from gateway.embedded import EmbeddedRedis
from gateway.jsontext import members
from gateway.operate.status import read_status
from gateway.tokens import sign
from tests.processes import Process, Processes

SECRET = "a secret of thirty-two bytes or more"
SHARDS = 16


class Installation:
    """A relay and a gateway, with the commands around them."""

    def __init__(self, processes: Processes, dsn: str, redis_url: str) -> None:
        self.processes = processes
        self.settings = {
            "TIDEGATE_POSTGRES_DSN": dsn,
            "TIDEGATE_REDIS_URL": redis_url,
            "TIDEGATE_TOKEN_HMAC_SECRET": SECRET,
            "TIDEGATE_LEASE_S": "1.5",
            "TIDEGATE_NAMESPACES": '{"closed": {"subscribe": "nobody"}}',
        }
        self.relay = processes.start_relay(**self.settings)
        self.gateway = processes.start_gateway(**self.settings)
        self._runs = 0
        self.relay.wait_for(
            lambda: not asyncio.run(read_status(dsn, redis_url)).problems,
            30,
            "a status without problems",
        )

    def run(self, *arguments: str, code: int = 0) -> str:
        """The output of one command."""
        process = self.start(*arguments)
        assert process.wait(30) == code, process.text()
        return process.text()

    def start(self, *arguments: str, **settings: str) -> Process:
        self._runs += 1
        name = f"{self._runs}-{arguments[0]}"
        return self.processes.start(name, *arguments, **{**self.settings, **settings})

    def publish(self, room: str, *values: int) -> None:
        for value in values:
            self.run("publish", "acme", room, f'{{"n": {value}}}')

    def tail(self, room: str, *arguments: str) -> Process:
        return self.start("tail", "acme", room, "--url", self.gateway.websocket_url, *arguments)

    def status(self, code: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self.run("status", "--json", code=code).split("\n}")[0] + "}"
        )
        return found


@pytest.fixture
def installation(processes: Processes, migrated: str, redis_url: str) -> Installation:
    return Installation(processes, migrated, redis_url)


def messages(process: Process) -> list[dict[str, Any]]:
    """What a tail has printed, without its words for the user."""
    lines = process.text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def printed(process: Process, count: int) -> Callable[[], bool]:
    return lambda: len(messages(process)) >= count


def test_what_is_published_is_tailed(installation: Installation) -> None:
    installation.publish("orders:1", 1, 2)
    tail = installation.tail("orders:1", "--since", "start", "--count", "4")
    tail.wait_for(printed(tail, 2), 20, "the first two messages")
    installation.publish("orders:1", 3, 4)
    assert tail.wait(20) == 0
    found = messages(tail)
    assert [(m["offset"], m["data"]) for m in found] == [(n, {"n": n}) for n in range(1, 5)]
    assert all(m["tags"]["txid"].isdigit() for m in found)
    assert "4 messages of orders:1, offsets 1…4; 0 missing, 0 repeated" in tail.text()


def test_data_passes_unchanged_whatever_it_holds(installation: Installation) -> None:
    deep = "[" * 3_000 + "]" * 3_000
    texts = ['{"a":1.50,"b":1e400}', '"\\ud83d"', '"\\u0000"', "12345678901234567890123", deep]
    for text in texts:
        installation.run("publish", "acme", "odd:1", text)
    tail = installation.tail("odd:1", "--since", "start", "--count", str(len(texts)))
    assert tail.wait(20) == 0, tail.text()
    lines = [line for line in tail.text().splitlines() if line.startswith("{")]
    assert [members(line)["data"] for line in lines] == texts


def test_a_tail_resumes_where_another_ended(installation: Installation) -> None:
    installation.publish("orders:1", 1, 2, 3)
    first = installation.tail("orders:1", "--since", "start", "--count", "1")
    assert first.wait(20) == 0
    position = first.text().rpartition("--since ")[2].strip()
    assert position.endswith(":1")
    second = installation.tail("orders:1", "--since", position, "--count", "2", "--strict")
    assert second.wait(20) == 0
    assert [m["offset"] for m in messages(second)] == [2, 3]


def test_a_position_of_another_history_is_told(installation: Installation) -> None:
    installation.publish("orders:1", 1)
    tail = installation.tail("orders:1", "--since", "0123456789abcdef:1", "--strict")
    assert tail.wait(20) == 1
    assert "not recovered: continuity lost at 0123456789abcdef:1" in tail.text()


def test_ctrl_c_ends_a_tail_with_its_summary(installation: Installation) -> None:
    tail = installation.tail("orders:1", "--since", "start")
    installation.publish("orders:1", 1)
    tail.wait_for(printed(tail, 1), 20, "a message")
    tail.signal(signal.SIGINT)
    assert tail.wait(20) == 0
    assert "1 messages of orders:1" in tail.text()


def test_a_tail_outlives_a_gateway(installation: Installation) -> None:
    installation.publish("orders:1", 1)
    tail = installation.tail("orders:1", "--since", "start", "--count", "2")
    tail.wait_for(printed(tail, 1), 20, "a message")
    installation.gateway.kill()
    installation.publish("orders:1", 2)
    tail.wait_log("connection lost")
    installation.gateway.restart()
    assert tail.wait(40) == 0
    assert [m["offset"] for m in messages(tail)] == [1, 2]


def test_a_tail_begins_right_after_a_new_epoch(installation: Installation) -> None:
    installation.publish("orders:1", 1)
    installation.run("epoch", "new", "--yes")
    tail = installation.tail("orders:1", "--since", "start", "--count", "2")
    installation.publish("orders:1", 2)
    assert tail.wait(40) == 0, tail.text()
    assert [m["offset"] for m in messages(tail)] == [1, 2]


def test_a_tail_that_is_not_let_in(installation: Installation) -> None:
    url = installation.gateway.websocket_url
    anonymous = installation.start("tail", "default", "orders:1", "--url", url, "--anonymous")
    assert anonymous.wait(20) == 1
    assert "tidegate: " in anonymous.text()
    token = sign(SECRET[::-1], "acme", "alice", now=0.0)
    forged = installation.tail("orders:1", "--token", token)
    assert forged.wait(20) == 1
    assert "3500" in forged.text()
    closed = installation.tail("closed:1")
    assert closed.wait(20) == 1
    assert "103" in closed.text()


def test_no_token_and_no_payload_in_any_log(installation: Installation) -> None:
    token = installation.run("token", "--tenant", "acme", "--user", "alice").strip()
    installation.run("publish", "acme", "orders:1", '{"text": "topsecret"}')
    url = f"{installation.gateway.websocket_url}?token={token}"
    tail = installation.start(
        "tail",
        "acme",
        "orders:1",
        "--url",
        url,
        "--token",
        token,
        "--since",
        "start",
        "--count",
        "1",
    )
    assert tail.wait(20) == 0
    wrong = installation.tail("orders:1", "--token", token[:-8] + "AAAAAAAA")
    assert wrong.wait(20) == 1
    for process in (installation.relay, installation.gateway):
        text = process.text()
        for secret in ("topsecret", token, token.rpartition(".")[2], SECRET):
            assert secret not in text, f"{process.name} logged it"
        for line in text.splitlines():
            assert json.loads(line)["event"]


def test_status_of_a_running_installation(installation: Installation, redis: EmbeddedRedis) -> None:
    installation.publish("orders:1", 1, 2)
    tail = installation.tail("orders:1", "--since", "start")
    tail.wait_for(printed(tail, 2), 20, "the messages")
    found = installation.status()
    assert found["ok"], found["problems"]
    assert found["waiting"] == 0
    assert len(found["shards"]) == SHARDS
    assert sum(shard["head"] for shard in found["shards"]) == 2
    assert all(shard["lag"] == 0 for shard in found["shards"])
    (relay,) = found["relays"]
    assert {shard["relay"] for shard in found["shards"]} == {relay}
    (gateway,) = found["gateways"]
    assert gateway["port"] == installation.gateway.port
    text = installation.run("status")
    assert found["epoch"] in text
    assert gateway["id"] in text

    installation.relay.signal(signal.SIGTERM)
    assert installation.relay.wait(20) == 0
    found = installation.status(code=1)
    assert any("no relay is running" in problem for problem in found["problems"])
    assert all(shard["relay"] is None for shard in found["shards"])


def test_every_worker_of_a_gateway_has_its_line(
    installation: Installation, processes: Processes
) -> None:
    two = processes.start_gateway("two", "--workers", "2", **installation.settings)
    ports = []
    while len(ports) < 3 and two.returncode is None:
        ports = [gateway["port"] for gateway in installation.status()["gateways"]]
    assert sorted(ports) == sorted([installation.gateway.port, two.port, two.port])
    two.signal(signal.SIGTERM)
    assert two.wait(30) == 0
    (left,) = installation.status()["gateways"]
    assert left["port"] == installation.gateway.port


def test_without_a_schema_they_wait_and_say_what_to_do(
    processes: Processes, database: str, redis_url: str
) -> None:
    settings = {"TIDEGATE_POSTGRES_DSN": database, "TIDEGATE_REDIS_URL": redis_url}
    relay = processes.start_relay(**settings)
    gateway = processes.start(
        "gateway", "gateway", "--port", "0", TIDEGATE_ALLOW_ANONYMOUS="true", **settings
    )
    for process in (relay, gateway):
        process.wait_log("run `tidegate migrate`")
        process.signal(signal.SIGTERM)
        assert process.wait(30) == 0
