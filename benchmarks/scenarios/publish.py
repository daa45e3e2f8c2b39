"""What publishing costs the writer.

Transactions a second of pgbench's TPC-B-like transaction, and of a transaction that only inserts,
with one more row each: in an ordinary table of the same width, in the outbox by INSERT, in the
outbox by tidegate.publish(), or in the ordinary table with a pg_notify beside. They take turns in
each run in random order; percentages are of the ordinary table's in the same run. Without a relay
only the writer's cost is seen; with one, the relay's own work takes its share of the same cores.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict

from benchmarks.bench import Bench
from benchmarks.figures import Result, at_least
from benchmarks.servers import Installation, wait_until
from gateway.embedded.programs import find_programs

CLIENTS = (16, 64)
SCALE = 64
"""Branches: as many as clients, or they would wait for each other's."""
DURATION_S = 3.0
LEAST_S = 2
"""64 clients take their time to log in."""
DRAIN_TIMEOUT_S = 300.0

ORDINARY = """
CREATE TABLE ordinary (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    shard       int DEFAULT 0,
    tenant      text DEFAULT 'default',
    room        text,
    payload     json,
    payload_bin bytea,
    tags        jsonb,
    size_bytes  int DEFAULT 100,
    txid        xid8 DEFAULT pg_current_xact_id(),
    created_at  timestamptz DEFAULT clock_timestamp()
)
"""
TPCB = """
\\set aid random(1, 100000 * :scale)
\\set bid random(1, 1 * :scale)
\\set tid random(1, 10 * :scale)
\\set delta random(-5000, 5000)
BEGIN;
UPDATE pgbench_accounts SET abalance = abalance + :delta WHERE aid = :aid;
SELECT abalance FROM pgbench_accounts WHERE aid = :aid;
UPDATE pgbench_tellers SET tbalance = tbalance + :delta WHERE tid = :tid;
UPDATE pgbench_branches SET bbalance = bbalance + :delta WHERE bid = :bid;
INSERT INTO pgbench_history (tid, bid, aid, delta, mtime)
    VALUES (:tid, :bid, :aid, :delta, CURRENT_TIMESTAMP);
{statement}
END;
"""
SINGLE = """
\\set bid random(1, 1 * :scale)
{statement}
"""
PAYLOAD = (
    '{"account": 12345, "delta": -4321, "note": "as long as a small event may well be, in all"}'
)
ROW = f"(room, payload) VALUES ('branches:' || :bid, '{PAYLOAD}')"
STATEMENTS = {
    "table": f"INSERT INTO ordinary {ROW};",
    "insert": f"INSERT INTO tidegate.outbox {ROW};",
    "publish()": f"SELECT tidegate.publish('default', 'branches:' || :bid, '{PAYLOAD}');",
    "pg_notify": f"WITH row AS (INSERT INTO ordinary {ROW}) SELECT pg_notify('news', 'x' || :bid);",
}
TRANSACTIONS = {"TPC-B": (TPCB, 95.0), "one insert": (SINGLE, 85.0)}
"""Script, and the least percentage that publishing should leave."""


class NoPgbench(Exception):
    """pgbench is not installed. One line with the remedy."""


def run(bench: Bench, result: Result) -> None:
    program = pgbench()
    with bench.spread(), bench.servers.installation() as installed:
        scale = bench.crowd(SCALE, 2)
        environment = _environment(installed.dsn)
        bench.say(f"filling pgbench's tables, scale {scale}")
        _call(program, ["--initialize", "--quiet", f"--scale={scale}"], environment)
        with psycopg.connect(installed.dsn) as connection:
            connection.execute(ORDINARY)
        for _ in bench.runs():
            for relay in (False, True):
                _compare(bench, result, program, installed, environment, scale, relay)


def _compare(
    bench: Bench,
    result: Result,
    program: str,
    installed: Installation,
    environment: dict[str, str],
    scale: int,
    with_relay: bool,
) -> None:
    relay = installed.relay(bench.cores.all) if with_relay else None
    for name, (script, least_percent) in TRANSACTIONS.items():
        for clients in dict.fromkeys(bench.crowd(count) for count in CLIENTS):
            case = f"{name}, {clients} clients, {'with' if relay else 'without'} a relay"
            per_s: dict[str, float] = {}
            for variant in bench.shuffled(*STATEMENTS):
                file = installed.folder / "script.sql"
                file.write_text(script.format(statement=STATEMENTS[variant]))
                per_s[variant] = _transactions_per_s(
                    program, file, clients, bench.duration_s(DURATION_S), scale, environment
                )
                _clear(installed, drained=relay is not None)
            result.add(case, "table, tx/s", per_s["table"])
            for variant in list(STATEMENTS)[1:]:
                judged = variant != "pg_notify" and relay is None
                target = at_least(least_percent) if judged else None
                percent = 100 * per_s[variant] / per_s["table"]
                result.add(case, f"{variant}, %", percent, target)
    if relay is not None:
        relay.stop()


def _clear(installed: Installation, drained: bool) -> None:
    if drained:
        wait_until(
            lambda: not installed.query("SELECT count(*) FROM tidegate.outbox"),
            "an empty outbox",
            DRAIN_TIMEOUT_S,
        )
    with psycopg.connect(installed.dsn, autocommit=True) as connection:
        connection.execute("TRUNCATE ordinary, pgbench_history")
        if not drained:
            connection.execute("TRUNCATE tidegate.outbox")


def _transactions_per_s(
    program: str,
    script: Path,
    clients: int,
    duration_s: float,
    scale: int,
    environment: dict[str, str],
) -> float:
    said = _call(
        program,
        [
            *("--no-vacuum", "--protocol=prepared", "--jobs=2"),
            *(
                f"--client={clients}",
                f"--time={max(LEAST_S, round(duration_s))}",
                f"--scale={scale}",
            ),
            *("--file", str(script)),
        ],
        environment,
    )
    found = re.search(r"^tps = ([\d.]+) \(without", said, re.M)
    if found is None:
        raise RuntimeError(f"pgbench did not tell its tps: {said[-500:]}")
    return float(found[1])


def pgbench() -> str:
    """The path of pgbench. Raises NoPgbench."""
    beside = [str(programs.bin / "pgbench") for programs in find_programs()]
    for path in (shutil.which("pgbench"), *beside):
        if path is not None and os.access(path, os.X_OK):
            return path
    raise NoPgbench("pgbench is not installed (Debian: apt-get install postgresql-contrib)")


def _call(program: str, arguments: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        [program, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"pgbench failed: {done.stdout[-500:]}")
    return done.stdout


def _environment(dsn: str) -> dict[str, str]:
    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD"}
    names["dbname"] = "PGDATABASE"
    given = conninfo_to_dict(dsn)
    return {names[key]: str(value) for key, value in given.items() if key in names}
