"""The oracle reports nothing for good runs and everything that is done to them."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import (
    Committed,
    Ended,
    Event,
    Fault,
    Interrupted,
    Key,
    Received,
    Record,
    Subscribed,
    Violation,
    assemble,
    judge,
    judge_log,
)

ROOM: Key = ("acme", "orders:1")
OTHER_ROOM: Key = ("acme", "orders:2")
OTHER_TENANT: Key = ("globex", "orders:1")
EPOCH = "e1"


def log_of(*keys: Key, head: int = 12) -> dict[Key, list[str]]:
    return {key: [f"{key[0]} {key[1]} {i}" for i in range(1, head + 1)] for key in keys}


LOG = log_of(ROOM, OTHER_ROOM, OTHER_TENANT)


def good_run(log: dict[Key, list[str]], key: Key, breaks: Sequence[int] = ()) -> list[Event]:
    """A client's record that was interrupted after these offsets and resumed each time."""
    events: list[Event] = [Subscribed(EPOCH, 0, was_recovering=False, recovered=False)]
    for position in range(len(log[key]) + 1):
        if position:
            events.append(Received(position, log[key][position - 1]))
        for _ in range(list(breaks).count(position)):
            events += [Interrupted(3), Subscribed(EPOCH, position, True, True)]
    return events


def faults(events: Sequence[Event], key: Key = ROOM) -> set[Fault]:
    return {v.fault for v in judge(LOG, [Record("ann", key, events)])}


breaks_of = st.lists(st.integers(0, 12), max_size=5)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Event], int]:
    """A good run and the index of one of its publications."""
    events = good_run(LOG, ROOM, draw(breaks_of))
    received = [i for i, event in enumerate(events) if isinstance(event, Received)]
    return events, draw(st.sampled_from(received))


@given(breaks_of)
def test_good_runs(breaks: list[int]) -> None:
    records = [Record(f"c{i}", key, good_run(LOG, key, breaks)) for i, key in enumerate(LOG)]
    assert judge(LOG, records) == []


def test_a_client_that_began_at_a_position() -> None:
    tail = [Received(i, LOG[ROOM][i - 1]) for i in range(6, 13)]
    events = [Subscribed(EPOCH, 5, was_recovering=True, recovered=True), *tail]
    assert judge(LOG, [Record("ann", ROOM, events, start=5)]) == []
    assert [v.fault for v in judge(LOG, [Record("ann", ROOM, events)])] == [
        Fault.MOVED,
    ]


def test_a_silent_room() -> None:
    subscribed = Subscribed(EPOCH, 0, was_recovering=False, recovered=False)
    assert judge({}, [Record("ann", ROOM, [subscribed])]) == []


@given(runs())
def test_drop(run: tuple[list[Event], int]) -> None:
    events, index = run
    dropped = events.pop(index)
    assert isinstance(dropped, Received)
    last = dropped.offset == len(LOG[ROOM])
    assert (Fault.MISSING_TAIL if last else Fault.HOLE) in faults(events)


@given(runs(), st.integers(0, 30))
def test_double(run: tuple[list[Event], int], later: int) -> None:
    events, index = run
    events.insert(min(len(events), index + 1 + later), events[index])
    assert Fault.REPEAT in faults(events)


@given(runs())
def test_swap(run: tuple[list[Event], int]) -> None:
    events, index = run
    offset = events[index].offset  # type: ignore[union-attr]
    partner = next(
        (i for i, e in enumerate(events) if isinstance(e, Received) and e.offset == offset + 1),
        None,
    )
    if partner is None:
        return
    events[index], events[partner] = events[partner], events[index]
    assert faults(events) >= {Fault.HOLE, Fault.INVERSION}


@given(runs(), st.sampled_from(["", "altered", "acme orders:1 13"]))
def test_alter(run: tuple[list[Event], int], content: str) -> None:
    events, index = run
    events[index] = replace(events[index], content=content)  # type: ignore[call-arg]
    assert faults(events) == {Fault.ALTERED}


@given(runs())
def test_contents_of_two_offsets_exchanged(run: tuple[list[Event], int]) -> None:
    events, index = run
    offset = events[index].offset  # type: ignore[union-attr]
    content = LOG[ROOM][offset % len(LOG[ROOM])]
    events[index] = Received(offset, content)
    assert faults(events) == {Fault.ALTERED}


@given(runs(), st.sampled_from([OTHER_ROOM, OTHER_TENANT]))
def test_a_message_of_another_room(run: tuple[list[Event], int], other: Key) -> None:
    events, index = run
    offset = events[index].offset  # type: ignore[union-attr]
    events[index] = Received(offset, LOG[other][offset - 1])
    assert faults(events) == {Fault.FOREIGN}


@given(runs(), st.sampled_from([OTHER_ROOM, OTHER_TENANT]))
def test_two_runs_mixed(run: tuple[list[Event], int], other: Key) -> None:
    events, index = run
    mixed = [*events[:index], *good_run(LOG, other)[1:], *events[index:]]
    assert Fault.FOREIGN in faults(mixed)


@given(runs(), st.integers(1, 100))
def test_cut(run: tuple[list[Event], int], later: int) -> None:
    events, index = run
    assert Fault.MISSING_TAIL in faults(events[:index])
    # Only a record that ends with the last offset has no tail missing.
    complete = any(isinstance(e, Received) and e.offset == 12 for e in events[: index + later])
    assert (Fault.MISSING_TAIL in faults(events[: index + later])) is not complete


