"""Telling the database's refusal of a message from its other errors. Pure, knows no driver."""

import re
from collections.abc import Iterator

from publisher.errors import Rejected

CHECK_VIOLATION = "23514"
INVALID_TEXT = "22P02"
TOO_COMPLEX = "54001"


def rejection(error: BaseException, *, in_pipeline: bool = False) -> Rejected | None:
    """The refusal that ``error`` stands for; None if it is about something else.

    ``error`` is psycopg's, or one whose cause is (Django's, SQLAlchemy's). The text is the
    schema's own. In a pipeline an error may be that of an earlier statement, so there only errors
    of the outbox table's constraints count.
    """
    for cause in _causes(error):
        sqlstate = getattr(cause, "sqlstate", None)
        diagnosis = getattr(cause, "diag", None)
        if sqlstate is None or diagnosis is None:
            continue
        if sqlstate == CHECK_VIOLATION:
            if "tidegate.reject(" in (diagnosis.context or ""):
                return Rejected(str(diagnosis.message_primary), sqlstate)
        elif sqlstate == INVALID_TEXT and not in_pipeline:
            return Rejected(f"payload is not valid JSON{_line(diagnosis.context)}", sqlstate)
        elif sqlstate == TOO_COMPLEX and not in_pipeline:
            return Rejected("payload is nested too deep for the server's max_stack_depth", sqlstate)
        return None
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was raised from; frameworks wrap the driver's error once or twice."""
    cause: BaseException | None = error
    for _ in range(4):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__


def _line(context: str | None) -> str:
    """Where in the text: the server's context begins ``JSON data, line 3: …`` and quotes it."""
    found = re.match(r"JSON data, line (\d+)", context or "")
    return f", error in line {found[1]}" if found else ""
