"""Reconcile: bring a bus that lost entries, or lags behind, up to the head of its shard.

A bus may end early because a relay died between sequencing and appending, or because Redis lost
data: all of it, one key, or the newest entries with a failover. What follows its last seq stands in
the log, under the same positions and batches. A bus that ends beyond its shard's head, or that has
another message at some position, is the opposite case: Postgres lost commits that were delivered.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from redis.exceptions import RedisError

from outbox.errors import EpochChanged, Fork
from outbox.log import Log
from outbox.streams import Status, Streams
from outbox.witness import delivered

REFILL_WINDOW = 1_000
"""With how many of a shard's newest messages a bus is started: enough for the gateways' readers to
go on without the log, little enough to be done in a moment. Room streams fill with it."""

PAGE_MESSAGES = 500
MAX_ROUNDS = 5
"""How often a bus may be lost again under the hands of one refill before it is left for later."""


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What a reconciliation saw and did."""

    lasts: dict[int, int]
    """Shard → last seq of its bus afterwards; 0 if there is none and nothing to start it with."""
    heads: dict[int, int]
    """Shard → head in the log that it was brought up to."""
    refilled: int
    """Messages that were taken from the log and offered to the buses."""
    unfinished: frozenset[int]
    """Shards whose bus was lost again and again meanwhile: try again in a moment."""
    unreached: dict[int, RedisError | None]
    """Shards of a cluster that failed while others did not, and the error of the append, if it was
    one; otherwise their node is out of reach."""


Heads = Callable[[], Awaitable[tuple[str, Mapping[int, int]]]]
"""Reads the epoch and the heads of the shards from Postgres."""


async def reconcile(
    streams: Streams, log: Log, epoch: str, shards: Iterable[int], read_heads: Heads
) -> Reconciled:
    """Appends to each shard's bus what the log has beyond its last seq.

    ``read_heads`` is asked once, after the last seqs were read. A relay that is about to sequence
    asks under the locks of the shards and over the connection that it sequences with: no other
    server may vouch for that one.

    Raises:
        EpochChanged: the epoch in Postgres is not ``epoch``.
        Fork: the streams prove that Postgres lost delivered commits.
        redis.RedisError, psycopg.Error: as they come; what was done remains right. In a cluster
            errors of Redis that not all shards have come in ``unreached`` instead.
    """
    wanted = sorted(shards)
    # The order matters: appends follow commits and deliveries follow appends, so none of them is
    # beyond a head that is read later.
    lasts = await streams.last_ids(epoch, wanted)
    seen = await delivered(streams.client, epoch)
    log_epoch, heads = await read_heads()
    if log_epoch != epoch:
        raise EpochChanged(f"the epoch in Postgres is {log_epoch}, the relay worked with {epoch}")
    refilled = 0
    unfinished = set()
    failures: dict[int, RedisError] = {}
    for shard, last in list(lasts.items()):
        head = heads[shard]
        if last > head:
            raise Fork(f"the bus of shard {shard} ends at seq {last}, the log at {head}")
        if (reached := seen.get(shard, 0)) > head:
            raise Fork(
                f"a gateway has delivered shard {shard} up to {reached}, the log ends at {head}"
            )
        if last < head:
            try:
                lasts[shard], offered, finished = await _refill(
                    streams, log, epoch, shard, last, head
                )
            except RedisError as error:
                failures[shard] = error
                del lasts[shard]
                if streams.client.spans_shards or not lasts:
                    raise
                continue
            refilled += offered
            if not finished:
                unfinished.add(shard)
    return Reconciled(
        lasts,
        {shard: heads[shard] for shard in wanted},
        refilled,
        frozenset(unfinished),
        {shard: failures.get(shard) for shard in wanted if shard not in lasts},
    )


async def _refill(
    streams: Streams, log: Log, epoch: str, shard: int, last: int, head: int
) -> tuple[int, int, bool]:
    """Brings one bus up to ``head``.

    Gives its last seq, how many messages it was offered, and whether there is no more to do.
    """
    offered = 0
    rounds = 0
    after = refill_start(last, head, streams.limits.bus_length)
    while after < head:
        messages = await log.span(shard, after, head, PAGE_MESSAGES)
        if not messages:
            # Retention dropped them: the next message that is sequenced starts the bus.
            break
        # Beyond the last seq only where the bus is started, or retention left a gap.
        start = messages[0].seq != last + 1 or last == 0
        appended = await streams.append(
            epoch, shard, messages, start=start, redacted=await log.redacted(messages)
        )
        offered += len(messages)
        last = appended.last
        if appended.status is Status.FORK:
            raise Fork(
                f"the streams of shard {shard} hold other messages than the log up to {last}"
            )
        if appended.status is Status.APPENDED:
            after = last
            continue
        rounds += 1
        if rounds == MAX_ROUNDS:
            return last, offered, False
        after = refill_start(last, head, streams.limits.bus_length)
    return last, offered, True


def refill_start(last: int, head: int, bus_length: int) -> int:
    """The seq after which to read the log for a bus that ends at ``last``."""
    if last == 0 or head - last > bus_length:
        return max(head - min(REFILL_WINDOW, bus_length), 0)
    return last
