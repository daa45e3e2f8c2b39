"""Every key that Tidegate uses in Redis.

All keys of a shard carry one hash tag, ``{<epoch>:<shard>}``, so a script may touch them together
in Redis Cluster. The epoch is part of the tag: data of a lost history can never be taken for data
of the present one.
"""

EPOCH = "tg:epoch"
"""String: the epoch that relays write. Gateways look here once a second."""

GATEWAYS = "tg:{gateway}:workers"
"""Hash: worker id → JSON of what it last reported, with its epoch and its expiry."""


def leases(epoch: str) -> str:
    """Hash: shard → ``<relay id> <expiry, ms>``. Relays share with those of their history only."""
    return f"tg:{{relay:{epoch}}}:leases"


def relays(epoch: str) -> str:
    """Hash: relay id → expiry in ms of Redis' clock."""
    return f"tg:{{relay:{epoch}}}:relays"


def failing(epoch: str) -> str:
    """Hash: shard → why it stands still though others do not, in a line for operators."""
    return f"tg:{{relay:{epoch}}}:failing"


def bus(epoch: str, shard: int) -> str:
    """Stream: the shard's delivery bus; entry ids are ``<seq>-0``."""
    return f"tg:{{{epoch}:{shard}}}:bus"


def room(epoch: str, shard: int, tenant: str, room: str) -> str:
    """Stream: a room's recent messages for replay; entry ids are ``<offset>-0``."""
    return f"tg:{{{epoch}:{shard}}}:room:{tenant}:{room}"


def top(epoch: str, shard: int, tenant: str, room: str) -> str:
    """String: ``<last offset> <offset with which it was begun>`` of a room's stream.

    The stream is believed only where the two agree: Redis may lose the end of any stream.
    """
    return f"tg:{{{epoch}:{shard}}}:top:{tenant}:{room}"
