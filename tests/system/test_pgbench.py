"""A workload that was not written for this project: pgbench's TPC-B-like transactions.

A trigger on ``pgbench_history`` publishes each row to the room of its branch. Transactions of a
branch wait for each other at its row, so the branch's balance tells their order: each message must
continue where the one before it ended.
"""

import asyncio
import os
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable

import psycopg
from psycopg.conninfo import conninfo_to_dict

from tests.processes import Processes
from tests.sdk.door import Door
from tests.sdk.python_client import PythonClient
from tests.sdk.stack import Stack

BRANCHES = 4
CONNECTIONS = 8
TRANSACTIONS = 125
"""By each connection in each round."""
TRANSACTIONS_PER_S = 500
"""By all: slow enough that there is a middle for the client to be away in."""
TIMEOUT_S = 90

TRIGGER = """
CREATE FUNCTION announce() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM tidegate.publish('bank', 'branches:' || NEW.bid, jsonb_build_object(
        'teller', NEW.tid, 'account', NEW.aid, 'delta', NEW.delta,
        'balance', (SELECT bbalance FROM pgbench_branches WHERE bid = NEW.bid)));
    RETURN NULL;
END
$$;
CREATE TRIGGER announce AFTER INSERT ON pgbench_history FOR EACH ROW EXECUTE FUNCTION announce();
"""


async def pgbench(program: str, dsn: str, *arguments: str) -> str:
    """Run it to its end; what it said."""
    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD"}
    names["dbname"] = "PGDATABASE"
    given = conninfo_to_dict(dsn)
    environment = {names[key]: str(value) for key, value in given.items() if key in names}
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def rounds(run: Callable[[], Awaitable[str]], until: asyncio.Event) -> int:
    """How many were run: at least one begins after ``until`` was set."""
    count = 0
    while True:
        is_last = until.is_set()
        await run()
        count += 1
        if is_last:
            return count


async def test_each_history_row_is_received_once_and_in_order(
    migrated: str, redis_url: str, processes: Processes, require: Callable[[str], str]
) -> None:
    program = require("pgbench")
    await pgbench(program, migrated, "--initialize", f"--scale={BRANCHES}")
    with psycopg.connect(migrated) as connection:
        connection.execute(TRIGGER)
    rooms = [f"branches:{branch}" for branch in range(1, BRANCHES + 1)]
    stack = Stack(processes, migrated, redis_url, gateways=2)
    async with Door(stack.ports) as door:
        watcher = PythonClient(door.url, stack.token("bank"))
        await watcher.connect()
        for room in rooms:
            await watcher.subscribe(room)
        for room in rooms:
            await watcher.diary.count(room, "subscribed")
        diary = watcher.diary
        back = asyncio.Event()

        async def run() -> str:
            return await pgbench(
                program,
                migrated,
                *("--no-vacuum", "--protocol=prepared", "--jobs=2"),
                *(f"--client={CONNECTIONS}", f"--transactions={TRANSACTIONS}"),
                f"--rate={TRANSACTIONS_PER_S}",
            )

        async with asyncio.TaskGroup() as group:
            running = group.create_task(rounds(run, back))
            # In the middle the client loses its connection and comes back on the other gateway.
            await diary.wait(lambda: sum(diary.last.values()) >= 300, TIMEOUT_S)
            door.cut()
            for room in rooms:
                await diary.count(room, "subscribed", 2)
            back.set()

        with psycopg.connect(migrated) as connection:
            rows = connection.execute("SELECT bid, tid, aid, delta FROM pgbench_history").fetchall()
            balances = dict(
                connection.execute("SELECT bid, bbalance FROM pgbench_branches").fetchall()
            )
        assert len(rows) == running.result() * CONNECTIONS * TRANSACTIONS
        await diary.wait(lambda: sum(diary.last.values()) >= len(rows), TIMEOUT_S)
        await watcher.close()

    assert set(door.visits) == {0, 1}
    received: Counter[tuple[int, int, int, int]] = Counter()
    for branch, room in enumerate(rooms, 1):
        messages = watcher.diary.publications(room)
        assert [m.offset for m in messages] == [*range(1, len(messages) + 1)]
        assert watcher.diary.of(room, "subscribed")[1].recovered
        balance = 0
        for message in messages:
            balance += message.data["delta"]
            assert message.data["balance"] == balance, (room, message.offset)
            received[
                branch, message.data["teller"], message.data["account"], message.data["delta"]
            ] += 1
        assert balance == balances[branch]
    assert received == Counter(rows)
