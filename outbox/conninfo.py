"""What a Postgres connection string says, told without its password."""

import re

import psycopg
from psycopg.conninfo import conninfo_to_dict

_UNKNOWN_OPTION = re.compile(r'invalid (?:connection option|URI query parameter:) "(\w{1,40})"')


def problem(conninfo: str) -> str | None:
    """Why libpq cannot read it, to go on after the setting's name; None if it can."""
    try:
        conninfo_to_dict(conninfo)
    except psycopg.ProgrammingError as error:
        # libpq quotes the name of an option that it does not know, and whatever else it stumbles
        # over, which may be a part of the password.
        option = _UNKNOWN_OPTION.match(str(error))
        if option:
            return f"has the option {option[1]!r}, which Postgres does not know"
        return "is not a connection string: postgresql://user:password@host:5432/database"
    return None


def hosts(conninfo: str) -> str:
    """The hosts that it names, separated by commas; empty for libpq's default.

    Raises psycopg.ProgrammingError if there is a ``problem``.
    """
    given = conninfo_to_dict(conninfo)
    return str(given.get("host") or given.get("hostaddr") or "")
