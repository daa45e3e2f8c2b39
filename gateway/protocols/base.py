"""What a client protocol offers to the gateway."""

from collections.abc import Iterable
from typing import Protocol

from gateway.commands import Command, Push, Reply
from outbox.message import Message


class ProtocolViolation(Exception):
    """The peer does not speak the protocol; the message says what was wrong, for the log."""


class ClientProtocol(Protocol):
    """Pure functions between bytes and the vocabulary; one instance serves all connections.

    Identity matters: the hub encodes a message once for each instance.
    """

    name: str

    def decode(self, frame: str) -> list[Command]:
        """The commands of one text frame, in order. Raises ``ProtocolViolation``."""
        ...

    def reply(self, id: int, reply: Reply) -> bytes:
        """The answer to command ``id``."""
        ...

    def push(self, push: Push) -> bytes:
        """An unasked message to the client."""
        ...

    def publication(self, message: Message) -> bytes:
        """A message without its channel: part of ``page`` and of ``deliver``."""
        ...

    def page(self, publications: Iterable[bytes]) -> bytes:
        """Publications, in order, as replies carry them."""
        ...

    def deliver(self, channel: str, publication: bytes) -> bytes:
        """A publication as a push."""
        ...

    def frame(self, parts: Iterable[bytes]) -> bytes:
        """One WebSocket frame that carries ``parts``, in order."""
        ...
