"""The audit: silent where all is well, and for each kind of damage a line that names it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest
import redis as redis_client

from gateway.operate import verification
from outbox import keys, redaction
from outbox.audit import log as log_audit
from outbox.audit import streams as stream_audit
from outbox.entry import encode
from outbox.message import Message
from tests.probe import Probe
from tests.processes import Processes

ROOMS = ["a", "b", "c"]
EACH = 5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_audit, "PATIENCE_S", 0.2)
    monkeypatch.setattr(stream_audit, "LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr(stream_audit, "FOREIGN_WAIT_S", 0.3)
    monkeypatch.setattr(stream_audit, "PAGE_ENTRIES", (1, 3))
    monkeypatch.setattr(log_audit, "PAGE_SEQS", 4)
    monkeypatch.setattr(log_audit, "PAGE_ROOMS", 2)


@pytest.fixture
async def probe(migrated: str, redis_url: str) -> AsyncIterator[Probe]:
    """Some messages in log and streams, all in one place, as a relay leaves them."""
    async with Probe(migrated, redis_url) as probe:
        await probe.streams.set_epoch(probe.epoch)
        messages = await probe.sequence(*ROOMS * EACH)
        for shard in {message.shard for message in messages}:
            mine = [message for message in messages if message.shard == shard]
            await probe.streams.append(probe.epoch, shard, mine, start=True)
        yield probe


async def audit(probe: Probe, url: str, room: str | None = None) -> verification.Report:
    only = None if room is None else ("acme", room)
    return await verification.verify(probe.dsn, url, only, lambda line: None)


async def test_all_is_well(probe: Probe, redis_url: str) -> None:
    report = await audit(probe, redis_url)
    assert report.problems == report.notes == ()
    assert report.checked["messages in the log"] == len(ROOMS) * EACH
    assert report.checked["messages on the buses"] == len(ROOMS) * EACH
    assert report.checked["room streams"] == len(ROOMS)
    assert report.checked["rooms"] == len(ROOMS)
    one = await audit(probe, redis_url, "b")
    assert one.problems == ()
    assert one.checked["rooms"] == one.checked["room streams"] == 1


async def test_what_is_normal_is_no_problem(probe: Probe, redis_url: str) -> None:
    """Retention, trimmed buses, expired room streams, rows in the outbox, a redaction."""
    shard = probe.shard("a")
    bus = keys.bus(probe.epoch, shard)
    await replaced(probe, bus, lambda m: m._replace(created_us=0) if m.seq <= 4 else m)
    await probe.connection.execute(
        "DELETE FROM tidegate.message WHERE shard = %s AND seq <= 4", (shard,)
    )
    await probe.client.xtrim(bus, minid=3, approximate=False)
    await probe.client.delete(keys.room(probe.epoch, probe.shard("b"), "acme", "b"))
    done = await redaction.redact(probe.connection, "acme", "a", 5)
    await probe.streams.erase(probe.epoch, shard, "acme", "a", done.seq)
    # As an older relay leaves it: what it appended is not in the top.
    key = keys.top(probe.epoch, probe.shard("c"), "acme", "c")
    await probe.client.set(key, f"{EACH - 2} 1")
    report = await audit(probe, redis_url)
    assert report.problems == ()
    assert report.checked["messages in the outbox"] == 1


async def replaced(probe: Probe, key: str, change: Callable[[Message], Message | None]) -> None:
    """Writes a stream anew, each message as ``change`` gives it; None leaves it out."""
    shard = int(key.partition("}")[0].rpartition(":")[2])
    entries = await probe._read(key, shard)
    raw = cast(Any, await probe.client.xrange(key))
    await probe.client.delete(key)
    for (id, fields), message in zip(raw, entries, strict=True):
        new = change(message)
        if new is not None:
            own = {b"m": encode(new), b"b": new.batch.encode()}
            await probe.client.xadd(key, {**fields, **own}, id=id)


def third(message: Message, **changes: Any) -> Message:
    return message._replace(**changes) if message.offset == 3 and message.room == "a" else message


async def _sql(probe: Probe, statement: str) -> None:
    await probe.connection.execute(cast(Any, statement))


def sql(statement: str) -> Callable[[Probe], Awaitable[None]]:
    return lambda probe: _sql(probe, statement)


async def doubled(probe: Probe) -> None:
    """In another partition, where no index is in the way."""
    await probe.connection.execute(
        'INSERT INTO tidegate.message SELECT shard, seq, tenant, room, "offset", batch, txid, '
        "tags, payload, payload_bin, size_bytes, created_at, sequenced_at + interval '1 day' "
        "FROM tidegate.message WHERE room = 'a' AND \"offset\" = 3"
    )


async def bus_without(probe: Probe) -> None:
    shard = probe.shard("a")
    (message,) = [m for m in await probe.on_bus(shard) if (m.room, m.offset) == ("a", 3)]
    await probe.client.xdel(keys.bus(probe.epoch, shard), f"{message.seq}-0")


async def bus_without_its_end(probe: Probe) -> None:
    """Deleted, not lost: the stream's last id stays."""
    shard = probe.shard("a")
    newest = (await probe.on_bus(shard))[-1]
    await probe.client.xdel(keys.bus(probe.epoch, shard), f"{newest.seq}-0")


