"""The promises, kept by real processes while everything that may fail fails.

Writers commit to rooms of several tenants, clients come and go between two gateways, and in the
middle a relay and a gateway are killed and Redis loses everything. Afterwards each room's log is
what was committed, and each client was given its rooms' offsets 1 … n, once, in order.

``TIDEGATE_TEST_SEED=…`` repeats the choices of a run (not its timing).
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from redis.asyncio import Redis

from publisher import Message, publish_many
from tests.oracle import Committed, Key, Violation, assemble, judge, judge_log
from tests.processes import Process, Processes
from tests.sdk.door import Door
from tests.sdk.node_client import NodeProgram
from tests.sdk.python_client import PythonClient
from tests.sdk.stack import Stack
from tests.system.crowd import Member, Watcher
from tests.system.progress import Progress
from tests.system.raw_client import RawClient
from tests.system.writers import Writer, content

TENANTS = ("acme", "globex", "initech", "umbrella", "default")
ROOMS_PER_TENANT = 40
WRITERS = 20
MESSAGES = 10_000
CLIENTS = 60
ROOMS_PER_CLIENT = 10
LATE = 0.1
"""The share of clients that come when the writers are under way, and read from the start."""
SETTLE_S = 60.0

# Small, so that those who come back need all places where the past is kept, and more than a page.
SETTINGS = {
    "TIDEGATE_ROOM_RING_MESSAGES": "6",
    "TIDEGATE_ROOM_STREAM_MESSAGES": "12",
    "TIDEGATE_REPLAY_PAGE_MESSAGES": "5",
    "TIDEGATE_ROOM_LINGER_S": "1",
    "TIDEGATE_BUS_MESSAGES": "200",
}


@pytest.mark.timeout(300)
async def test_every_client_is_given_what_was_committed(
    migrated: str,
    redis_url: str,
    processes: Processes,
    node: str | None,
    seed: int,
    tmp_path: Path,
) -> None:
    print(f"TIDEGATE_TEST_SEED={seed}")
    pick = random.Random(seed)
    rooms = [(tenant, f"orders:{i}") for tenant in TENANTS for i in range(ROOMS_PER_TENANT)]
    stack = Stack(processes, migrated, redis_url, relays=2, gateways=2, **SETTINGS)
    progress = Progress()
    writers = [
        Writer(f"writer-{i}", migrated, rooms, MESSAGES // WRITERS, pick.getrandbits(32), progress)
        for i in range(WRITERS)
    ]
    async with crowd(stack, node, pick) as members:
        early = [member for member in members if pick.random() >= LATE]
        late = [member for member in members if member not in early]
        await gather(member.arrive() for member in early)
        await gather(member.settled() for member in early)
        async with asyncio.TaskGroup() as group:
            for member in early:
                group.create_task(member.live(progress))
            for member in late:
                group.create_task(come_late(member, progress, pick.randint(500, 9_000)))
            troubles = group.create_task(trouble(stack, progress, pick))
            await gather(writer.run() for writer in writers)
            progress.finish()
        committed = [message for writer in writers for message in writer.committed]
        assert len(committed) == MESSAGES
        committed += farewell(migrated, rooms)
        log, violations = await log_of(migrated, len(committed))
        heads = {key: len(contents) for key, contents in log.items()}
        unread = await asyncio.gather(
            *(member.read_up_to(heads, SETTLE_S) for member in members), return_exceptions=True
        )
    records = [record for member in members for record in member.records()]
    violations += judge_log(log, committed) + judge(log, records)
    moves = sum(member.moves for member in members)
    kinds = Counter(member.name.split("-")[0] for member in members)
    print(
        f"{len(committed)} messages committed, {sum(w.rolled_back for w in writers)} rolled back; "
        f"{dict(kinds)} clients, {sum(m.absences for m in members)} absences, "
        f"{moves} moves to the other gateway; {troubles.result()}"
    )
    if violations or any(unread):
        keep(tmp_path, seed, members, log, violations)
    assert not violations, "\n".join(
        [f"seed {seed}, {len(violations)} violations:", *map(str, violations[:30])]
    )
    assert not any(unread), unread
    assert moves >= CLIENTS, "the clients hardly came back on the other gateway"


async def gather(work: Any) -> None:
    """Await all; the first failure ends it."""
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)


@asynccontextmanager
async def crowd(stack: Stack, node: str | None, pick: random.Random) -> AsyncIterator[list[Member]]:
    """Clients of all kinds, spread over tenants and gateways, which leave no room unwatched."""
    async with AsyncExitStack() as ends:
        program = None if node is None else await ends.enter_async_context(NodeProgram(node))
        members: list[Member] = []
        for i in range(CLIENTS):
            tenant = TENANTS[i % len(TENANTS)]
            turn = i // len(TENANTS)
            own = {f"orders:{n}" for n in range(ROOMS_PER_TENANT) if n % 12 == turn}
            others = [f"orders:{n}" for n in range(ROOMS_PER_TENANT) if f"orders:{n}" not in own]
            rooms = [*own, *pick.sample(others, ROOMS_PER_CLIENT - len(own))]
            door = await ends.enter_async_context(Door(stack.ports, first=i % 2))
            token = stack.token(tenant, f"user-{i}")
            client: Watcher
            kind = ("raw", "python", "javascript")[i % 3]
            name = f"{kind}-{i}"
            if kind == "javascript" and program is not None:
                client = await program.open(name, door.url, token)
            elif kind == "python":
                client = PythonClient(door.url, token)
            else:
                client, name = RawClient(door.url, token, pick.getrandbits(32)), f"raw-{i}"
            member = Member(name, tenant, sorted(rooms), client, door, pick.getrandbits(32))
            ends.push_async_callback(member.leave)
            members.append(member)
        yield members


async def come_late(member: Member, progress: Progress, after: int) -> None:
    await progress.reach(after)
    await member.arrive(late=True)
    await member.live(progress)


async def trouble(stack: Stack, progress: Progress, pick: random.Random) -> list[str]:
    """A relay killed, a gateway killed, Redis emptied: each once, in any order, also together."""
    relay, gateway = pick.choice(stack.relays), pick.choice(stack.gateways)
    order: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        (f"{relay.name} killed", lambda: killed(relay, progress, pick.randint(50, 1_000))),
        (f"{gateway.name} killed", lambda: killed(gateway, progress, pick.randint(50, 1_000))),
        ("FLUSHALL", lambda: flushed(stack.redis_url)),
    ]
    pick.shuffle(order)
    times = sorted(pick.randint(MESSAGES // 10, MESSAGES * 8 // 10) for _ in order)
    done: list[str] = []
    async with asyncio.TaskGroup() as group:
        for (name, act), when in zip(order, times, strict=True):
            await progress.reach(when)
            done.append(f"{name} at {progress.count}")
            group.create_task(_awaited(act()))
    return done


async def _awaited(work: Awaitable[None]) -> None:
    await work


async def killed(process: Process, progress: Progress, absence: int) -> None:
    """SIGKILL, and a new start so many commits later."""
    await asyncio.to_thread(process.kill)
    await progress.reach(progress.count + absence)
    await asyncio.to_thread(process.restart)
    if process.port:
        await asyncio.to_thread(process.wait_ready)


async def flushed(redis_url: str) -> None:
    client = Redis.from_url(redis_url)
    try:
        await client.flushall()
    finally:
        await client.aclose()


def farewell(dsn: str, rooms: Sequence[Key]) -> list[Committed]:
    """One more message to each room, after which nothing may come."""
    last = {"id": "farewell"}
    with psycopg.connect(dsn) as connection:
        txid = publish_many(
            connection, [Message(room, last | {"of": [t, room]}, tenant=t) for t, room in rooms]
        )
    # Every other commit had returned before this one began.
    return [
        Committed((t, room), content(txid, last | {"of": [t, room]}), "farewell", i, 1e18, 1e18)
        for i, (t, room) in enumerate(rooms)
    ]


async def log_of(dsn: str, expected: int) -> tuple[dict[Key, list[str]], list[Violation]]:
    """The log, once the relays have emptied the outbox. What they leave there is missing in it."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        deadline = asyncio.get_running_loop().time() + SETTLE_S
        while left := await _number(connection, "SELECT count(*) FROM tidegate.outbox"):
            if asyncio.get_running_loop().time() > deadline:
                print(f"{left} rows are left in the outbox")
                break
            await asyncio.sleep(0.05)
        cursor = await connection.execute(
            'SELECT tenant, room, "offset", txid::text, payload::text FROM tidegate.message'
        )
        rows = [
            ((tenant, room), offset, content(txid, json.loads(payload)))
            async for tenant, room, offset, txid, payload in cursor
        ]
    print(f"{len(rows)} messages in the log, {expected} expected")
    return assemble(rows)


async def _number(connection: psycopg.AsyncConnection[Any], sql: Any) -> int:
    row = await (await connection.execute(sql)).fetchone()
    assert row is not None
    return int(row[0])


def keep(
    folder: Path,
    seed: int,
    members: Sequence[Member],
    log: dict[Key, list[str]],
    violations: Sequence[Violation],
) -> None:
    """Leave what is needed to find the cause, next to the processes' logs."""
    with (folder / "violations.txt").open("w") as file:
        file.write(f"seed {seed}\n")
        file.writelines(f"{violation}\n" for violation in violations)
    with (folder / "heads.json").open("w") as file:
        json.dump({"/".join(key): len(contents) for key, contents in log.items()}, file)
    for member in members:
        with (folder / f"{member.name}.jsonl").open("w") as file:
            for at, said in member.diary.timed():
                fields = {k: v for k, v in said.fields.items() if k != "data"}
                line = {"at": at, "event": said.event, "channel": said.channel, **fields}
                file.write(json.dumps(line) + "\n")
    print(f"records and logs are in {folder}")
