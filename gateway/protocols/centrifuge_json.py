"""The Centrifuge client protocol as JSON text frames.

Source of its facts: the protocol definition and the SDKs of centrifugal (``client.proto``,
centrifuge-js, centrifuge-python). A frame holds one or more JSON objects, divided by line feeds;
so nothing that is passed through may hold a raw line feed.
"""

from base64 import b64encode
from collections.abc import Iterable

import msgspec
from msgspec import Raw, Struct

from gateway import commands as c
from gateway.frames import text_frame
from gateway.jsontext import members
from gateway.protocols.base import ProtocolViolation
from outbox.message import Message

_UNSUPPORTED = ("presence", "presence_stats", "rpc", "sub_refresh")
_ABSENT = Raw()


class _Wire(Struct, frozen=True):
    """A command as it stands on the wire: an id and one field that names the method."""

    id: int = 0
    connect: c.Connect | None = None
    subscribe: c.Subscribe | None = None
    unsubscribe: c.Unsubscribe | None = None
    publish: c.Publish | None = None
    history: c.History | None = None
    refresh: c.Refresh | None = None
    # Not `Raw | None`, which msgspec takes for `None`.
    presence: Raw = _ABSENT
    presence_stats: Raw = _ABSENT
    rpc: Raw = _ABSENT
    sub_refresh: Raw = _ABSENT
    send: Raw = _ABSENT


_decode_wire = msgspec.json.Decoder(_Wire).decode
_text = msgspec.json.Encoder().encode
_PONG = c.Command(0, c.Pong())


class CentrifugeJSON:
    """Implements ``gateway.protocols.base.ClientProtocol``."""

    name = "json"

    def decode(self, frame: str) -> list[c.Command]:
        """One command for each line. A client's ``{}`` is its answer to a ping."""
        parsed = [self._command(line) for line in frame.split("\n") if line and not line.isspace()]
        if not parsed:
            raise ProtocolViolation("empty frame")
        return parsed

    def _command(self, line: str) -> c.Command:
        try:
            wire = _decode_wire(line)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            if (command := _unreadable_publish(line)) is not None:
                return command
            raise ProtocolViolation(f"not a command: {type(error).__name__}: {error}") from None
        given: list[c.Body] = [
            body
            for body in (
                wire.connect,
                wire.subscribe,
                wire.unsubscribe,
                wire.publish,
                wire.history,
                wire.refresh,
            )
            if body is not None
        ]
        given += [
            c.Unsupported(name) for name in _UNSUPPORTED if getattr(wire, name) is not _ABSENT
        ]
        if wire.send is not _ABSENT:
            given.append(c.Ignored())
        if not given and wire.id == 0:
            return _PONG
        if len(given) != 1:
            raise ProtocolViolation(f"a command names one method, this one {len(given)}")
        body = given[0]
        if isinstance(body, c.Ignored):
            return c.Command(0, body)
        if not 0 < wire.id < 2**32:
            raise ProtocolViolation(f"command id {wire.id} is not in 1 … 4294967295")
        return c.Command(wire.id, body)

    def reply(self, id: int, reply: c.Reply) -> bytes:
        match reply:
            case c.Connected():
                fields: dict[str, object] = {
                    "client": reply.client,
                    "version": reply.version,
                    "ping": reply.ping_s,
                    "pong": True,
                }
                return _reply(id, b"connect", _text(fields | _expiry(reply.ttl_s)))
            case c.Subscribed():
                fields = {
                    "recoverable": True,
                    "positioned": True,
                    "epoch": reply.epoch,
                    "offset": reply.offset,
                }
                if reply.was_recovering:
                    fields |= {"was_recovering": True, "recovered": reply.recovered}
                return _reply(id, b"subscribe", _with_publications(fields, reply.publications))
            case c.HistoryRead():
                fields = {"epoch": reply.epoch, "offset": reply.offset}
                return _reply(id, b"history", _with_publications(fields, reply.publications))
            case c.Refreshed():
                fields = {"client": reply.client, "version": reply.version}
                return _reply(id, b"refresh", _text(fields | _expiry(reply.ttl_s)))
            case c.Unsubscribed():
                return _reply(id, b"unsubscribe", b"{}")
            case c.Published():
                return _reply(id, b"publish", b"{}")
            case c.Failed():
                fields = {"code": reply.code, "message": reply.message}
                if reply.temporary:
                    fields["temporary"] = True
                return _reply(id, b"error", _text(fields))

    def push(self, push: c.Push) -> bytes:
        match push:
            case c.Ping():
                return b"{}"
            case c.Evicted():
                return _text(
                    {
                        "push": {
                            "channel": push.channel,
                            "unsubscribe": {"code": push.code, "reason": push.reason},
                        }
                    }
                )

    def publication(self, message: Message) -> bytes:
        """A binary payload reaches JSON clients as a string in base64."""
        data = b'"%b"' % b64encode(message.payload) if message.binary else message.payload
        tags = {**message.tags, "txid": message.txid} if message.tags else {"txid": message.txid}
        return b'{"data":%b,"offset":%d,"tags":%b}' % (data, message.offset, _text(tags))

    def page(self, publications: Iterable[bytes]) -> bytes:
        return b",".join(publications)

    def deliver(self, channel: str, publication: bytes) -> bytes:
        return b'{"push":{"channel":%b,"pub":%b}}' % (_text(channel), publication)

    def frame(self, parts: Iterable[bytes]) -> bytes:
        return text_frame(b"\n".join(parts))


def _unreadable_publish(line: str) -> c.Command | None:
    """A publish whose data no parser takes (half of an emoji, thousands of levels) is a person's
    text gone wrong and not a client's: it is refused, and the connection goes on."""
    try:
        parts = members(line)
        id = int(parts["id"])
    except (ValueError, KeyError, RecursionError):
        return None
    if parts.keys() != {"id", "publish"} or not 0 < id < 2**32:
        return None
    return c.Command(id, c.Malformed("the data is not JSON that every client can read"))


def _reply(id: int, name: bytes, body: bytes) -> bytes:
    return b'{"id":%d,"%b":%b}' % (id, name, body)


def _expiry(ttl_s: int | None) -> dict[str, object]:
    return {} if ttl_s is None else {"expires": True, "ttl": ttl_s}


def _with_publications(fields: dict[str, object], publications: bytes) -> bytes:
    head = _text(fields)
    if not publications:
        return head
    return b'%b,"publications":[%b]}' % (head[:-1], publications)
