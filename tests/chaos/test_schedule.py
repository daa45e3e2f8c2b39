"""Schedules repeat by their seed, and hold what they promise."""

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos import schedule as schedules
from tests.chaos.schedule import dump, load, schedule

DURATION_S = 300.0


@given(st.integers(0, 2**32 - 1))
def test_a_seed_gives_one_schedule(seed: int) -> None:
    faults = schedule(seed, DURATION_S, 2, 3)
    assert faults == schedule(seed, DURATION_S, 2, 3) == load(dump(faults))
    assert faults != schedule(seed + 1, DURATION_S, 2, 3)


@given(st.integers(0, 2**32 - 1))
def test_faults_end_in_time_and_no_two_share_a_target(seed: int) -> None:
    free_at_s: dict[str, float] = {}
    for fault in schedule(seed, DURATION_S, 2, 3):
        assert fault.at_s > 0
        assert fault.at_s + fault.lasts_s <= DURATION_S
        assert fault.at_s >= free_at_s.get(fault.target, 0.0)
        free_at_s[fault.target] = fault.at_s + fault.lasts_s


@given(st.integers(0, 2**32 - 1))
def test_what_needs_much_time_is_rare(seed: int) -> None:
    last_s: dict[str, float] = {}
    for fault in schedule(seed, DURATION_S, 2, 3):
        if apart_s := schedules.APART_S.get(fault.kind):
            assert fault.at_s >= last_s.get(fault.kind, -apart_s) + apart_s
            last_s[fault.kind] = fault.at_s


def test_every_kind_and_target_has_its_turn() -> None:
    faults = [fault for seed in range(60) for fault in schedule(seed, DURATION_S, 2, 3)]
    kinds = {*schedules.LINK_KINDS, *schedules.PROCESS_KINDS}
    kinds |= {*schedules.REDIS_KINDS, *schedules.POSTGRES_KINDS, *schedules.WRITERS_KINDS}
    assert {fault.kind for fault in faults} == kinds
    assert len({fault.target for fault in faults}) == 2 + 3 + 1 + 1 + 2 * 5 + 1 + 1
