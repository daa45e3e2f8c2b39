import pytest

from gateway.continuity import Continuity, Position, Verdict


def test_positions_as_text() -> None:
    assert Position.parse("3f2a:17") == Position("3f2a", 17)
    assert Position.parse("start") == Position("", 0)
    for position in (Position("3f2a", 17), Position("", 0)):
        assert Position.parse(str(position)) == position


@pytest.mark.parametrize("text", ["", "17", ":17", "3f2a:", "3f2a:-1", "3f2a:x", "a:²"])
def test_what_is_no_position(text: str) -> None:
    with pytest.raises(ValueError, match="EPOCH:OFFSET"):
        Position.parse(text)


def test_a_fresh_subscription_begins_at_the_present() -> None:
    continuity = Continuity()
    assert continuity.subscribed("e", 5, recovered=False) is None
    assert continuity.arrived(6) is Verdict.NEXT
    assert continuity.position == Position("e", 6)
    assert (continuity.tally.messages, continuity.tally.first) == (1, 6)
    assert continuity.tally.kept


def test_a_recovered_subscription_goes_on_after_the_position_held() -> None:
    continuity = Continuity(Position("e", 3))
    assert continuity.subscribed("e", 9, recovered=True) is None
    assert continuity.arrived(4) is Verdict.NEXT


def test_from_the_start_takes_any_epoch() -> None:
    continuity = Continuity(Position.parse("start"))
    assert continuity.subscribed("e", 9, recovered=True) is None
    assert continuity.arrived(1) is Verdict.NEXT
    assert continuity.position == Position("e", 1)


def test_a_loss_that_is_told_is_no_broken_promise() -> None:
    continuity = Continuity(Position("old", 3))
    told = continuity.subscribed("new", 9, recovered=False)
    assert told == "not recovered: continuity lost at old:3, goes on after new:9"
    assert continuity.arrived(10) is Verdict.NEXT
    assert continuity.tally.lost == 1
    assert continuity.tally.kept


def test_recovered_with_another_epoch_is_a_contradiction() -> None:
    continuity = Continuity(Position("old", 3))
    told = continuity.subscribed("new", 9, recovered=True)
    assert told is not None
    assert told.startswith("contradiction")
    assert not continuity.tally.kept


def test_a_hole_does_not_move_the_position() -> None:
    continuity = Continuity(Position("e", 3))
    continuity.subscribed("e", 3, recovered=True)
    assert continuity.arrived(6) is Verdict.HOLE
    assert continuity.position == Position("e", 3)
    assert continuity.tally.missing == 2
    assert not continuity.tally.kept


@pytest.mark.parametrize("offset", [1, 3])
def test_what_is_held_already_is_repeated(offset: int) -> None:
    continuity = Continuity(Position("e", 3))
    continuity.subscribed("e", 3, recovered=True)
    assert continuity.arrived(offset) is Verdict.REPEATED
    assert continuity.position == Position("e", 3)
    assert not continuity.tally.kept
