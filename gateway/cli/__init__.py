"""The command line. Each command imports what it needs when it runs, so that help comes at once."""

import re
import sys
from collections.abc import Sequence
from typing import Any

import typer

from gateway.cli import configure, inspect, messages, operations, plan, processes

_OWN = ("gateway", "outbox", "publisher")

app = typer.Typer(
    name="tidegate",
    help="""Carries what a Postgres transaction commits to every watching client: in order, once,
    nothing lost.

    \b
    Try it:      tidegate dev
    In earnest:  tidegate migrate, then tidegate relay and tidegate gateway

    Settings come from variables TIDEGATE_* and from a TOML file (--config); `tidegate config`
    shows them all.""",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (processes, messages, inspect, operations, plan, configure):
    module.register(app)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Expected faults are a line on stderr each."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code: Any = app(given or ["--help"], prog_name="tidegate", standalone_mode=False)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _report(error)
    return code if isinstance(code, int) else 0


def _report(error: Exception) -> int:
    if type(error).__name__ == "Abort":
        return 130
    if hasattr(error, "format_message"):
        # A wrong use that typer found: it knows the command it was for.
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "tidegate"
        _say(f"{_sentence(error.format_message())} See: {command} --help")
        return 2
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith(_OWN):
        _say(f"{error.name} is not installed: pip install 'tidegate[gateway]'")
        return 2
    from gateway import faults  # noqa: PLC0415  takes time that help should not

    explained = faults.explain(error)
    if explained is None:
        raise error
    code, lines = explained
    for line in lines:
        _say(line)
    return code


# What typer says about numbers, in the words that the settings use.
_NUMBERS = (
    (
        re.compile(r"Input should be a valid integer.*|'.*' is not a valid int.*"),
        "must be a whole number",
    ),
    (re.compile(r"Input should be"), "must be"),
)


def _sentence(said: str) -> str:
    """In one line, with a mark at its end."""
    line = " ".join(said.split())
    for pattern, words in _NUMBERS:
        line = pattern.sub(words, line)
    return line if line.endswith((".", "?", "!")) else f"{line}."


def _say(line: str) -> None:
    sys.stderr.write(f"tidegate: {line}\n")
