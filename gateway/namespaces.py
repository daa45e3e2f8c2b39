"""Who may do what in which room.

A room's namespace is what stands before its first ``:`` (``orders:42`` → ``orders``). A room whose
namespace has no entry of its own takes the entry ``*``, and without one the defaults of
``Namespace``: any client of the tenant may subscribe, none may publish. Tenants are not checked
here: a client can name rooms of its own tenant only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from outbox.names import namespace

Who = Literal["anyone", "authenticated", "nobody"]
"""``anyone``: any client of the tenant; ``authenticated``: clients with a token."""

EVERY_OTHER = "*"
"""The entry for rooms without an entry of their own. No room's name can hold this character."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a client is, once and for all of its connection."""

    tenant: str
    user: str
    """The token's ``sub``; empty for an anonymous client."""
    expires_at: float | None
    """Seconds since 1970 UTC from ``tokens.verify``, of the worker's clock in a session; None if it
    does not expire."""
    anonymous: bool


@dataclass(frozen=True, slots=True)
class Namespace:
    """What holds for the rooms of a namespace."""

    history_messages: int = 1_000
    """The most messages that one history request may bring; 0 refuses history requests.
    Resuming after a disconnect is not history and has no such limit."""
    subscribe: Who = "anyone"
    publish: Who = "nobody"


DEFAULT = Namespace()


class Namespaces:
    """The namespaces of a gateway, looked up by room."""

    __slots__ = ("_table",)

    def __init__(self, table: Mapping[str, Namespace]) -> None:
        self._table = MappingProxyType(dict(table))

    def of(self, room: str) -> Namespace:
        """What holds for ``room``."""
        name = namespace(room)
        found = self._table.get(name) if name is not None else None
        return found or self._table.get(EVERY_OTHER, DEFAULT)

    def may_subscribe(self, client: Identity, room: str) -> bool:
        """Whether ``client`` may read ``room`` of its own tenant: live, history and presence."""
        return _allows(self.of(room).subscribe, client)

    def may_publish(self, client: Identity, room: str) -> bool:
        """Whether ``client`` may publish into ``room`` of its own tenant."""
        return _allows(self.of(room).publish, client)


def _allows(who: Who, client: Identity) -> bool:
    match who:
        case "anyone":
            return True
        case "authenticated":
            return not client.anonymous
        case "nobody":
            return False
