"""Every example that is marked to run does, and prints what the page says."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.docs.page import Section, sections, unmarked

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("run_section.py")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FULLY_EXECUTED = [ROOT / "docs/publishing.md"]
"""Pages on which no SQL or Python goes unexecuted."""
DOCSTRINGS = [ROOT / "publisher/__init__.py"]
"""Modules whose docstring's examples are executed too; they need no mark."""

CASES = [(page, section) for page in PAGES for section in sections(page)]


@pytest.mark.parametrize(
    ("page", "section"), CASES, ids=[f"{p.relative_to(ROOT)}: {s.title}" for p, s in CASES]
)
def test_a_section(
    page: Path, section: Section, migrated: str, require: Callable[[str], str]
) -> None:
    check(page, section, migrated, require)


@pytest.mark.parametrize("page", FULLY_EXECUTED, ids=lambda page: page.name)
def test_nothing_goes_unexecuted(page: Path) -> None:
    assert unmarked(page) == []
    assert sections(page)


@pytest.mark.parametrize("module", DOCSTRINGS, ids=lambda module: module.parent.name)
def test_a_docstring(
    module: Path, migrated: str, require: Callable[[str], str], tmp_path: Path
) -> None:
    docstring = module.read_text().split('"""')[1]
    page = tmp_path / "docstring.md"
    setup = (
        "```sql run\nCREATE TABLE orders (id bigint PRIMARY KEY, status text);\n```\n"
        "```python run\nimport os\nimport django\nfrom django.conf import settings\n"
        'settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", '
        '"NAME": os.environ["PGDATABASE"]}})\ndjango.setup()\n```\n'
    )
    marked = re.sub(r"^```(sql|python)$", r"```\1 run", docstring, flags=re.M)
    closing = "```python run\nconnection.close()\nengine.dispose()\n```\n"
    page.write_text(setup + marked + closing)
    (section,) = sections(page)
    assert len(section.examples) > 4
    check(page, section, migrated, require)


def check(page: Path, section: Section, conninfo: str, require: Callable[[str], str]) -> None:
    """Executes the section on a fresh database and compares what it prints."""
    if any(example.language == "javascript" for example in section.examples):
        require("node")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(RUNNER), str(page)],
        input=json.dumps([asdict(example) for example in section.examples]),
        env=os.environ | server_environment(conninfo) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for example, (printed, error) in zip(section.examples, json.loads(done.stdout), strict=False):
        place = f"{page}:{example.line}"
        assert error is None, f"{place}\n{error}"
        if example.output is not None:
            assert printed == example.output, place
        else:
            assert not printed.startswith("ERROR:"), f"{place}\n{printed}"
    assert done.stderr == ""


def server_environment(conninfo: str) -> dict[str, str]:
    """libpq's environment variables for a conninfo."""
    names = {
        "host": "PGHOST",
        "port": "PGPORT",
        "user": "PGUSER",
        "password": "PGPASSWORD",
        "dbname": "PGDATABASE",
    }
    return {
        names[key]: str(value) for key, value in conninfo_to_dict(conninfo).items() if key in names
    }