async def bus_emptied(probe: Probe) -> None:
    key = keys.bus(probe.epoch, probe.shard("a"))
    await probe.client.xtrim(key, maxlen=0, approximate=False)


async def bus_of_another_type(probe: Probe) -> None:
    key = keys.bus(probe.epoch, probe.shard("a"))
    await probe.client.delete(key)
    await probe.client.set(key, "x")


async def room_emptied(probe: Probe) -> None:
    key = keys.room(probe.epoch, probe.shard("a"), "acme", "a")
    await probe.client.xtrim(key, maxlen=0, approximate=False)


async def room_of_another_type(probe: Probe) -> None:
    key = keys.room(probe.epoch, probe.shard("a"), "acme", "a")
    await probe.client.delete(key)
    await probe.client.set(key, "x")


async def bus_altered(probe: Probe) -> None:
    key = keys.bus(probe.epoch, probe.shard("a"))
    await replaced(probe, key, lambda m: third(m, payload=b'"else"'))


async def bus_of_another_batch(probe: Probe) -> None:
    key = keys.bus(probe.epoch, probe.shard("a"))
    await replaced(probe, key, lambda m: third(m, batch="other"))


async def bus_ahead(probe: Probe) -> None:
    await probe.client.xadd(keys.bus(probe.epoch, probe.shard("a")), {"b": "x"}, id="999-0")


async def bus_gone(probe: Probe) -> None:
    await probe.client.delete(keys.bus(probe.epoch, probe.shard("a")))


async def bus_unreadable(probe: Probe) -> None:
    key = keys.bus(probe.epoch, probe.shard("b"))
    (seq, *_) = [m.seq for m in await probe.on_bus(probe.shard("b"))]
    raw = cast(Any, await probe.client.xrange(key))
    await probe.client.delete(key)
    for id, fields in raw:
        await probe.client.xadd(key, {"x": "y"} if id == b"%d-0" % seq else fields, id=id)


async def room_with_a_hole(probe: Probe) -> None:
    await probe.client.xdel(keys.room(probe.epoch, probe.shard("a"), "acme", "a"), "3-0")


async def room_altered(probe: Probe) -> None:
    key = keys.room(probe.epoch, probe.shard("a"), "acme", "a")
    await replaced(probe, key, lambda m: third(m, payload=b'"else"'))


async def room_without_its_end(probe: Probe) -> None:
    key = keys.room(probe.epoch, probe.shard("a"), "acme", "a")
    await replaced(probe, key, lambda m: m if m.offset < EACH else None)


