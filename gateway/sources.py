"""Where settings come from: the environment, a TOML file, options; and what is wrong with them."""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError

from gateway.settings import PREFIX, Settings, SettingsError, variable
from outbox import conninfo

CONFIG = "TIDEGATE_CONFIG"
"""The variable that names the TOML file."""

CLOSE = 0.75
"""How much a name must be like another one (difflib's ratio) to be taken for a slip of it."""

# Kubernetes gives each pod variables for each service: those of a service whose name begins with
# "tidegate" look like settings (TIDEGATE_PORT=tcp://10.0.0.7:8000) and are none.
_SERVICE_LINK = re.compile(
    r"TIDEGATE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def load(
    config_file: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """The settings of this process.

    ``config_file`` is a TOML file, else the one named by TIDEGATE_CONFIG, if any. The environment
    (``environ``, else the process's own) beats the file, ``overrides`` (options of the command
    line, by setting) beat both. A variable that is set to nothing counts as not set.

    Raises SettingsError.
    """
    environ = os.environ if environ is None else environ
    path = config_file or environ.get(CONFIG)
    file = _read(Path(path)) if path else {}
    variables = {
        name: value
        for name, value in environ.items()
        if name.startswith(PREFIX) and name != CONFIG and not _is_service_link(name, value)
    }
    known = {variable(name): name for name in Settings.model_fields}
    problems = [
        *(
            f"{path}: {_unknown(key, Settings.model_fields)}"
            for key in file.keys() - Settings.model_fields
        ),
        *(_unknown(name, known) for name in variables.keys() - known.keys()),
    ]
    from_environment = {known[n]: v for n, v in variables.items() if n in known and v}
    from_file = {key: value for key, value in file.items() if key in Settings.model_fields}
    values = {**from_file, **from_environment, **(overrides or {})}
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        in_file = from_file.keys() - from_environment.keys() - (overrides or {}).keys()
        problems += _explain(error, {name: f"{path}: {name}" for name in in_file})
    else:
        dsn = settings.postgres_dsn.get_secret_value()
        if problem := conninfo.problem(dsn) if dsn else None:
            from_path = "postgres_dsn" in from_file.keys() - from_environment.keys()
            where = f"{path}: postgres_dsn" if from_path else variable("postgres_dsn")
            problems.append(f"{where} {problem}")
    if problems:
        raise SettingsError(sorted(problems))
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        problem = f"the settings file {path} cannot be read: {error.strerror}"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problem = f"the settings file {path} is not TOML: {error}"
    raise SettingsError([problem])


def _is_service_link(name: str, value: str) -> bool:
    return bool(
        _SERVICE_LINK.fullmatch(name) or (name.endswith("_PORT") and _SERVICE_ADDRESS.match(value))
    )


def _unknown(name: str, known: Iterable[str]) -> str:
    # What all names begin with says nothing about how much two of them are alike.
    endings = {other.removeprefix(PREFIX): other for other in known}
    close = difflib.get_close_matches(name.removeprefix(PREFIX), endings, n=1, cutoff=CLOSE)
    return f"{name} is not a setting" + (f": did you mean {endings[close[0]]}?" if close else "")


_MUST_BE = {
    "bool_parsing": "must be true or false",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "finite_number": "must be a number",
    "string_type": "must be a text",
    "tuple_type": "must be a list",
}


def _explain(error: ValidationError, in_file: Mapping[str, str]) -> Iterator[str]:
    """One line for each problem; never the value of a secret."""
    for problem in error.errors(include_url=False):
        name, *inner = (str(part) for part in problem["loc"])
        where = ".".join([in_file.get(name, variable(name)), *inner])
        context = problem.get("ctx", {})
        kind = problem["type"]
        if kind == "value_error":
            yield f"{where} {context['error']}"
            continue
        if kind == "literal_error":
            must = f"must be {context['expected']}"
        elif kind.startswith(("greater_than", "less_than")):
            must = problem["msg"].replace("Input should", "must")
        else:
            must = _MUST_BE.get(kind) or problem["msg"].replace("Input should", "must")
        given = problem["input"]
        secret = Settings.model_fields[name].annotation is SecretStr
        shown = isinstance(given, str | int | float) and not secret
        yield f"{where} {must}" + (f", not {given!r}" if shown else "")
