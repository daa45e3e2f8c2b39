"""The buttons that break things: each does it to real processes, as an accident would."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.dev import Stack
from gateway.embedded import EmbeddedServerError
from gateway.embedded.supervisor import ProcessState

REDIS_TIMEOUT_S = 5.0
RESTART_TIMEOUT_S = 15.0


class ControlFailed(Exception):
    """A button could not do what it says. One line for the visitor."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway as the page names it: ``A`` is the first."""

    name: str
    process: str
    port: int
    alive: bool


class Controls:
    """Kills, restarts and flushes what ``stack`` runs."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._actions: dict[str, Callable[[str | None], Awaitable[None]]] = {
            "kill-gateway": self._kill_gateway,
            "restart-gateway": self._restart_gateway,
            "kill-relay": self._kill_relay,
            "flush-redis": self._flush_redis,
        }

    def gateways(self) -> list[Gateway]:
        """The gateways in order."""
        found = [state for state in self._stack.processes if state.kind == "gateway"]
        return [
            Gateway(chr(ord("A") + place), state.name, state.port or 0, state.status == "running")
            for place, state in enumerate(found)
        ]

    def relays_alive(self) -> bool:
        """Whether any relay runs."""
        return any(state.status == "running" for state in self._relays())

    async def press(self, action: str, name: str | None) -> None:
        """Do it. Raises ControlFailed."""
        if action not in self._actions:
            raise ControlFailed(f"there is no button {action!r}")
        await self._actions[action](name)

    async def _kill_gateway(self, name: str | None) -> None:
        await asyncio.to_thread(self._stack.kill, self._gateway(name).process)

    async def _restart_gateway(self, name: str | None) -> None:
        gateway = self._gateway(name)
        await asyncio.to_thread(self._stack.restart, gateway.process)
        # Answered when it is ready, so that the page's next dial finds it.
        try:
            await asyncio.to_thread(self._stack.wait_ready, RESTART_TIMEOUT_S)
        except EmbeddedServerError as error:
            raise ControlFailed(str(error)) from None

    async def _kill_relay(self, name: str | None) -> None:
        # Supervision starts them again by itself, as Kubernetes or systemd would.
        for state in self._relays():
            await asyncio.to_thread(self._stack.crash, state.name)

    async def _flush_redis(self, name: str | None) -> None:
        if not any(state.kind == "redis" for state in self._stack.processes):
            raise ControlFailed("this Redis is not the demo's own: nothing was flushed")
        client = redis.asyncio.from_url(
            self._stack.redis_url,
            socket_timeout=REDIS_TIMEOUT_S,
            socket_connect_timeout=REDIS_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        try:
            await client.flushall()
        except redis.RedisError as error:
            raise ControlFailed(f"Redis did not answer: {type(error).__name__}") from None
        finally:
            await client.aclose()

    def _gateway(self, name: str | None) -> Gateway:
        for gateway in self.gateways():
            if gateway.name == name:
                return gateway
        raise ControlFailed(f"there is no gateway {name!r}")

    def _relays(self) -> list[ProcessState]:
        return [state for state in self._stack.processes if state.kind == "relay"]
