"""Node and the npm packages that the JavaScript clients need, installed as they are locked."""

import fcntl
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.requirements import lacking

FOLDER = Path(__file__).parent
INSTALL_TIMEOUT_S = 120


def node(require: Callable[[str], str]) -> str:
    """Path of Node, with the packages in place; ``require`` is the fixture of that name."""
    path = require("node")
    if problem := install():
        lacking("node", problem)
    return path


def install() -> str | None:
    """Install what is missing, with ``npm ci``; why that did not work, None if all is there."""
    with (FOLDER / ".npmrc").open() as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if _installed() == _locked():
            return None
        npm = shutil.which("npm")
        if npm is None:
            return "the packages of tests/sdk are not installed, and there is no npm"
        try:
            done = subprocess.run(
                [npm, "ci", "--ignore-scripts"],
                check=False,
                cwd=FOLDER,
                capture_output=True,
                text=True,
                timeout=INSTALL_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"npm ci in tests/sdk took more than {INSTALL_TIMEOUT_S} s"
        if done.returncode:
            return f"npm ci in tests/sdk failed: {done.stderr.strip()[-300:]}"
        return None


def _locked() -> dict[str, Any]:
    packages = json.loads((FOLDER / "package-lock.json").read_text())["packages"]
    return {path: package["version"] for path, package in packages.items() if path}


def _installed() -> dict[str, Any]:
    found = FOLDER / "node_modules" / ".package-lock.json"
    if not found.exists():
        return {}
    packages = json.loads(found.read_text())["packages"]
    return {path: package["version"] for path, package in packages.items()}
