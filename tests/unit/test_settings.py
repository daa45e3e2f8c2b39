from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.namespaces import Namespace
from gateway.settings import Settings, SettingsError, variable
from gateway.sources import load

SECRET = "s3cret-" + "x" * 32


def problems(environ: dict[str, str], config_file: Path | None = None) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load(config_file, environ=environ)
    for line in caught.value.problems:
        assert "\n" not in line
    return caught.value.problems


def test_defaults_need_nothing() -> None:
    settings = load(environ={})
    assert settings.port == 8000
    assert not settings.allow_anonymous
    assert not settings.postgres_dsn


def test_every_setting_has_a_description_and_can_be_constructed_from_its_default() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        Settings.model_validate({name: field.default})


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load(environ={}).port = 1


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("PORT", "abc", "must be a whole number, not 'abc'"),
        ("PORT", "65536", "must be less than or equal to 65535, not '65536'"),
        ("WORKERS", "0", "must be greater than or equal to 1, not '0'"),
        ("WORKERS", "1.5", "must be a whole number, not '1.5'"),
        ("ALLOW_ANONYMOUS", "perhaps", "must be true or false, not 'perhaps'"),
        ("PONG_TIMEOUT_S", "nan", "must be a number, not 'nan'"),
        ("PONG_TIMEOUT_S", "25", "must be below TIDEGATE_PING_INTERVAL_S (25), not 25"),
        ("LOG_FORMAT", "xml", "must be 'auto', 'json' or 'console', not 'xml'"),
        ("POSTGRES_DSN", "mysql://a:b@c/d", "must begin with postgresql://"),
        (
            "POSTGRES_DSN",
            "localhost",
            "must be like postgresql://user:password@host:5432/database",
        ),
        (
            "REDIS_URL",
            "localhost:6379",
            "must be like redis://host:6379/0, rediss://…, unix:///path, "
            "redis+sentinel://host:26379,…/master or redis+cluster://host:6379,…",
        ),
        ("REDIS_URL", "redis+cluster://a,b/1", "names a database: a cluster has only the one"),
        (
            "REDIS_URL_ALSO",
            "redis+sentinel://:word@host",
            "has no name of a master: redis+sentinel://host:26379/master",
        ),
        (
            "TOKEN_HMAC_SECRET",
            "tooshort",
            "must have at least 32 bytes, not 8: make one with `openssl rand -hex 32`",
        ),
        (
            "ALLOWED_ORIGINS",
            "https://*.example.com",
            "must hold origins like https://app.example.com, not 'https://*.example.com'",
        ),
        (
            "NAMESPACES",
            "orders",
            'must be JSON, like {"orders": {"publish": "authenticated"}}',
        ),
        (
            "NAMESPACES",
            '{"a:b": {}}',
            "has an entry 'a:b', which is no namespace's name",
        ),
        (
            "NAMESPACES",
            '{"orders": {"publish_by": "anyone"}}',
            "has orders.publish_by, which is not one of history_messages, subscribe, publish",
        ),
    ],
)
def test_a_wrong_value_is_one_line(name: str, value: str, line: str) -> None:
    assert problems({f"TIDEGATE_{name}": value}) == (f"TIDEGATE_{name} {line}",)


def test_a_wrong_value_inside_a_namespace_is_named() -> None:
    assert problems({"TIDEGATE_NAMESPACES": '{"orders": {"publish": "all"}}'}) == (
        "TIDEGATE_NAMESPACES.orders.publish must be 'anyone', 'authenticated' or 'nobody', "
        "not 'all'",
    )


def test_all_problems_are_told_at_once() -> None:
    assert len(problems({"TIDEGATE_PORT": "x", "TIDEGATE_HOSTS": "y"})) == 2


def test_an_unknown_variable_is_an_error_with_a_suggestion() -> None:
    assert problems({"TIDEGATE_REDIS_URI": "x"}) == (
        "TIDEGATE_REDIS_URI is not a setting: did you mean TIDEGATE_REDIS_URL?",
    )


