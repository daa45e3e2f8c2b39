"""When a relay complains of another installation."""

from outbox.neighbour import MEMORY_S, PROOF, Neighbours


def test_it_complains_once_of_an_epoch_that_comes_back_again_and_again() -> None:
    neighbours = Neighbours()
    complaints = [neighbours.found("e2", float(second)) for second in range(20)]
    assert complaints == [second == PROOF - 1 for second in range(20)]
    assert [neighbours.found("e3", 20.0) for _ in range(5)] == [False, False, True, False, False]


def test_what_happens_now_and_then_is_no_proof() -> None:
    neighbours = Neighbours()
    times = [number * (MEMORY_S + 1) for number in range(10)]
    assert not any(neighbours.found("e2", time_s) for time_s in times)


def test_it_complains_again_after_a_long_silence() -> None:
    neighbours = Neighbours()
    assert [neighbours.found("e2", 0.0) for _ in range(4)] == [False, False, True, False]
    later_s = MEMORY_S + 1
    assert [neighbours.found("e2", later_s) for _ in range(3)] == [False, False, True]
