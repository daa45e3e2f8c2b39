"""A run: a trial of a cluster under a schedule of faults, with a report at the end."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from outbox import tasks
from tests.chaos.cluster import Cluster
from tests.chaos.faults import inject
from tests.chaos.report import Delivery, Injected, Report
from tests.chaos.schedule import Fault, dump
from tests.chaos.trial import Trial
from tests.system.writers import content

TENANTS = 4
ROOMS = 10
"""Per tenant."""
SETTLE_S = 180.0
"""Above the time in which a relay gives up a link to Postgres that hangs."""

Say = Callable[[str], None]


async def run(
    cluster: Cluster,
    faults: Sequence[Fault],
    seed: int,
    duration_s: float,
    folder: Path,
    say: Say,
    *,
    clients: int = 20,
    churners: int = 2,
    writers: int = 8,
) -> Report:
    """Runs the schedule and judges. Leaves the schedule in ``folder``, and after a violation all
    that is needed to find its cause."""
    say(f"seed {seed}: {len(faults)} faults in {duration_s:.0f} s")
    (folder / "schedule.jsonl").write_text(dump(faults))
    trial = Trial(cluster, seed, tenants=TENANTS, rooms=ROOMS)
    injected: list[Injected] = []
    troubles: list[str] = []
    restarts = cluster.restarts
    # Healing may take longer than the schedule has it.
    turns = {fault.target: asyncio.Lock() for fault in faults}
    supervising = asyncio.create_task(cluster.supervise())
    try:
        await trial.arrive(TENANTS, "steady")
        await trial.arrive(clients)
        await trial.arrive(max(1, clients // 5), "slow", pause_s=0.3)
        trial.write(writers, pause_s=0.4)
        started = time.monotonic()
        async with trial.churning(churners), asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(max(0.0, started + fault.at_s - time.monotonic()))
                group.create_task(
                    _one(fault, trial, turns[fault.target], injected, troubles, started, say)
                )
            await asyncio.sleep(max(0.0, started + duration_s - time.monotonic()))
        cluster.heal()
        say("all faults are healed; waiting until everything has come to rest")
        verdict = await trial.verdict(SETTLE_S)
        report = Report(
            seed,
            duration_s,
            tuple(sorted(injected, key=lambda one: one.began_s)),
            tuple(_deliveries(trial, started)),
            sum(said.event == "closed" for m in trial.members for said in m.diary.said),
            sum(
                said.event == "subscribed" and said.was_recovering and said.recovered
                for m in trial.members
                for said in m.diary.said
            ),
            sum(
                said.event == "subscribed" and said.was_recovering and not said.recovered
                for m in trial.members
                for said in m.diary.said
            ),
            trial.two_phases.prepared,
            cluster.restarts - restarts,
            verdict,
            (*troubles, *_tracebacks(cluster)),
        )
        if not report.good:
            _keep(folder, trial)
    finally:
        await tasks.end((supervising,))
        await trial.close()
    return report


async def _one(
    fault: Fault,
    trial: Trial,
    turn: asyncio.Lock,
    injected: list[Injected],
    troubles: list[str],
    started: float,
    say: Say,
) -> None:
    async with turn:
        say(str(fault))
        began_s = time.monotonic() - started
        try:
            async with inject(fault, trial):
                await asyncio.sleep(fault.lasts_s)
        except Exception as error:
            # The run goes on: what it finds may explain it.
            troubles.append(f"{fault}: {type(error).__name__}: {error}")
    injected.append(Injected(fault, began_s, time.monotonic() - started))


def _deliveries(trial: Trial, started: float) -> list[Delivery]:
    """To the steady clients: a message counts when the last of its tenant's has it."""
    since_1970_s = time.time() - time.monotonic()
    committed = {message.content: message.committed_at for message in trial.committed}
    received: dict[str, float] = {}
    for member in trial.members:
        if not member.name.startswith("steady"):
            continue
        for at, said in member.diary.timed():
            if said.event == "publication":
                text = content(said.tags.get("txid", ""), said.data)
                received[text] = max(received.get(text, 0.0), at - since_1970_s)
    return [
        Delivery(committed[text] - started, at - started)
        for text, at in received.items()
        if committed.get(text, float("inf")) < float("inf")
    ]


def _tracebacks(cluster: Cluster) -> list[str]:
    return [
        f"{process.name} wrote a traceback: {process.log}"
        for process in cluster.processes.all.values()
        if "Traceback" in process.text()
    ]


def _keep(folder: Path, trial: Trial) -> None:
    """The clients' records, next to the processes' logs."""
    for member in trial.members:
        with (folder / f"{member.name}.jsonl").open("w") as file:
            for at, said in member.diary.timed():
                fields = {k: v for k, v in said.fields.items() if k != "data"}
                line = {"at": at, "event": said.event, "channel": said.channel, **fields}
                file.write(json.dumps(line) + "\n")
    with contextlib.suppress(OSError):
        (folder / "committed.jsonl").write_text(
            "".join(
                json.dumps([*m.key, m.content[:200], m.transaction, m.committed_at]) + "\n"
                for m in trial.committed
            )
        )
