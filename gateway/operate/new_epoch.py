"""Beginning a new history by hand; for ``tidegate epoch new``."""

from collections.abc import Callable

from redis.exceptions import RedisError

from outbox import database
from outbox.layout import layout
from outbox.pump import OLD_EPOCH_KEPT_S
from outbox.redis.connect import connect
from outbox.sequence import Sequencer
from outbox.streams import Streams

CALL_TIMEOUT_S = 10.0


async def begin(postgres_dsn: str, redis_url: str, say: Callable[[str], None]) -> list[str]:
    """Replaces the epoch in Postgres, then tells Redis; gives what is outstanding.

    Raises as ``Sequencer.new_epoch``: then nothing was changed.
    """
    connection = await database.connect(postgres_dsn, application_name="tidegate-epoch")
    client = connect(redis_url, timeout_s=CALL_TIMEOUT_S, max_connections=2)
    try:
        found = await layout(connection)
        epoch = await Sequencer(connection).new_epoch(found.epoch)
        say(f"epoch {found.epoch} ended, {epoch} begins: positions of the old one are void")
        bus = Streams(client)
        try:
            await bus.set_epoch(epoch)
            await bus.expire(found.epoch, range(found.shards), OLD_EPOCH_KEPT_S)
        except (RedisError, OSError) as error:
            return [
                f"Redis cannot be told ({type(error).__name__}): gateways go on with the old epoch "
                "until a relay has sequenced its next message; run the command again when Redis "
                "answers, or restart the relays"
            ]
        say("Redis knows it: gateways tell their clients within about 2 s")
        return []
    finally:
        await client.aclose()
        await connection.close()
