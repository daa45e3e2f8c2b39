"""The audit of Postgres and Redis against each other; for ``tidegate verify``."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from redis.exceptions import RedisError

from outbox import database
from outbox.audit.findings import Findings
from outbox.audit.log import LogAudit
from outbox.audit.streams import StreamAudit
from outbox.layout import layout
from outbox.log import Log
from outbox.redis.connect import connect
from outbox.streams import Streams

CALL_TIMEOUT_S = 10.0
LOG_TIMEOUT_S = 30.0
ALSO = "additional Redis"
"""How the server of TIDEGATE_REDIS_URL_ALSO is spoken of."""


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict; ``problems`` is empty if all is well."""

    epoch: str
    checked: dict[str, int]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


async def verify(
    postgres_dsn: str,
    redis_url: str,
    room: tuple[str, str] | None,
    say: Callable[[str], None],
    redis_url_also: str = "",
) -> Report:
    """Audits everything, or one room and its bus; with ``redis_url_also`` both servers.

    Raises for Postgres or a first Redis that cannot be read.
    """
    findings, also = Findings(say), Findings(say)
    connection = await database.connect(postgres_dsn, application_name="tidegate-verify")
    pool = await database.open_pool(
        postgres_dsn, 0, 1, LOG_TIMEOUT_S, application_name="tidegate-verify"
    )
    sides = [(redis_url, findings)] + ([(redis_url_also, also)] if redis_url_also else [])
    clients = [connect(url, timeout_s=CALL_TIMEOUT_S, max_connections=2) for url, _ in sides]
    try:
        found = await layout(connection)
        log = Log(pool, LOG_TIMEOUT_S)
        in_log = LogAudit(connection, found, findings)
        if room is None:
            await in_log.all()
        else:
            await in_log.room(*room)
            if not findings.checked["rooms"]:
                findings.notes.clear()
                findings.wrong(f"room {room[1]} of tenant {room[0]} never had a message")
        for client, (_, into) in zip(clients, sides, strict=True):
            in_streams = StreamAudit(Streams(client), log, found, into)
            try:
                await (in_streams.all() if room is None else in_streams.room(*room))
            except RedisError as error:
                if into is findings:
                    raise
                # The first was audited all the same.
                into.wrong(f"cannot be audited: {error}".partition("\n")[0])
        if (await layout(connection)).epoch != found.epoch:
            findings.problems.clear()
            also.problems.clear()
            findings.wrong("the epoch changed during the audit: run it again")
    finally:
        for client in clients:
            await client.aclose()
        await pool.close()
        await connection.close()
    findings.close()
    also.close()
    return Report(
        found.epoch,
        findings.checked | {f"{what} ({ALSO})": n for what, n in also.checked.items()},
        (*findings.problems, *(f"{ALSO}: {problem}" for problem in also.problems)),
        (*findings.notes, *(f"{ALSO}: {note}" for note in also.notes)),
    )


def as_json(report: Report) -> str:
    """One JSON object with the fields of the report."""
    return json.dumps({"ok": not report.problems, **asdict(report)}, indent=2)


def summary(report: Report) -> str:
    """The report without its problems, for people."""
    counts = ", ".join(f"{count:,} {what}" for what, count in report.checked.items())
    verdict = f"{len(report.problems)} problems" if report.problems else "all is well"
    return "\n".join([f"epoch {report.epoch}: {counts}", *report.notes, verdict])
