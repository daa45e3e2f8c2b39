"""One cluster for all tests of this folder, and for each test a trial in it."""

import gc
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest
import pytest_asyncio

from gateway.embedded import EmbeddedPostgres, EmbeddedRedis
from tests.chaos.cluster import POSTGRES_SETTINGS, Cluster, prepare_database
from tests.chaos.trial import Trial


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two relays and two gateways on servers of their own. Tests put back what they break."""
    folder: Path = tmp_path_factory.mktemp("chaos") / "processes"
    with EmbeddedPostgres(settings=POSTGRES_SETTINGS) as postgres, EmbeddedRedis() as redis:
        prepare_database(postgres)
        async with Cluster(folder, postgres, postgres.dsn(), redis) as cluster:
            yield cluster
        cluster.processes.check_logs()


@pytest_asyncio.fixture(loop_scope="session")
async def trial(cluster: Cluster, seed: int) -> AsyncIterator[Trial]:
    """Clients and writers of the test's own. What the test has broken is whole again afterwards."""
    print(f"TIDEGATE_TEST_SEED={seed}")
    trial = Trial(cluster, seed)
    try:
        yield trial
    finally:
        cluster.heal()
        await trial.close()
        for process in (*cluster.relays, *cluster.gateways):
            if not process.alive:
                await cluster.restart(process)


@pytest.fixture
def other_database(cluster: Cluster) -> str:
    """The conninfo of an empty database on the same server."""
    name = f"other_{secrets.token_hex(4)}"
    with psycopg.connect(cluster.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return cluster.postgres.dsn(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Clients of these tests are cut off at any moment, also while a library of theirs connects,
    and the socket is then closed by the garbage collector: a warning, and no fault of what is
    tested, which runs in processes of its own."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(
                pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning")
            )


@pytest.fixture(autouse=True)
def leave_no_garbage() -> Iterator[None]:
    """What a test left behind is told of here, and not in a test that has nothing to do with it."""
    yield
    gc.collect()
