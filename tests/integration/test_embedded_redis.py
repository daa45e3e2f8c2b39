"""Embedded Redis or Valkey: from the machine and from the wheel, killed and restarted."""

import signal
from pathlib import Path

import pytest
import redis as client
from redis.backoff import NoBackoff
from redis.retry import Retry

from gateway.embedded import EmbeddedRedis, EmbeddedServerError
from gateway.embedded.redis import MIN_VERSION, Source, find_program

NEVER = Retry(NoBackoff(), 0)


def has(source: Source) -> bool:
    try:
        find_program(source)
    except EmbeddedServerError:
        return False
    return True


SOURCES = [
    pytest.param(
        source, marks=pytest.mark.skipif(not has(source), reason=f"no Redis from the {source}")
    )
    for source in ("machine", "wheel")
]


@pytest.mark.parametrize("source", SOURCES)
def test_serves_in_memory_on_loopback_with_a_password(source: Source) -> None:
    assert find_program(source).version >= MIN_VERSION
    with EmbeddedRedis(source=source) as server:
        with client.Redis.from_url(server.url, decode_responses=True) as connection:
            kept = connection.config_get("*")
            assert kept["bind"] == "127.0.0.1"
            assert kept["save"] == ""
            assert kept["appendonly"] == "no"
            assert kept["maxmemory"] != "0"
            assert kept["maxmemory-policy"] == "noeviction"
        with (
            client.Redis(host="127.0.0.1", port=server.port, retry=NEVER) as stranger,
            pytest.raises(client.AuthenticationError),
        ):
            stranger.ping()
        command = Path(f"/proc/{server.pid}/cmdline").read_text()
        assert kept["requirepass"] not in command
        folder = server.log.parent
    assert not folder.exists()


def test_crash_and_restart_on_the_same_port() -> None:
    with EmbeddedRedis() as server:
        url, pid = server.url, server.pid
        with client.Redis.from_url(url) as connection:
            connection.set("key", "value")
        server.kill()
        assert (server.alive, server.returncode) == (False, -signal.SIGKILL)
        server.restart()
        assert server.url == url
        assert server.pid != pid
        with client.Redis.from_url(url) as connection:
            assert connection.dbsize() == 0


def test_second_server_on_the_same_folder(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path), pytest.raises(EmbeddedServerError, match="is in use: process"):
        EmbeddedRedis(tmp_path).start()


def test_wrong_setting_fails_at_once_with_the_servers_words() -> None:
    server = EmbeddedRedis(settings={"maxmemory-policy": "sometimes"})
    with pytest.raises(EmbeddedServerError, match="exited with status 1 before") as info:
        server.start()
    assert "sometimes" in str(info.value)
    assert "\n" not in str(info.value)


def test_extra_settings_are_taken() -> None:
    with (
        EmbeddedRedis(settings={"maxmemory": "3mb"}) as server,
        client.Redis.from_url(server.url, decode_responses=True) as connection,
    ):
        assert connection.config_get("maxmemory") == {"maxmemory": str(3 * 1024 * 1024)}


def test_a_program_that_does_what_its_name_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian has it: one program under several names, ``redis-server`` being a link."""
    program = tmp_path / "redis-check-rdb"
    program.write_text(
        '#!/bin/sh\ncase "$0" in */redis-server) exec '
        f"'{find_program().path}'"
        ' "$@";; *) exit 1;; esac\n'
    )
    program.chmod(0o755)
    (tmp_path / "redis-server").symlink_to(program.name)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program("machine").path == tmp_path / "redis-server"
    with EmbeddedRedis(source="machine") as server:
        assert server.alive
