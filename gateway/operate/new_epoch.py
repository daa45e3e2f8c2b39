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


async def begin(
    postgres_dsn: str, redis_url: str, say: Callable[[str], None], redis_url_also: str = ""
) -> list[str]:
    """Replaces the epoch in Postgres, then tells Redis; gives what is outstanding.

    With ``redis_url_also`` it tells both servers. Raises as ``Sequencer.new_epoch``: then nothing
    was changed.
    """
    connection = await database.connect(postgres_dsn, application_name="tidegate-epoch")
    urls = {"Redis": redis_url} | ({"additional Redis": redis_url_also} if redis_url_also else {})
    clients = {
        name: connect(url, timeout_s=CALL_TIMEOUT_S, max_connections=2)
        for name, url in urls.items()
    }
    try:
        found = await layout(connection)
        epoch = await Sequencer(connection).new_epoch(found.epoch)
        say(f"epoch {found.epoch} ended, {epoch} begins: positions of the old one are void")
        outstanding = []
        for name, client in clients.items():
            bus = Streams(client)
            try:
                await bus.set_epoch(epoch)
                await bus.expire(found.epoch, range(found.shards), OLD_EPOCH_KEPT_S)
            except (RedisError, OSError) as error:
                outstanding.append(
                    f"{name} cannot be told ({type(error).__name__}): gateways go on with the old "
                    "epoch until a relay has sequenced its next message; run the command again "
                    f"when {name} answers, or restart the relays"
                )
            else:
                say(f"{name} knows it: gateways tell their clients within about 2 s")
        return outstanding
    finally:
        for client in clients.values():
            await client.aclose()
        await connection.close()
