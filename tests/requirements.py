"""What a machine may lack: a reason to skip a test, or to fail where it must be there."""

import os
from typing import NoReturn

import pytest

# Read when this is first imported, which is before conftest.py takes all TIDEGATE_* away.
REQUIRED = os.environ.get("TIDEGATE_TEST_REQUIRE", "").split(",")


def lacking(what: str, reason: str) -> NoReturn:
    """Skips the test, or fails it if TIDEGATE_TEST_REQUIRE names ``what``."""
    if what in REQUIRED:
        pytest.fail(f"{reason}, but TIDEGATE_TEST_REQUIRE names {what}")
    pytest.skip(reason)
