import json
from dataclasses import replace

import pytest

from gateway.operate.status import Bus, judge
from gateway.operate.status_table import table
from outbox.layout import Layout
from outbox.lease import LeaseTable
from outbox.overview import Overview, ShardOverview

GATEWAY = {
    "id": "w1",
    "host": "127.0.0.1",
    "port": 8000,
    "connections": 3,
    "subscriptions": 5,
    "positions": {"0": 8, "1": 4},
}


def log(epoch: str = "e1", heads: tuple[int, int] = (10, 4)) -> Overview:
    return Overview(
        Layout(epoch, 2, 2, 1, 1, True),
        {0: ShardOverview(heads[0], 2, 1.5), 1: ShardOverview(heads[1], 0, None)},
    )


def bus(
    epoch: str | None = "e1",
    relays: tuple[str, ...] = ("r1",),
    holders: dict[int, str] | None = None,
    last_ids: dict[int, int] | None = None,
) -> Bus:
    return Bus(
        epoch,
        {0: 9, 1: 4} if last_ids is None else last_ids,
        LeaseTable(relays, {0: "r1", 1: "r1"} if holders is None else holders),
        (GATEWAY,),
    )


def test_all_is_well() -> None:
    status = judge(log(), bus())
    assert status.problems == ()
    assert (status.epoch, status.waiting, status.oldest_s) == ("e1", 2, 1.5)
    assert [(s.head, s.last, s.lag, s.relay) for s in status.shards] == [
        (10, 9, 1, "r1"),
        (4, 4, 0, "r1"),
    ]
    (gateway,) = status.gateways
    assert (gateway.connections, gateway.shards, gateway.lag) == (3, 2, 1)


def test_a_shard_that_stands_still_is_a_problem() -> None:
    status = judge(log(), replace(bus(), failing={1: "Redis refuses offset 3"}))
    assert status.problems == ("shard 1: Redis refuses offset 3",)


def test_a_store_out_of_reach_is_told_and_the_other_shown() -> None:
    status = judge("Postgres: connection refused", bus())
    assert status.problems == ("Postgres: connection refused",)
    assert [(s.head, s.last, s.lag) for s in status.shards] == [(None, 9, None), (None, 4, None)]
    status = judge(log(), "Redis: connection refused")
    assert status.problems == ("Redis: connection refused",)
    assert [(s.head, s.last, s.waiting) for s in status.shards] == [(10, None, 2), (4, None, 0)]
    assert len(judge("Postgres: x", "Redis: y").problems) == 2


def test_no_relay() -> None:
    (problem,) = judge(log(), bus(relays=(), holders={})).problems
    assert "no relay is running" in problem


def test_shards_without_a_relay() -> None:
    (problem,) = judge(log(), bus(holders={0: "r1"})).problems
    assert "no relay holds shards 1:" in problem


def test_an_epoch_that_is_missing_or_another() -> None:
    (problem,) = judge(log(), bus(epoch=None, last_ids={})).problems
    assert "Redis has no epoch" in problem
    (problem,) = judge(log(), bus(epoch="e0")).problems
    assert problem == "Redis has epoch e0, Postgres e1: a relay that reaches both must run"


@pytest.mark.parametrize("told", ["e1", "e2", None])
def test_another_installation_on_the_same_redis(told: str | None) -> None:
    """The two write the epoch in turns, so it tells nothing."""
    status = judge(log(), replace(bus(epoch=told), neighbours=("e2",)))
    assert status.problems[0] == (
        "another installation uses this Redis (epoch e2): "
        "give each its own Redis or database number"
    )
    assert len(status.problems) == (1 if told else 2)
    assert [s.last for s in status.shards] == [9, 4]


def test_a_bus_ahead_of_the_log_is_proof_of_a_loss() -> None:
    (problem,) = judge(log(heads=(7, 4)), bus()).problems
    assert problem == "shard 0: the bus is 2 messages ahead of the log: Postgres lost commits"


def test_json() -> None:
    found = json.loads(judge(log(), bus()).json())
    assert found["ok"] is True
    assert found["shards"][0] == {
        "shard": 0,
        "head": 10,
        "last": 9,
        "lag": 1,
        "waiting": 2,
        "oldest_s": 1.5,
        "relay": "r1",
    }
    assert found["gateways"][0]["id"] == "w1"
    assert json.loads(judge("a", "b").json())["ok"] is False


def test_a_gateway_that_says_little() -> None:
    status = judge(log(), Bus("e1", {}, LeaseTable((), {}), ({"id": "w"},)))
    assert status.gateways[0].lag is None


def test_table() -> None:
    assert table(judge(log(), bus())).splitlines() == [
        "epoch     e1",
        "outbox    2 waiting, the oldest for 1.5 s",
        "relays    r1",
        "",
        "shard  log  bus  lag  outbox  relay",
        "    0   10    9    1       2  r1",
        "    1    4    4    0       0  r1",
        "",
        "gateway  address         connections  subscriptions  shards  lag",
        "w1       127.0.0.1:8000            3              5       2    1",
    ]
    assert "?" in table(judge("Postgres: x", bus()))
    assert "no gateway has reported itself" in table(judge(log(), "Redis: y"))
