"""Fixtures of the whole-system tests."""

from collections.abc import Callable

import pytest

from tests.sdk import packages


@pytest.fixture
def node(require: Callable[[str], str]) -> str | None:
    """Path of Node with the SDK's packages; None where it is lacking and need not be there."""
    try:
        return packages.node(require)
    except pytest.skip.Exception:
        return None
