"""The development stack: everything at once, killed, restarted, kept and thrown away."""

import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis as redis_client

from gateway.dev import ProcessState, Stack, StackError, StackOptions
from gateway.embedded import EmbeddedPostgres, EmbeddedRedis, EmbeddedServerError
from gateway.embedded.supervisor import UnknownProcess
from tests.processes import Processes, is_gone, wait_until


def state(stack: Stack, name: str) -> ProcessState:
    return next(process for process in stack.processes if process.name == name)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=2) as answer:
            ready: bool = answer.status == 200
            return ready
    except OSError:
        return False


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    lines: list[str] = []
    with Stack(StackOptions(folder=None, port=0, gateways=2, relays=2), lines.append) as stack:
        yield stack
    assert not any("Traceback" in line for line in lines)


def test_all_run_and_are_ready(stack: Stack) -> None:
    names = [process.name for process in stack.processes]
    assert names == ["postgres", "redis", "relay-1", "relay-2", "gateway-1", "gateway-2"]
    assert all(process.status == "running" for process in stack.processes)
    assert all(map(is_ready, stack.gateway_urls))


def test_killed_gateway_stays_down_until_restarted(stack: Stack) -> None:
    url = stack.gateway_urls[0]
    before = state(stack, "gateway-1")
    stack.kill("gateway-1")
    assert is_gone(before.pid)
    assert state(stack, "gateway-1").status == "killed"
    stack.crash("relay-1")
    wait_until(lambda: state(stack, "relay-1").status == "running")
    assert state(stack, "gateway-1").status == "killed"
    stack.restart("gateway-1")
    stack.wait_ready()
    assert is_ready(url)
    assert state(stack, "gateway-1").starts == before.starts + 1


@pytest.mark.parametrize("name", ["postgres", "redis"])
def test_servers_come_back_on_the_same_address(stack: Stack, name: str) -> None:
    before = state(stack, name)
    stack.crash(name)
    wait_until(
        lambda: state(stack, name).status == "running" and state(stack, name).pid != before.pid
    )
    assert state(stack, name).port == before.port
    wait_until(lambda: all(map(is_ready, stack.gateway_urls)), timeout_s=60)


def test_unknown_name(stack: Stack) -> None:
    with pytest.raises(UnknownProcess, match="there is no process 'relay-9': there are postgres,"):
        stack.kill("relay-9")


def test_folder_keeps_secrets_for_the_owner_only(tmp_path: Path) -> None:
    options = StackOptions(folder=tmp_path / "data", port=0, gateways=0, relays=0)
    with Stack(options, lambda line: None) as stack:
        secrets = (stack.token_hmac_secret, stack.api_key)
        with pytest.raises(EmbeddedServerError, match="is in use: process"):
            Stack(options).start()
        environment = stack.folder / "environment"
        assert environment.stat().st_mode & 0o777 == 0o600
        shown = subprocess.run(
            ["sh", "-c", f'set -a; . "{environment}"; echo "$TIDEGATE_POSTGRES_DSN"'],
            check=True,
            capture_output=True,
            text=True,
        )
        assert shown.stdout.strip() == stack.postgres_dsn
    with Stack(options, lambda line: None) as stack:
        assert (stack.token_hmac_secret, stack.api_key) == secrets
    with pytest.raises(StackError, match="not started"):
        _ = stack.folder


def test_given_servers_are_used(migrated: str, redis: EmbeddedRedis) -> None:
    settings = {"TIDEGATE_POSTGRES_DSN": migrated, "TIDEGATE_REDIS_URL": redis.url}
    options = StackOptions(folder=None, port=0, settings=settings)
    lines: list[str] = []
    with Stack(options, lines.append) as stack:
        assert [process.name for process in stack.processes] == ["relay-1", "gateway-1"]
        assert lines[:2] == [
            "postgres  the Postgres of TIDEGATE_POSTGRES_DSN (127.0.0.1)",
            "redis     the Redis of TIDEGATE_REDIS_URL (127.0.0.1)",
        ]
        environment = (stack.folder / "environment").read_text().splitlines()
        assert f"TIDEGATE_PORT={stack.gateway_urls[0].rpartition(':')[2]}" in environment
        with redis_client.Redis.from_url(redis.url) as connection:
            wait_until(lambda: connection.exists("tg:epoch") == 1)


def test_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StackError, match=f"cannot listen on port {port} .*--port"):
            Stack(StackOptions(folder=None, port=port)).start()


def test_wrong_setting_is_told_with_the_childs_words(
    postgres: EmbeddedPostgres, migrated: str, redis: EmbeddedRedis
) -> None:
    settings = {
        "TIDEGATE_POSTGRES_DSN": migrated,
        "TIDEGATE_REDIS_URL": redis.url,
        "TIDEGATE_PING_INTERVAL_S": "often",
    }
    lines: list[str] = []
    with pytest.raises(StackError, match=r"ended 4 times instead of serving: .*PING_INTERVAL_S"):
        Stack(StackOptions(folder=None, port=0, settings=settings), lines.append).start()


def descendants(pid: int) -> list[int]:
    """The children of a process, in /proc, and theirs."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    direct = [int(child) for path in children for child in path.read_text().split()]
    return direct + [grandchild for child in direct for grandchild in descendants(child)]


def wait_port(port: int, condition: Callable[[str], bool]) -> None:
    wait_until(lambda: condition(f"http://127.0.0.1:{port}"), timeout_s=60)


def test_dev_command_ends_cleanly_on_sigterm(
    processes: Processes, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port = free_port()
    dev = processes.start("dev", "dev", "--port", str(port), "--data", str(tmp_path / "data"))
    wait_port(port, is_ready)
    pids = descendants(dev.pid)
    assert len(pids) >= 4
    dev.wait_log("Ctrl-C stops everything")
    dev.signal(signal.SIGTERM)
    assert dev.wait(30) == 0
    assert all(map(is_gone, pids))


def test_dev_command_says_what_it_uses_and_how_to_follow(
    processes: Processes, free_port: Callable[[], int]
) -> None:
    port = free_port()
    dev = processes.start("dev", "dev", "--port", str(port), "--ephemeral")
    dev.wait_log("Ctrl-C stops everything")
    text = dev.text()
    assert "postgres  embedded, port " in text
    assert "redis     embedded, port " in text
    assert f"--url ws://127.0.0.1:{port}/connection/websocket\n" in text
    assert "password" not in text


@pytest.mark.parametrize("moment", ["making a Postgres", "redis     embedded", "Ctrl-C stops"])
def test_an_impatient_end_leaves_no_folder(
    processes: Processes, tmp_path: Path, moment: str
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    dev = processes.start("dev", "dev", "--port", "0", "--ephemeral", TMPDIR=str(temporary))
    dev.wait_log(moment)
    assert any(temporary.iterdir())
    pids = descendants(dev.pid)
    ended = False
    while not ended:
        dev.signal(signal.SIGINT)
        ended = dev.wait(0.1) is not None
    assert list(temporary.iterdir()) == []
    assert all(map(is_gone, pids))


def test_dev_command_takes_all_with_it_when_killed(
    processes: Processes, free_port: Callable[[], int]
) -> None:
    port = free_port()
    dev = processes.start("dev", "dev", "--port", str(port), "--ephemeral")
    wait_port(port, is_ready)
    pids = descendants(dev.pid)
    assert len(pids) >= 4
    dev.kill()
    wait_until(lambda: all(map(is_gone, pids)))