def test_secrets_appear_in_no_problem_and_no_representation() -> None:
    wrong = {
        "TIDEGATE_POSTGRES_DSN": "http://user:hunter2@host/db",
        "TIDEGATE_REDIS_URL": "http://:hunter2@host",
        "TIDEGATE_TOKEN_HMAC_SECRET": "hunter2",
    }
    assert "hunter2" not in "\n".join(problems(wrong))
    settings = load(environ={"TIDEGATE_TOKEN_HMAC_SECRET": SECRET})
    assert SECRET not in repr(settings)
    assert SECRET not in str(settings.model_dump())


def test_variables_that_kubernetes_makes_for_services_are_not_settings() -> None:
    settings = load(
        environ={
            "TIDEGATE_PORT": "tcp://10.0.0.7:8000",
            "TIDEGATE_PORT_8000_TCP": "tcp://10.0.0.7:8000",
            "TIDEGATE_PORT_8000_TCP_PROTO": "tcp",
            "TIDEGATE_PORT_8000_TCP_ADDR": "10.0.0.7",
            "TIDEGATE_PORT_8000_TCP_PORT": "8000",
            "TIDEGATE_SERVICE_HOST": "10.0.0.7",
            "TIDEGATE_SERVICE_PORT": "8000",
            "TIDEGATE_SERVICE_PORT_HTTP": "8000",
            "TIDEGATE_GATEWAY_SERVICE_HOST": "10.0.0.7",
            "TIDEGATE_GATEWAY_PORT": "tcp://10.0.0.7:8000",
        }
    )
    assert settings.port == 8000


def test_an_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text("port = 9000\n")
    assert load(file, environ={"TIDEGATE_PORT": ""}).port == 9000


def test_the_environment_beats_the_file_and_options_beat_both(tmp_path: Path) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text('port = 1001\nhost = "h1"\nworkers = 2\n')
    environ = {"TIDEGATE_CONFIG": str(file), "TIDEGATE_PORT": "1002", "TIDEGATE_HOST": "h2"}
    settings = load(environ=environ, overrides={"port": 1003})
    assert (settings.port, settings.host, settings.workers) == (1003, "h2", 2)


def test_namespaces_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text('[namespaces.orders]\npublish = "authenticated"\n[namespaces."*"]\n')
    assert load(file, environ={}).namespaces == {
        "orders": Namespace(publish="authenticated"),
        "*": Namespace(),
    }


def test_problems_in_the_file_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text('prot = 8000\nworkers = "many"\n[namespaces.orders]\npublish = "all"\n')
    assert problems({}, file) == (
        f"{file}: namespaces.orders.publish must be 'anyone', 'authenticated' or 'nobody', "
        "not 'all'",
        f"{file}: prot is not a setting: did you mean port?",
        f"{file}: workers must be a whole number, not 'many'",
    )


def test_a_file_that_is_missing_or_no_toml(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert problems({}, missing) == (
        f"the settings file {missing} cannot be read: No such file or directory",
    )
    broken = tmp_path / "broken.toml"
    broken.write_text("port 8000")
    (line,) = problems({}, broken)
    assert line.startswith(f"the settings file {broken} is not TOML: ")


def test_require_names_what_is_missing() -> None:
    settings = load(environ={"TIDEGATE_REDIS_URL": "redis://localhost"})
    settings.require("redis_url")
    with pytest.raises(SettingsError) as caught:
        settings.require("postgres_dsn", "redis_url", "api_key")
    assert [line.split(" is not set")[0] for line in caught.value.problems] == [
        "TIDEGATE_POSTGRES_DSN",
        "TIDEGATE_API_KEY",
    ]


def test_origins_are_normalised() -> None:
    origins = "https://App.example.com:443/, http://localhost:3000"
    assert load(environ={"TIDEGATE_ALLOWED_ORIGINS": origins}).allowed_origins == (
        "https://app.example.com",
        "http://localhost:3000",
    )


def test_variable() -> None:
    assert variable("postgres_dsn") == "TIDEGATE_POSTGRES_DSN"