async def room_too_short(probe: Probe) -> None:
    """Its newest message is missing although the bus has it: a replay would be incomplete."""
    await room_without_its_end(probe)
    await probe.client.set(keys.top(probe.epoch, probe.shard("a"), "acme", "a"), f"{EACH - 1} 1")


async def room_too_long(probe: Probe) -> None:
    key = keys.room(probe.epoch, probe.shard("a"), "acme", "a")
    (last,) = [m for m in await probe.in_room("a") if m.offset == EACH]
    blob = encode(last._replace(offset=EACH + 1))
    await probe.client.xadd(key, {"b": "x", "m": blob, "s": last.seq}, id=f"{EACH + 1}-0")


async def room_in_another_shard(probe: Probe) -> None:
    key = keys.room(probe.epoch, (probe.shard("a") + 1) % probe.shards, "acme", "a")
    await probe.client.xadd(key, {"b": "x"}, id="1-0")


async def redacted_and_there(probe: Probe) -> None:
    await redaction.redact(probe.connection, "acme", "a", 3)


async def another_epoch(probe: Probe) -> None:
    await probe.streams.set_epoch("0123456789abcdef")


DAMAGE: list[tuple[Callable[[Probe], Awaitable[None]], str]] = [
    (
        sql("DELETE FROM tidegate.message WHERE room = 'a' AND \"offset\" = 3"),
        "missing from the log",
    ),
    (
        sql("DELETE FROM tidegate.message WHERE room = 'a' AND \"offset\" = 3"),
        "room acme a: 1 offsets",
    ),
    (doubled, "twice in the log: seq"),
    (doubled, "room acme a: 1 offsets are twice in the log"),
    (sql("UPDATE tidegate.shard SET head = head + 7 WHERE head > 0"), "the log ends at seq"),
    (
        sql("UPDATE tidegate.room SET head = 4 WHERE name = 'a'"),
        "its head is 4, the log ends at offset 5",
    ),
    (sql("DELETE FROM tidegate.room WHERE name = 'a'"), "room acme a has messages and no head"),
    (
        sql("UPDATE tidegate.room SET shard = (shard + 1) % 16 WHERE name = 'b'"),
        "room acme b is in shard",
    ),
    (
        sql(
            "INSERT INTO tidegate.room SELECT tenant, name, shard, head + 1 "
            "FROM tidegate.room WHERE name = 'b'"
        ),
        "has two heads",
    ),
    (sql("DELETE FROM tidegate.shard WHERE id = 9"), "table tidegate.shard has rows"),
    (
        sql("UPDATE tidegate.message SET payload = '1' WHERE room = 'a' AND \"offset\" = 3"),
        "Redis and the log differ in payload",
    ),
    (
        sql("UPDATE tidegate.message SET payload = NULL WHERE room = 'a' AND \"offset\" = 3"),
        "have no payload, or two",
    ),
    (
        sql(
            'UPDATE tidegate.message SET "offset" = 99 WHERE room = \'a\' AND "offset" = 4; '
            'UPDATE tidegate.message SET "offset" = 4 WHERE room = \'a\' AND "offset" = 5; '
            'UPDATE tidegate.message SET "offset" = 5 WHERE room = \'a\' AND "offset" = 99'
        ),
        "another order by seq",
    ),
    (sql("DELETE FROM tidegate.message WHERE seq = 1"), "missing from the log, not by retention"),
    (sql("DELETE FROM tidegate.message"), "missing from the log, not by retention: seq 1, 2, 3"),
    (bus_without, "missing from the bus"),
    (bus_without_its_end, "missing from the bus"),
    (bus_emptied, "missing from the bus"),
    (bus_of_another_type, "the bus ends at seq 0"),
    (room_emptied, "its stream ends at offset 0, it stood at 5: Redis lost its end"),
    (room_of_another_type, "its stream ends at offset 0, it stood at 5: Redis lost its end"),
    (bus_altered, "Redis and the log differ in payload"),
    (bus_of_another_batch, "Redis and the log differ in batch"),
    (bus_ahead, "Postgres lost commits"),
    (bus_gone, "the bus ends at seq 0"),
    (bus_unreadable, "the entry cannot be read"),
    (room_with_a_hole, "room acme a: offset 3 is missing from its stream"),
    (room_altered, "room acme a: offset 3: Redis and the log differ in payload"),
    (room_without_its_end, "its stream ends at offset 4, it stood at 5: Redis lost its end"),
    (room_too_short, "its stream ends at offset 4, as of the same seq the log at 5"),
    (room_too_long, "offset 6 is on its stream and not in the log"),
    (room_in_another_shard, "room acme a has a stream in shard"),
    (redacted_and_there, "redacted in the log, and the content is in Redis"),
    (another_epoch, "Redis has epoch 0123456789abcdef"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGE, ids=[said for _, said in DAMAGE])
async def test_damage_is_found(
    probe: Probe, redis_url: str, damage: Callable[[Probe], Awaitable[None]], said: str
) -> None:
    await damage(probe)
    report = await audit(probe, redis_url)
    assert any(said in problem for problem in report.problems), report.problems
    assert not json.loads(verification.as_json(report))["ok"]


async def test_a_redaction_that_was_undone_is_found(probe: Probe, redis_url: str) -> None:
    done = await redaction.redact(probe.connection, "acme", "a", 3)
    await probe.streams.erase(probe.epoch, done.shard, "acme", "a", done.seq)
    assert (await audit(probe, redis_url)).problems == ()
    await _sql(probe, "UPDATE tidegate.message SET payload = '1' WHERE tags ? 'redacted'")
    report = await audit(probe, redis_url)
    assert any("offset 3 was redacted and has content" in text for text in report.problems)


async def test_a_stranger_who_writes_is_found(probe: Probe, redis_url: str) -> None:
    key = keys.bus("feedfeedfeedfeed", 0)
    await probe.client.xadd(key, {"b": "x"}, id="1-0")
    report = await audit(probe, redis_url)
    assert report.problems == ()
    assert report.notes == ("streams of epoch feedfeedfeedfeed are left, nobody writes them",)

    async def write() -> None:
        for number in range(2, 1_000):
            await probe.client.xadd(key, {"b": "x"}, id=f"{number}-0")
            await asyncio.sleep(0.02)

    writing = asyncio.create_task(write())
    report = await audit(probe, redis_url)
    writing.cancel()
    assert "epoch feedfeedfeedfeed is being written to" in report.problems[0]


async def test_many_problems_are_counted(
    probe: Probe, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.audit.findings.PROBLEMS_KEPT", 2)
    await _sql(probe, "UPDATE tidegate.message SET payload = '1'")
    report = await audit(probe, redis_url)
    assert len(report.problems) == 3
    assert report.problems[-1].startswith("and ")


async def test_it_changes_nothing(probe: Probe, redis_url: str) -> None:
    with redis_client.Redis.from_url(redis_url) as server:
        before = {key: server.dump(key) for key in server.keys("tg:*")}
        await audit(probe, redis_url)
        assert {key: server.dump(key) for key in server.keys("tg:*")} == before


def test_the_command(migrated: str, redis_url: str, processes: Processes) -> None:
    settings = {"TIDEGATE_POSTGRES_DSN": migrated, "TIDEGATE_REDIS_URL": redis_url}
    process = processes.start("verify", "verify", "--json", **settings)
    assert process.wait(60) == 1
    report = json.loads(process.text())
    assert report["problems"][0].startswith("Redis has epoch (none)")
    one = processes.start("one", "verify", "--room", "acme", "a", **settings)
    assert one.wait(60) == 1
    assert "tidegate: room a of tenant acme never had a message" in one.text()
    assert "tidegate: Redis has epoch (none)" in one.text()
