"""A verdict that could not be bad would be worth nothing."""

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.trial import Trial
from tests.oracle import Fault

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


async def test_what_is_wrong_is_in_the_verdict(trial: Trial, cluster: Cluster) -> None:
    victim, _ = await trial.arrive(2)
    for _ in range(5):
        await trial.publish(*trial.rooms)
    await trial.delivered()
    assert (await trial.verdict()).good

    # A client that was not given one of its messages.
    said = victim.diary.said
    publications = [i for i, event in enumerate(said) if event.event == "publication"]
    del said[publications[len(publications) // 2]]
    del victim.diary._times[0]
    # A message that nobody committed.
    phantom = trial._published.pop(0)
    # A bus that lacks one in the middle.
    (bus, *_) = await cluster.buses()
    async with cluster.client() as client:
        (_, before, *_) = await client.xrevrange(bus)
        await client.xdel(bus, before[0])
    verdict = await trial.verdict()
    found = {(violation.fault, violation.client) for violation in verdict.violations}
    assert found == {(Fault.HOLE, victim.name), (Fault.PHANTOM, "")}
    assert phantom.content in str(verdict)
    assert any(line.startswith("bus ") for line in verdict.unsettled)
    assert not verdict.good
    # So that it is made anew.
    async with cluster.client() as client:
        await client.delete(bus)


async def test_who_lacks_messages_is_named(trial: Trial) -> None:
    (member,) = await trial.arrive(1)
    trial.links[member.name].refuse()
    await trial.publish(*trial.rooms)
    with pytest.raises(AssertionError, match=f"{member.name} lacks .*orders:0.*0 of 1"):
        await trial.delivered(1)
    trial.links[member.name].heal()
    await trial.delivered()
