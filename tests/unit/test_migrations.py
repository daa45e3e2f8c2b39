"""The schema's files."""

import pytest

from outbox.layout import OLDEST_SCHEMA, SCHEMA_VERSION, version_problem
from outbox.migrations import Migration, layout_problem, migrations


def test_files_are_numbered_without_a_gap_up_to_the_version() -> None:
    ids = [migration.id for migration in migrations()]
    assert ids == list(range(1, SCHEMA_VERSION + 1))


def test_variables_are_replaced_as_psql_does() -> None:
    migration = Migration(1, "x", "SELECT 5 % :spread, :shards::text, a::shards, :shardsx", "")
    assert migration.statement(16, 4) == "SELECT 5 % 4, 16::text, a::shards, :shardsx"


def test_no_variable_is_left() -> None:
    for migration in migrations():
        statement = migration.statement(16, 4)
        assert ":shards" not in statement.replace("-v shards", "")
        assert ":spread" not in statement.replace("-v spread", "")


@pytest.mark.parametrize(("shards", "spread"), [(1, 1), (16, 4), (16, 16), (1024, 1)])
def test_layouts(shards: int, spread: int) -> None:
    assert layout_problem(shards, spread) is None


@pytest.mark.parametrize(
    ("shards", "spread", "problem"),
    [
        (0, 1, "shards is 0: give a number from 1 to 1024"),
        (1025, 1, "shards is 1025: give a number from 1 to 1024"),
        (8, 0, "spread is 0: give a number from 1 to 8, the number of shards"),
        (8, 9, "spread is 9: give a number from 1 to 8, the number of shards"),
    ],
)
def test_impossible_layouts(shards: int, spread: int, problem: str) -> None:
    assert layout_problem(shards, spread) == problem


@pytest.mark.parametrize(
    ("schema", "oldest_reader", "said"),
    [
        (OLDEST_SCHEMA - 1, 0, "run `tidegate migrate`"),
        (OLDEST_SCHEMA, OLDEST_SCHEMA, None),
        (SCHEMA_VERSION, 1, None),
        (SCHEMA_VERSION + 1, SCHEMA_VERSION, None),
        (SCHEMA_VERSION + 9, 1, None),
        (SCHEMA_VERSION + 1, SCHEMA_VERSION + 1, "upgrade Tidegate"),
    ],
)
def test_which_versions_work_together(schema: int, oldest_reader: int, said: str | None) -> None:
    problem = version_problem(schema, oldest_reader)
    assert problem is None if said is None else said in (problem or "")


def test_what_needs_a_newer_schema_says_so() -> None:
    problem = version_problem(1, 1, needed=2)
    assert problem == "the schema has version 1, needed is 2: run `tidegate migrate`"