@given(runs())
def test_told_not_recovered(run: tuple[list[Event], int]) -> None:
    events, index = run
    position = events[index].offset  # type: ignore[union-attr]
    told = Subscribed(EPOCH, position, was_recovering=True, recovered=False)
    events[index + 1 : index + 1] = [Interrupted(3), told]
    assert faults(events) == {Fault.NOT_RECOVERED}


@given(runs(), st.integers(1, 5), st.booleans())
def test_false_recovered(run: tuple[list[Event], int], by: int, ahead: bool) -> None:
    events, index = run
    position = events[index].offset  # type: ignore[union-attr]
    moved = Subscribed(EPOCH, position + (by if ahead else -by), True, recovered=True)
    events[index + 1 : index + 1] = [Interrupted(3), moved]
    assert faults(events) == {Fault.MOVED}


def test_a_position_that_was_dropped() -> None:
    events = good_run(LOG, ROOM)
    again = Subscribed(EPOCH, 4, was_recovering=False, recovered=False)
    assert faults([*events[:5], Interrupted(3), again, *events[5:]]) == {Fault.NOT_RECOVERED}


def test_another_epoch() -> None:
    events = good_run(LOG, ROOM)
    again = Subscribed("e2", 4, was_recovering=True, recovered=True)
    assert faults([*events[:5], Interrupted(3), again, *events[5:]]) == {Fault.OTHER_EPOCH}


def test_delivery_without_a_subscription() -> None:
    events = good_run(LOG, ROOM)
    assert Fault.FOREIGN in faults(events[1:])
    assert faults([*events[:5], Interrupted(3), *events[5:]]) == {Fault.FOREIGN}


def test_an_invented_message() -> None:
    assert faults([*good_run(LOG, ROOM), Received(13, "more")]) == {Fault.INVENTED}
    assert Fault.INVENTED in faults([*good_run(LOG, ROOM), Received(0, "less")])


def test_ended_and_never_begun() -> None:
    assert faults([*good_run(LOG, ROOM), Ended(2000, "server unsubscribe")]) == {Fault.ENDED}
    assert faults([]) == {Fault.MISSING_TAIL}


# The log


def rows(log: dict[Key, list[str]]) -> list[tuple[Key, int, str]]:
    return [(key, i, c) for key, contents in log.items() for i, c in enumerate(contents, 1)]


def commits(log: dict[Key, list[str]]) -> list[Committed]:
    """Two messages to each transaction; each transaction begins when the last one has ended."""
    return [
        Committed(
            key, content, f"{key} {i // 2}", i % 2, inserted_at=i // 2, committed_at=i // 2 + 0.5
        )
        for key, contents in log.items()
        for i, content in enumerate(contents)
    ]


@given(st.permutations(rows(LOG)))
def test_a_good_log(shuffled: list[tuple[Key, int, str]]) -> None:
    log, violations = assemble(shuffled)
    assert violations == []
    assert log == LOG
    assert judge_log(log, commits(LOG)) == []


@pytest.mark.parametrize(("offset", "instead"), [(1, 0), (5, 6), (5, 13), (12, 13)])
def test_sparse_offsets(offset: int, instead: int) -> None:
    wrong = [(k, instead if (k, i) == (ROOM, offset) else i, c) for k, i, c in rows(LOG)]
    assert [(v.fault, v.key) for v in assemble(wrong)[1]] == [(Fault.SPARSE, ROOM)]


def judged(contents: list[str]) -> list[tuple[Fault, Key]]:
    violations: list[Violation] = judge_log(LOG | {ROOM: contents}, commits(LOG))
    return sorted({(v.fault, v.key) for v in violations}, key=str)


@given(st.integers(0, 11))
def test_faults_of_the_log(index: int) -> None:
    contents = LOG[ROOM]
    without = contents[:index] + contents[index + 1 :]
    # Two messages stand in one transaction, so one of them without the other is torn.
    assert judged(without) == [(Fault.LOST, ROOM), (Fault.TORN, ROOM)]
    assert (Fault.DOUBLED, ROOM) in judged([*contents, contents[index]])
    assert judged([*contents, "rolled back"]) == [(Fault.PHANTOM, ROOM)]
    # A room's message that stands in another room is missing in the one and alien to the other.
    assert judged([*contents, LOG[OTHER_TENANT][index]]) == [(Fault.PHANTOM, ROOM)]


@given(st.integers(0, 10))
def test_disorder(index: int) -> None:
    contents = list(LOG[ROOM])
    contents[index], contents[index + 1] = contents[index + 1], contents[index]
    assert judged(contents) == [(Fault.DISORDER, ROOM)]


def test_transactions_that_overlap_may_stand_in_any_order() -> None:
    one = Committed(ROOM, "one", "t1", 0, inserted_at=0, committed_at=2)
    two = Committed(ROOM, "two", "t2", 0, inserted_at=1, committed_at=3)
    assert judge_log({ROOM: ["one", "two"]}, [one, two]) == []
    assert judge_log({ROOM: ["two", "one"]}, [one, two]) == []


def test_a_commit_without_an_answer_is_there_as_a_whole_or_not_at_all() -> None:
    sent = [
        Committed(ROOM, content, "t", i, inserted_at=i, committed_at=inf, certain=False)
        for i, content in enumerate(("one", "two"))
    ]
    assert judge_log({ROOM: ["one", "two"]}, sent) == []
    assert judge_log({ROOM: []}, sent) == []
    assert [v.fault for v in judge_log({ROOM: ["one"]}, sent)] == [Fault.TORN]
    assert Fault.DISORDER in {v.fault for v in judge_log({ROOM: ["two", "one"]}, sent)}
