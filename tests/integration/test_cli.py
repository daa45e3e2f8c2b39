"""The command line as a user meets it: real processes, real servers."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from gateway.cli.messages import own_url
from gateway.embedded import EmbeddedRedis
from gateway.settings import Settings
from gateway.tokens import sign, verify

SECRET = "a secret of thirty-two bytes or more"
NOWHERE_DSN = "postgresql://app:hunter2@127.0.0.1:1/shop"
NOWHERE_URL = "redis://:hunter2@127.0.0.1:1/0"


def run(
    *arguments: str, stdin: str | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=60,
        env=dict(os.environ, **settings),
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "hunter2" not in done.stdout + done.stderr
    return done


def failure(*arguments: str, code: int, **settings: str) -> str:
    """The one line of a failure."""
    done = run(*arguments, **settings)
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("tidegate: ")
    return line.removeprefix("tidegate: ")


COMMANDS = (
    *("dev", "migrate", "relay", "gateway", "publish", "tail", "token", "status", "verify"),
    *("redact", "epoch", "capacity", "config"),
)


def test_help_teaches() -> None:
    for arguments in ((), ("--help",), ("-h",)):
        done = run(*arguments)
        assert done.returncode == 0
        for command in COMMANDS:
            assert command in done.stdout
    for command in COMMANDS:
        text = run(command, "--help").stdout
        assert "Example:" in text
        assert f"tidegate {command}" in text


def test_version() -> None:
    assert run("version").stdout.startswith("tidegate ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["tial"], "No such command 'tial'. Did you mean 'tail'? See: tidegate --help"),
        (["tail"], "Missing argument 'TENANT'. See: tidegate tail --help"),
        (["tail", "a", "b", "--since", "x"], "'x' is not a position: give EPOCH:OFFSET or `start`"),
        (
            ["token", "--user", "a", "--ttl", "1w"],
            "'1w' is not a duration like 90s, 15m, 12h or 7d",
        ),
        (["token", "--user", "a", "--ttl", "1w"], "Invalid value for '--ttl': "),
        (["token", "--tenant", "a:b", "--user", "a"], "Invalid value for '--tenant': tenant name"),
        (
            ["publish", "a", "b", "{}", "--tag", "x"],
            "Invalid value for '--tag': 'x' is not KEY=VALUE. See: tidegate publish --help",
        ),
        (["publish", "a", "b", "{}", "--tag", "x=1", "--tag", "x=2"], "'x' is given twice."),
        (["publish", "a", "b", "{}", "--tga", "x=1"], "No such option: --tga"),
        (["publish", "a", "b c", "{}"], "Invalid value for 'ROOM': room name 'b c' is not"),
        (["publish", "a:b", "c", "{}"], "Invalid value for 'TENANT': tenant name 'a:b' is not"),
        (["tail", "a", "b c"], "Invalid value for 'ROOM': room name 'b c' is not"),
        (
            ["tail", "a", "b", "--url", "junk"],
            "for '--url': 'junk' is not a WebSocket URL like ws:",
        ),
        (["tail", "a", "b", "--url", "ws://a:x/"], "'ws://a:x/' is not a WebSocket URL"),
        (["verify", "--room", "a", "b c"], "Invalid value for '--room': room name 'b c' is not"),
        (["redact", "a", "b", "0"], "Invalid value for 'OFFSET': "),
        (["redact", "a", "b", "-1"], "Invalid value for 'OFFSET': "),
        (["gateway", "--port", "x"], "Invalid value for '--port': must be a whole number. See: "),
        (["gateway", "--port", "70000"], "Invalid value for '--port': "),
        (["dev", "--port", "-1"], "'--port'"),
        (
            ["capacity", "--clients", "2", "--rooms", "2"],
            "Missing option '--rate'. See: tidegate capacity --help",
        ),
        (
            ["capacity", "--clients", "2", "--rooms", "2", "--rate", "1", "--rooms-each", "3"],
            "a client cannot be in 3 of 2 rooms",
        ),
        (["config", "--config", "none.toml"], "the settings file none.toml cannot be read"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], line: str) -> None:
    assert line in failure(*arguments, code=2)


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["migrate"], ["POSTGRES_DSN"]),
        (["publish", "a", "b", "{}"], ["POSTGRES_DSN"]),
        (["relay"], ["POSTGRES_DSN", "REDIS_URL"]),
        (["status"], ["POSTGRES_DSN", "REDIS_URL"]),
        (["gateway"], ["POSTGRES_DSN", "REDIS_URL", "TOKEN_HMAC_SECRET"]),
        (["token", "--user", "a"], ["TOKEN_HMAC_SECRET"]),
        (["tail", "a", "b"], ["TOKEN_HMAC_SECRET"]),
    ],
)
def test_missing_settings_are_a_line_each(arguments: list[str], missing: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert [line.split(" is not set")[0] for line in done.stderr.splitlines()] == [
        f"tidegate: TIDEGATE_{name}" for name in missing
    ]


def test_a_gateway_needs_a_secret_or_anonymous_clients() -> None:
    line = failure(
        "gateway", code=2, TIDEGATE_POSTGRES_DSN=NOWHERE_DSN, TIDEGATE_REDIS_URL=NOWHERE_URL
    )
    assert line.startswith("TIDEGATE_TOKEN_HMAC_SECRET is not set")
    assert line.endswith("TIDEGATE_ALLOW_ANONYMOUS=true lets them in.")
    line = failure("tail", "acme", "orders:42", code=2)
    assert line.endswith("Or give --token, or --anonymous.")
    assert "](" not in run("gateway").stderr, "a link"


def test_wrong_settings_are_told_by_every_command() -> None:
    assert failure("config", code=2, TIDEGATE_PROT="1") == (
        "TIDEGATE_PROT is not a setting: did you mean TIDEGATE_PORT?"
    )
    assert failure("config", code=2, TIDEGATE_LENGTH="1") == "TIDEGATE_LENGTH is not a setting"


def test_config_checks_and_prints() -> None:
    done = run("config", TIDEGATE_POSTGRES_DSN=NOWHERE_DSN, TIDEGATE_PORT="9000")
    assert done.returncode == 0
    assert "# postgres_dsn is set" in done.stdout
    assert "port = 9000" in done.stdout
    docs = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert run("config", "--docs").stdout == docs.read_text()


@pytest.mark.parametrize(
    "arguments", [["migrate"], ["migrate", "--check"], ["publish", "a", "b", "{}"]]
)
def test_a_postgres_out_of_reach(arguments: list[str]) -> None:
    line = failure(*arguments, code=1, TIDEGATE_POSTGRES_DSN=NOWHERE_DSN)
    assert "127.0.0.1" in line
    assert "Connection refused" in line


@pytest.mark.parametrize(
    ("dsn", "problem"),
    [
        ("host=a hunter2", "is not a connection string: postgresql://user:password@host"),
        ("host=a foo=hunter2", "has the option 'foo', which Postgres does not know"),
        ("postgresql://a/b?foo=hunter2", "has the option 'foo', which Postgres does not know"),
    ],
)
def test_a_dsn_that_is_none(dsn: str, problem: str, tmp_path: Path) -> None:
    for command in ("migrate", "status", "dev"):
        line = failure(command, code=2, TIDEGATE_POSTGRES_DSN=dsn, TIDEGATE_REDIS_URL=NOWHERE_URL)
        assert line.startswith(f"TIDEGATE_POSTGRES_DSN {problem}")
    file = tmp_path / "a.toml"
    file.write_text(f'postgres_dsn = "{dsn}"\n')
    assert failure("migrate", "--config", str(file), code=2).startswith(
        f"{file}: postgres_dsn {problem}"
    )


def test_migrate(database: str) -> None:
    settings = {"TIDEGATE_POSTGRES_DSN": database}
    line = failure("migrate", "--check", code=1, **settings)
    assert "run `tidegate migrate`" in line
    assert "run `tidegate migrate`" in failure("publish", "a", "b", "{}", code=1, **settings)
    done = run("migrate", "--shards", "4", "--spread", "2", **settings)
    assert done.returncode == 0
    assert done.stdout.startswith("applied 0001 ")
    assert run("migrate", **settings).stdout == "nothing to do: the schema is up to date\n"
    done = run("migrate", "--check", **settings)
    assert (done.returncode, done.stdout) == (0, "the schema fits\n")
    with psycopg.connect(database) as connection:
        row = connection.execute("SELECT shards, spread FROM tidegate.meta").fetchone()
    assert row == (4, 2)
    assert "shards" in failure("migrate", "--shards", "8", code=1, **settings)


def test_publish(migrated: str) -> None:
    settings = {"TIDEGATE_POSTGRES_DSN": migrated}
    done = run("publish", "acme", "orders:42", '{"a": 1.50}', "--tag", "k=v=w", **settings)
    assert done.returncode == 0
    txid = done.stdout.strip()
    run("publish", "acme", "orders:43", "-", stdin="[1]\n", **settings)
    run("publish", "acme", "orders:43", "-1.5e3", "--tag", "a=b", **settings)
    with psycopg.connect(migrated) as connection:
        rows = connection.execute(
            "SELECT tenant, room, payload::text, tags, txid::text FROM tidegate.outbox ORDER BY id"
        ).fetchall()
    assert rows[0] == ("acme", "orders:42", '{"a": 1.50}', {"k": "v=w"}, txid)
    assert rows[1][:2] == ("acme", "orders:43")
    assert json.loads(rows[1][2]) == [1]
    assert rows[2][2] == "-1.5e3"


def test_publish_refuses_what_is_no_message(migrated: str) -> None:
    settings = {"TIDEGATE_POSTGRES_DSN": migrated}
    for text, line in (
        (b'"\xff"', "data is not valid UTF-8: invalid start byte at byte 1"),
        (b'"\xed\xa0\x80"', "data is not valid UTF-8: invalid continuation byte at byte 1"),
    ):
        assert failure("publish", "acme", "room", os.fsdecode(text), code=1, **settings) == line
        done = run("publish", "acme", "room", "-", stdin=os.fsdecode(text), **settings)
        assert (done.returncode, done.stderr) == (1, f"tidegate: {line}\n")
    done = run("publish", "acme", "room", "-", stdin=" \n", **settings)
    assert done.returncode == 2
    assert "Invalid value for 'JSON': stdin is empty" in done.stderr
    odd = os.fsdecode(b"a=\xff")
    line = failure("publish", "acme", "room", "1", "--tag", odd, code=2, **settings)
    assert "'--tag': 'a' is not valid UTF-8" in line
    line = failure("publish", "acme", "room", '{"topsecret"', code=1, **settings)
    assert "JSON" in line
    assert "topsecret" not in line


def test_token() -> None:
    settings = {"TIDEGATE_TOKEN_HMAC_SECRET": SECRET}
    done = run("token", "--tenant", "acme", "--user", "alice", "--ttl", "15m", **settings)
    now = verify(done.stdout.strip(), SECRET, 0.0 + _issued(done.stdout.strip()))
    assert (now.tenant, now.user) == ("acme", "alice")
    assert now.expires_at is not None
    assert 900 <= now.expires_at - _issued(done.stdout.strip()) <= 901
    assert "tenant name" in failure("token", "--tenant", "a:b", "--user", "a", code=2, **settings)


def _issued(token: str) -> float:
    import base64

    claims = token.split(".")[1]
    issued: float = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["iat"]
    return issued


def test_tail_without_a_gateway() -> None:
    line = failure("tail", "default", "b", "--anonymous", "--url", "ws://127.0.0.1:1/", code=1)
    assert line == (
        "no gateway answers at ws://127.0.0.1:1/ (Connection refused): is one running? give its "
        "address with --url"
    )


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "ws://127.0.0.1:8000/connection/websocket"),
        ({"TIDEGATE_PORT": "1"}, "ws://127.0.0.1:1/connection/websocket"),
        ({"TIDEGATE_PORT": "1", "TIDEGATE_HOST": "0.0.0.0"}, "ws://127.0.0.1:1/connection"),
        ({"TIDEGATE_PORT": "1", "TIDEGATE_HOST": "::1"}, "ws://[::1]:1/connection/websocket"),
    ],
)
def test_tail_finds_the_gateway_of_its_settings(settings: dict[str, str], url: str) -> None:
    found = Settings.model_validate(
        {name.removeprefix("TIDEGATE_").lower(): value for name, value in settings.items()}
    )
    assert own_url(found.host, found.port).startswith(url)
    if settings:
        assert url in failure("tail", "default", "b", "--anonymous", code=1, **settings)


def test_tail_does_not_follow_another_tenant_than_it_was_told() -> None:
    line = failure("tail", "acme", "b", "--anonymous", code=2)
    assert "anonymous clients see tenant default, not acme" in line
    token = sign(SECRET, "acme", "alice", now=0.0)
    line = failure("tail", "beta", "b", "--token", token, code=2)
    assert "the token is for tenant acme, not beta" in line


def test_status_says_what_is_out_of_reach(migrated: str, redis: EmbeddedRedis) -> None:
    done = run("status", TIDEGATE_POSTGRES_DSN=NOWHERE_DSN, TIDEGATE_REDIS_URL=NOWHERE_URL)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert "Postgres" in first
    assert "Redis" in second

    done = run("status", TIDEGATE_POSTGRES_DSN=migrated, TIDEGATE_REDIS_URL=NOWHERE_URL)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "Redis" in line
    assert "epoch     ?" not in done.stdout

    done = run("status", TIDEGATE_POSTGRES_DSN=NOWHERE_DSN, TIDEGATE_REDIS_URL=redis.url)
    assert done.returncode == 1
    assert "Postgres" in done.stderr.splitlines()[0]


def test_status_before_anything_runs(migrated: str, redis_url: str) -> None:
    settings = {"TIDEGATE_POSTGRES_DSN": migrated, "TIDEGATE_REDIS_URL": redis_url}
    run("publish", "acme", "orders:42", "{}", **settings)
    done = run("status", "--json", **settings)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert not found["ok"]
    assert any("no relay is running" in problem for problem in found["problems"])
    assert found["waiting"] == 1
    assert found["oldest_s"] > 0
    assert len(found["shards"]) == 16


def test_status_of_a_database_without_the_schema(database: str, redis_url: str) -> None:
    done = run("status", TIDEGATE_POSTGRES_DSN=database, TIDEGATE_REDIS_URL=redis_url)
    assert done.returncode == 1
    assert "run `tidegate migrate`" in done.stderr


@pytest.mark.parametrize("module", ["typer", "msgspec"])
def test_without_its_extra_a_command_says_what_to_install(module: str) -> None:
    program = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from gateway.__main__ import main\n"
        "sys.argv[1:] = ['gateway']\n"
        "sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=dict(
            os.environ,
            TIDEGATE_POSTGRES_DSN=NOWHERE_DSN,
            TIDEGATE_REDIS_URL=NOWHERE_URL,
            TIDEGATE_ALLOW_ANONYMOUS="true",
        ),
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"tidegate: {module} is not installed: pip install 'tidegate[gateway]'\n"
    )


@pytest.mark.parametrize("module", ["gateway.cli", "gateway.sources"])
def test_ctrl_c_while_it_imports(module: str) -> None:
    program = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        # A background job of a shell without job control is started with it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from gateway.__main__ import main\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv[1:] = ['config']\n"
        "sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(("command", "code"), [("relay", 0), ("gateway", 0), ("config", -15)])
def test_a_service_that_is_ended_while_it_imports(command: str, code: int) -> None:
    program = (
        "import os, signal, sys\n"
        "class Terminate:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'gateway.sources':\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "from gateway.__main__ import main\n"
        "sys.meta_path.insert(0, Terminate())\n"
        f"sys.argv[1:] = [{command!r}]\n"
        "sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_help_imports_little() -> None:
    program = (
        "import sys\n"
        "from gateway.cli import run\n"
        "run(['--help'])\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'psycopg', 'redis', 'pydantic', 'structlog', 'starlette',"
        " 'uvicorn', 'websockets', 'joserfc', 'msgspec', 'rich'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_no_fault() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "gateway", "config", "--docs"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ, PYTHONUNBUFFERED="1"),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) in (0, 1, -signal.SIGPIPE)


def test_the_reference_knows_every_command_and_option() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    sections = dict(re.findall(r"^## `tidegate (\w+)`\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.M))
    listed = run("--help").stdout.partition("Commands:")[2]
    assert set(re.findall(r"^  (\w+)", listed, re.MULTILINE)) == set(sections)
    for command, section in sections.items():
        options = set(
            re.findall(r"--[a-z-]+", run(command, "--help").stdout.partition("Options:")[2])
        )
        for option in options - {"--help", "--config"}:
            assert f"`{option}" in section, f"{command} {option}"
