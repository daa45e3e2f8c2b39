"""The process of a relay: its options from the settings, its end on a signal."""

import asyncio
import signal
from collections.abc import Callable

from gateway.settings import Settings
from outbox.relay import Relay, RelayOptions
from outbox.streams import StreamLimits


def options(settings: Settings) -> RelayOptions:
    """A relay's options as the settings say."""
    return RelayOptions(
        postgres_dsn=settings.postgres_dsn.get_secret_value(),
        redis_url=settings.redis_url.get_secret_value(),
        redis_url_also=settings.redis_url_also.get_secret_value(),
        streams=StreamLimits(
            bus_length=settings.bus_messages,
            room_length=settings.room_stream_messages,
            room_idle_s=settings.room_stream_idle_s,
        ),
        batch_messages=settings.relay_batch_messages,
        lease_ttl_s=settings.lease_s,
        heartbeat_s=settings.lease_s / 3,
        retention_days=settings.retention_days,
    )


def run(settings: Settings) -> None:
    """Run a relay until SIGTERM or SIGINT; it then gives its shards back to the others.

    Raises OutboxError for what waiting would not mend.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_until_signal(options(settings)))


async def _until_signal(relay_options: RelayOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await Relay(relay_options).run(stop)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: it comes with the gateway, a relay can do without."""
    try:
        import uvloop  # noqa: PLC0415
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
