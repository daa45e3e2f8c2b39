"""What a load takes, reckoned from unit costs; and that the page says what the command prints."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway import capacity
from gateway.capacity import COSTS, HEADROOM, Cost, TooMuch, Work, delivery_us, plan
from gateway.capacity_table import costs_table, table
from gateway.cli import app
from gateway.settings import Settings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/operate/capacity.md"
WORK = Work(clients=20_000, rooms=2_000, rate_per_s=500)


def costing(**values: float) -> dict[str, Cost]:
    """The costs with some others."""
    return {name: replace(cost, value=values.get(name, cost.value)) for name, cost in COSTS.items()}


def test_a_delivery_costs_what_was_measured() -> None:
    assert delivery_us(1) == pytest.approx(COSTS["delivery_alone"].value)
    assert delivery_us(8) == pytest.approx(COSTS["delivery_of_eight"].value)
    assert delivery_us(8) < delivery_us(4) < delivery_us(1)
    assert delivery_us(10_000) > 0


def test_a_delivery_is_never_free() -> None:
    assert delivery_us(1_000_000, costing(delivery_alone=8.0, delivery_of_eight=0.5)) > 0


def test_deliveries_follow_from_the_audience() -> None:
    assert WORK.listeners == 10
    assert plan(WORK).gateways.deliveries_per_s == 5_000
    assert replace(WORK, rooms_each=3).listeners == 30
    assert replace(WORK, rooms_each=3, audience=7).deliveries_per_s == 3_500


@pytest.mark.parametrize("clients", [1, 3_000, 100_000, 1_000_000])
@pytest.mark.parametrize("rate", [0, 10, 1_000, 10_000])
def test_no_worker_has_too_much(clients: int, rate: float) -> None:
    gateways = plan(Work(clients, 100, rate)).gateways
    assert gateways.workers >= 2
    assert gateways.load <= HEADROOM
    assert gateways.load_with_one_lost <= capacity.SURVIVORS_MOST
    assert gateways.connections_most <= capacity.CONNECTIONS_MOST
    assert gateways.connections_most * (gateways.workers - 1) >= clients


def test_one_worker_fewer_would_have_too_much() -> None:
    work = Work(clients=50_000, rooms=1, rate_per_s=100)
    gateways = plan(work).gateways
    reading = 100 * (COSTS["gateway_message"].value + COSTS["gateway_read"].value) * 1e-6
    delivering = 5_000_000 * 4.5e-6
    assert gateways.load == pytest.approx(reading + delivering / gateways.workers)
    assert reading + delivering / (gateways.workers - 1) > HEADROOM


def test_more_work_takes_no_less() -> None:
    for name, more in (("clients", 200_000), ("rate_per_s", 5_000.0), ("payload_bytes", 9_000)):
        before, after = plan(WORK), plan(replace(WORK, **{name: more}))
        assert after.gateways.workers >= before.gateways.workers
        assert after.gateways.to_clients_bytes_per_s > before.gateways.to_clients_bytes_per_s
        assert after.redis.memory_bytes >= before.redis.memory_bytes
        assert after.postgres.disk_bytes >= before.postgres.disk_bytes


def test_stores_by_hand() -> None:
    found = plan(Work(clients=10, rooms=10, rate_per_s=1_000, payload_bytes=100))
    assert found.postgres.cores == pytest.approx(0.030)
    assert found.postgres.rows_per_s == 4_000
    assert found.postgres.wal_bytes_per_s == 1_000 * (200 + 950)
    assert found.postgres.disk_bytes == 1_000 * 86_400 * 8 * (100 + 300)
    assert found.redis.cores == pytest.approx(0.010)
    assert found.redis.commands_per_s == 3_000
    assert found.redis.to_gateways_bytes_per_s == 2 * 1_000 * 175
    assert found.redis.memory_bytes == 16 * 10_000 * 175 + 10 * (1_000 + 300 * 175)
    assert found.relays.cores == pytest.approx(0.020)
    assert (found.relays.processes, found.relays.shards, found.relays.spread) == (2, 16, 4)


def test_rooms_that_rest_leave_redis() -> None:
    """A message an hour in each room: a sixth of the rooms have a stream, of one entry."""
    found = plan(Work(clients=1, rooms=3_600, rate_per_s=1, payload_bytes=125))
    assert found.redis.memory_bytes == 16 * 10_000 * 200 + 600 * (1_000 + 200)


def test_a_relay_may_go_and_shards_divide() -> None:
    relays = plan(Work(100, 100, 10_000), costing(relay_message=500)).relays
    assert relays.cores == pytest.approx(5)
    assert (relays.processes - 1) * HEADROOM >= relays.cores
    assert relays.shards >= 4 * relays.processes
    assert math.log2(relays.shards).is_integer()
    assert relays.processes <= relays.spread <= relays.shards


def test_a_redis_that_is_full_becomes_a_cluster() -> None:
    found = plan(WORK, costing(redis_message=4_000))
    assert found.redis.servers == 4
    assert "a cluster of 4 masters" in table(found)


def test_memory_grows_with_connections_rooms_and_what_is_kept_for_those_who_return() -> None:
    small = plan(replace(WORK, clients=2, rooms=1)).gateways.memory_most_bytes
    assert small < COSTS["worker"].value + 1e6
    rooms = plan(replace(WORK, clients=2_000)).gateways.memory_most_bytes
    assert rooms <= COSTS["worker"].value + 2_000 * (4_096 + 2_355) + capacity.REPLAY_MEMORY_BYTES
    assert rooms > COSTS["worker"].value + 2_000 * (4_096 + 2_355)


def test_what_no_worker_can_read_is_refused_with_the_most() -> None:
    with pytest.raises(TooMuch, match=r"30,000 a second$"):
        plan(Work(10, 10, 50_000))
    assert plan(Work(10, 10, 29_000)).gateways.workers == 2


def test_too_many_relays_are_refused() -> None:
    with pytest.raises(TooMuch, match="relays: divide"):
        plan(Work(10, 10, 10_000), costing(relay_message=5_000))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clients": 0}, "clients is 0"),
        ({"payload_bytes": 0}, "payload_bytes is 0"),
        ({"together": 0}, "together is 0"),
        ({"rooms_each": 2_001}, "in 2001 of 2000 rooms"),
        ({"rate_per_s": -1.0}, "rate of -1"),
        ({"rate_per_s": math.nan}, "rate of nan"),
        ({"rate_per_s": math.inf}, "rate of inf"),
        ({"audience": 20_001.0}, "audience of 20001"),
        ({"audience": math.nan}, "audience of nan"),
        ({"retention_days": 0}, "retention of 0 days"),
    ],
)
def test_work_that_is_none(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(WORK, **wrong)  # type: ignore[arg-type]


def test_defaults_are_those_of_the_settings() -> None:
    defaults = Settings()
    for name in (
        *("bus_messages", "room_stream_messages", "room_stream_idle_s", "room_ring_messages"),
        *("room_ring_bytes", "replay_memory_bytes", "retention_days"),
    ):
        assert getattr(capacity, name.upper()) == getattr(defaults, name)


def test_the_page_shows_what_the_command_prints() -> None:
    page = PAGE.read_text()
    example = re.search(
        r"```sh\ntidegate (capacity [^\n]+)\n```\n\n```text\n(.*?\n)```", page, re.S
    )
    assert example is not None
    done = CliRunner().invoke(app, example[1].split())
    assert (done.exit_code, done.stdout) == (0, example[2])
    assert costs_table(COSTS) in page


def test_json_is_the_plan() -> None:
    arguments = ["capacity", "--clients", "20000", "--rooms", "2000", "--rate", "500", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert json.loads(done.stdout) == json.loads(json.dumps(plan(WORK).as_dict()))


def test_too_much_is_one_line_and_exit_code_1() -> None:
    done = CliRunner().invoke(app, ["capacity", "--clients", "1", "--rooms", "1", "--rate", "1e6"])
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("tidegate: each gateway worker reads every message")
    assert done.stderr.count("\n") == 1


def test_the_table_is_aligned() -> None:
    lines = table(plan(replace(WORK, audience=1.0))).splitlines()
    assert "each message to 1 client," in lines[0]
    names = [line[: len("deliveries")].strip() for line in lines]
    assert [name for name in names if name] == [
        *("deliveries", "gateways", "relays", "schema", "postgres", "redis")
    ]
