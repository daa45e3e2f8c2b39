"""Key names: one hash tag for each shard, and no two things under one name."""

from redis.crc import key_slot

from outbox import keys


def test_the_keys_of_a_shard_lie_on_one_slot() -> None:
    names = [
        keys.bus("e1", 5),
        keys.room("e1", 5, "acme", "a"),
        keys.room("e1", 5, "acme", "{b}:c"),
        keys.room("e1", 5, "beta", "x:y"),
        keys.top("e1", 5, "beta", "x:y"),
    ]
    assert len({key_slot(name.encode()) for name in names}) == 1


def test_the_leases_and_the_relays_lie_on_one_slot() -> None:
    assert key_slot(keys.leases("e1").encode()) == key_slot(keys.relays("e1").encode())


def test_names_differ_by_epoch_shard_tenant_and_room() -> None:
    names = {
        keys.bus("e1", 1),
        keys.bus("e1", 11),
        keys.bus("e11", 1),
        keys.room("e1", 1, "a", "b:c"),
        keys.room("e1", 1, "a.b", "c"),
        keys.room("e1", 1, "a", "b"),
        keys.room("e1", 1, "a", "bus"),
        keys.top("e1", 1, "a", "b"),
        keys.EPOCH,
        keys.leases("e1"),
        keys.leases("e11"),
        keys.relays("e1"),
        keys.GATEWAYS,
    }
    assert len(names) == 13
