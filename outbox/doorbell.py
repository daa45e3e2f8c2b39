"""The doorbell: how a relay sleeps until there is something to sequence.

An insert rings (NOTIFY) only if it cannot share the advisory lock of its shard, and a relay holds
that lock exclusively only while it sleeps. So no commit touches the notification queue under load,
and none does when the relay is dead. Nobody depends on the bell: where it does not work, the relay
looks again after a moment.

Going to sleep takes three steps, each an action of the caller:
``lock`` until it gives true, look into the outbox once more, ``wait``. An insert that came before
the lock either is still under way, so that the lock is refused, or was committed before that last
look. One that comes after it rings.
"""

import asyncio
import os
from collections.abc import Iterable
from typing import LiteralString

import psycopg
from psycopg.pq import PGnotify

from outbox.database import ADVISORY_CLASS, DOORBELL_CHANNEL, Connection

RELEASE: LiteralString = "SELECT pg_advisory_unlock_all()"
"""Statement that ends the sleep for writers: to be sent along with the next look at the outbox."""

_LOCK = """
    SELECT shard FROM unnest(%(shards)s::int[]) AS s (shard)
    WHERE pg_try_advisory_lock(%(class)s, shard)
"""
_ENABLED = """
    SELECT tgenabled <> 'D' FROM pg_catalog.pg_trigger
    WHERE tgrelid = 'tidegate.outbox'::regclass AND tgname = 'doorbell'
"""


class Doorbell:
    """The bell over one connection, which must be nobody else's while ``wait`` lasts."""

    def __init__(self, connection: Connection, wake: asyncio.Event) -> None:
        """``wake`` is set when it rings; others may set it too, to end a ``wait``."""
        self.locked: frozenset[int] = frozenset()
        """Shards whose inserts ring."""
        self.changed = False
        """Whether ``listen`` should be asked again."""
        self._connection = connection
        self._wake = wake
        self._shards: frozenset[int] = frozenset()
        self._failure: psycopg.Error | None = None
        connection.add_notify_handler(lambda notify: self._ring(notify.payload))

    async def listen(self) -> str | None:
        """Has the bell heard on this connection; gives the reason if that cannot work.

        Raises psycopg.Error if the connection fails.
        """
        self.changed = False
        if self._connection.pooled:
            return "a pooler stands before Postgres, where LISTEN does not work"
        try:
            await self._connection.execute(f"LISTEN {DOORBELL_CHANNEL}")
        except psycopg.OperationalError:
            raise
        except psycopg.Error as error:
            return f"LISTEN is refused ({error.diag.message_primary})"
        # Asked afterwards: if it is switched now, that is heard.
        cursor = await self._connection.execute(_ENABLED)
        row = await cursor.fetchone()
        if row is None or not row[0]:
            return "the trigger doorbell is off (SELECT tidegate.set_doorbell(true))"
        return None

    async def lock(self, shards: Iterable[int]) -> bool:
        """Tries for the locks of the shards that are not locked yet; whether all are.

        A lock is refused while a transaction that inserted into the shard is under way.
        """
        self._shards = frozenset(shards)
        if not self.locked <= self._shards:
            await self.release()
        missing = sorted(self._shards - self.locked)
        if missing:
            cursor = await self._connection.execute(
                _LOCK, {"shards": missing, "class": ADVISORY_CLASS}
            )
            self.locked |= {row[0] for row in await cursor.fetchall()}
        return self.locked == self._shards

    def prelude(self) -> LiteralString | None:
        """What to send along with the next look at the outbox if that is not the last look."""
        if not self.locked:
            return None
        self.locked = frozenset()
        return RELEASE

    async def release(self) -> None:
        """Gives the locks back: inserts do not ring any more."""
        prelude = self.prelude()
        if prelude is not None:
            await self._connection.execute(prelude)

    async def wait(self, timeout_s: float) -> bool:
        """Waits until ``wake`` is set, by the bell or by others; false after ``timeout_s``.

        Raises psycopg.OperationalError if the connection fails meanwhile.
        """
        loop = asyncio.get_running_loop()
        # Reading with a callback and not with psycopg's generator: there is nothing to cancel. On a
        # duplicate, because libpq closes its own descriptor at the first sign of an error, and by
        # the time that the event loop is told, the number may belong to somebody else's socket.
        descriptor = os.dup(self._connection.fileno())
        loop.add_reader(descriptor, self._read)
        try:
            self._read()
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
            woken = True
        except TimeoutError:
            woken = False
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        if self._failure is not None:
            raise self._failure
        return woken

    def _read(self) -> None:
        pgconn = self._connection.pgconn
        try:
            pgconn.consume_input()
            while notify := pgconn.notifies():
                self._heard(notify)
        except psycopg.Error as error:
            self._failure = psycopg.OperationalError(str(error))
            self._wake.set()

    def _heard(self, notify: PGnotify) -> None:
        self._ring(notify.extra.decode())

    def _ring(self, payload: str) -> None:
        if not payload.isdecimal():
            # Not a shard: the bell was switched on or off.
            self.changed = True
            self._wake.set()
        elif int(payload) in self._shards:
            self._wake.set()
