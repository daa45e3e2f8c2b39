"""The audit of Postgres and Redis against each other; for ``tidegate verify``."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

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
) -> Report:
    """Audits everything, or one room and its bus. Raises for a store that cannot be read."""
    findings = Findings(say)
    connection = await database.connect(postgres_dsn, application_name="tidegate-verify")
    pool = await database.open_pool(
        postgres_dsn, 0, 1, LOG_TIMEOUT_S, application_name="tidegate-verify"
    )
    client = connect(redis_url, timeout_s=CALL_TIMEOUT_S, max_connections=2)
    try:
        found = await layout(connection)
        in_log = LogAudit(connection, found, findings)
        in_streams = StreamAudit(Streams(client), Log(pool, LOG_TIMEOUT_S), found, findings)
        if room is None:
            await in_log.all()
            await in_streams.all()
        else:
            await in_log.room(*room)
            if not findings.checked["rooms"]:
                findings.notes.clear()
                findings.wrong(f"room {room[1]} of tenant {room[0]} never had a message")
            await in_streams.room(*room)
        if (await layout(connection)).epoch != found.epoch:
            findings.problems.clear()
            findings.wrong("the epoch changed during the audit: run it again")
    finally:
        await client.aclose()
        await pool.close()
        await connection.close()
    findings.close()
    return Report(
        found.epoch, dict(findings.checked), tuple(findings.problems), tuple(findings.notes)
    )


def as_json(report: Report) -> str:
    """One JSON object with the fields of the report."""
    return json.dumps({"ok": not report.problems, **asdict(report)}, indent=2)


def summary(report: Report) -> str:
    """The report without its problems, for people."""
    counts = ", ".join(f"{count:,} {what}" for what, count in report.checked.items())
    verdict = f"{len(report.problems)} problems" if report.problems else "all is well"
    return "\n".join([f"epoch {report.epoch}: {counts}", *report.notes, verdict])
