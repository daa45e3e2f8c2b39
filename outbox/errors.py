"""What can go wrong between the outbox table and the streams."""


class OutboxError(Exception):
    """Base of all errors of this package. The message is one line for an operator."""


class UnsupportedServer(OutboxError):
    """Postgres or Redis is too old or is set up in a way that would lose or alter messages."""


class AccessRefused(OutboxError):
    """Postgres or Redis knows no such user or database, or the user lacks a password or rights."""


class SchemaMismatch(OutboxError):
    """The schema is missing, older than this version, newer, or has another shard layout."""


class SchemaBehind(SchemaMismatch):
    """The schema is missing or older than this version needs: a migration may be on its way."""


class EpochChanged(OutboxError):
    """The epoch in Postgres is not the one that the caller worked with."""


class Fork(OutboxError):
    """Redis holds messages that Postgres does not have: Postgres lost delivered commits."""


class PostgresUnavailable(OutboxError):
    """Postgres did not answer, or not in time; trying again is right."""
