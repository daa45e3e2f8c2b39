"""Clients of the stock Python SDK."""

import asyncio
from typing import Any

import centrifuge
from centrifuge import (
    ClientEventHandler,
    ConnectedContext,
    ConnectingContext,
    DisconnectedContext,
    ErrorContext,
    PublicationContext,
    SubscribedContext,
    SubscribingContext,
    SubscriptionErrorContext,
    SubscriptionEventHandler,
    UnsubscribedContext,
)

from tests.sdk.client import (
    MAX_DELAY_MS,
    MIN_DELAY_MS,
    Diary,
    History,
    Publication,
    Refused,
    Said,
    Tokens,
)


class PythonClient:
    """Implements ``tests.sdk.client.Client``."""

    def __init__(self, url: str, token: str = "", tokens: Tokens | None = None) -> None:
        self.diary = Diary()
        self._sdk = centrifuge.Client(
            url,
            events=_ClientEvents(self.diary),
            token=token,
            get_token=tokens,
            min_reconnect_delay=MIN_DELAY_MS / 1000,
            max_reconnect_delay=MAX_DELAY_MS / 1000,
            proxy=None,
        )

    async def connect(self) -> None:
        await self._sdk.connect()

    async def disconnect(self) -> None:
        await self._sdk.disconnect()

    async def subscribe(self, channel: str, since: tuple[int, str] | None = None) -> None:
        subscription = self._sdk.get_subscription(channel)
        if subscription is None:
            subscription = self._sdk.new_subscription(
                channel,
                events=_SubscriptionEvents(self.diary, channel),
                min_resubscribe_delay=MIN_DELAY_MS / 1000,
                max_resubscribe_delay=MAX_DELAY_MS / 1000,
                get_state=None if since is None else _Once(*since),
            )
        await subscription.subscribe()

    async def unsubscribe(self, channel: str) -> None:
        subscription = self._sdk.get_subscription(channel)
        assert subscription is not None
        await subscription.unsubscribe()

    async def publish(self, channel: str, data: Any) -> None:
        try:
            await self._sdk.publish(channel, data)
        except centrifuge.ReplyError as error:
            raise Refused(error.code, error.message) from None

    async def history(
        self,
        channel: str,
        limit: int,
        since: tuple[int, str] | None = None,
        reverse: bool = False,
    ) -> History:
        position = None if since is None else centrifuge.StreamPosition(*since)
        try:
            answer = await self._sdk.history(channel, limit, position, reverse)
        except centrifuge.ReplyError as error:
            raise Refused(error.code, error.message) from None
        return History(
            answer.offset,
            answer.epoch,
            tuple(Publication(p.offset, p.data, p.tags) for p in answer.publications),
        )

    async def close(self) -> None:
        await self._sdk.disconnect()
        # The SDK closes its socket in the background, which must not outlive the event loop.
        await asyncio.gather(*self._sdk._background_tasks, return_exceptions=True)


class _Once:
    """Where the application knows itself to be: this SDK asks for it at the first subscribe."""

    def __init__(self, offset: int, epoch: str) -> None:
        self._position = centrifuge.StreamPosition(offset, epoch)

    async def __call__(self, _channel: str) -> centrifuge.StreamPosition:
        return self._position


class _ClientEvents(ClientEventHandler):
    def __init__(self, diary: Diary) -> None:
        self._diary = diary

    async def on_connecting(self, ctx: ConnectingContext) -> None:
        self._diary.add(Said("connecting", "", {"code": ctx.code, "reason": ctx.reason}))

    async def on_connected(self, ctx: ConnectedContext) -> None:
        self._diary.add(Said("connected", "", {"id": ctx.client}))

    async def on_disconnected(self, ctx: DisconnectedContext) -> None:
        self._diary.add(Said("disconnected", "", {"code": ctx.code, "reason": ctx.reason}))

    async def on_error(self, ctx: ErrorContext) -> None:
        self._diary.add(Said("error", "", _error(ctx.error)))


class _SubscriptionEvents(SubscriptionEventHandler):
    def __init__(self, diary: Diary, channel: str) -> None:
        self._diary = diary
        self._channel = channel

    async def on_subscribing(self, ctx: SubscribingContext) -> None:
        self._add("subscribing", code=ctx.code, reason=ctx.reason)

    async def on_subscribed(self, ctx: SubscribedContext) -> None:
        at = ctx.stream_position
        self._add(
            "subscribed",
            recoverable=ctx.recoverable,
            was_recovering=ctx.was_recovering,
            recovered=ctx.recovered,
            position=None if at is None else {"offset": at.offset, "epoch": at.epoch},
        )

    async def on_unsubscribed(self, ctx: UnsubscribedContext) -> None:
        self._add("unsubscribed", code=ctx.code, reason=ctx.reason)

    async def on_publication(self, ctx: PublicationContext) -> None:
        pub = ctx.pub
        self._add("publication", offset=pub.offset, data=pub.data, tags=pub.tags)

    async def on_error(self, ctx: SubscriptionErrorContext) -> None:
        self._add("error", **_error(ctx.error))

    def _add(self, event: str, **fields: Any) -> None:
        self._diary.add(Said(event, self._channel, fields))


def _error(error: Exception) -> dict[str, Any]:
    code = error.code if isinstance(error, centrifuge.ReplyError) else 0
    return {"code": code, "message": str(error)}
