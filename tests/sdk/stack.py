"""A whole Tidegate for a test: a database, relays and gateways as processes of their own."""

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from gateway.tokens import sign
from tests.processes import Process, Processes

NAMESPACES: Mapping[str, Mapping[str, Any]] = {
    "chat": {"publish": "authenticated"},
    "quiet": {"history_messages": 0},
    "closed": {"subscribe": "nobody"},
}


class Stack:
    """Relays and gateways on one database and one Redis, started and ready."""

    def __init__(
        self,
        processes: Processes,
        dsn: str,
        redis_url: str,
        relays: int = 1,
        gateways: int = 2,
        **settings: str,
    ) -> None:
        self.dsn = dsn
        self.redis_url = redis_url
        self._secret = secrets.token_hex(32)
        environment = {
            "TIDEGATE_POSTGRES_DSN": dsn,
            "TIDEGATE_REDIS_URL": redis_url,
            "TIDEGATE_TOKEN_HMAC_SECRET": self._secret,
            "TIDEGATE_NAMESPACES": json.dumps(NAMESPACES),
            "TIDEGATE_LOG_FORMAT": "json",
            **settings,
        }
        self.relays: list[Process] = [
            processes.start_relay(f"relay-{i}", **environment) for i in range(1, relays + 1)
        ]
        self.gateways: list[Process] = [
            processes.start_gateway(f"gateway-{i}", **environment) for i in range(1, gateways + 1)
        ]

    @property
    def ports(self) -> list[int]:
        """The gateways' ports."""
        return [gateway.port for gateway in self.gateways]

    def token(self, tenant: str = "acme", user: str = "ann", ttl_s: float | None = None) -> str:
        """A token as an application makes it; a negative ``ttl_s`` gives one that has expired."""
        return sign(self._secret, tenant, user, now=time.time(), ttl_s=ttl_s)
