"""WebSocket frames (RFC 6455): a server's as finished bytes, a client's taken apart.

A frame for subscribers is made once and the same bytes are written to each of them, so frames are
built here and not by a protocol object per connection. What comes is few and small, and most
connections hold no unfinished frame, so that a parser at rest is almost nothing.

No extension is ever negotiated: reserved bits are errors.
"""

from enum import IntEnum
from struct import Struct

_MEDIUM = Struct("!BBH").pack
_LONG = Struct("!BBQ").pack
_FIN = 0x80
_RESERVED = 0x70
_MASKED = 0x80
_CONTROL_MAX_BYTES = 125


class Opcode(IntEnum):
    CONT = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class FrameError(Exception):
    """A client broke the protocol: the close code and reason that it is told."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def text_frame(payload: bytes) -> bytes:
    """A text frame; ``payload`` is UTF-8 of any length."""
    return _frame(Opcode.TEXT, payload)


def pong_frame(payload: bytes) -> bytes:
    """The answer to a ping, which repeats its payload."""
    return _frame(Opcode.PONG, payload)


def close_frame(code: int | None, reason: str = "") -> bytes:
    """A close frame; None as the code sends none."""
    if code is None:
        return _frame(Opcode.CLOSE, b"")
    text = reason.encode()[: _CONTROL_MAX_BYTES - 2].decode(errors="ignore")
    return _frame(Opcode.CLOSE, code.to_bytes(2) + text.encode())


def _frame(opcode: Opcode, payload: bytes) -> bytes:
    size = len(payload)
    if size < 126:
        return bytes((_FIN | opcode, size)) + payload
    if size < 65536:
        return _MEDIUM(_FIN | opcode, 126, size) + payload
    return _LONG(_FIN | opcode, 127, size) + payload


def close_code(payload: bytes) -> int | None:
    """The code of a client's close frame, None if it gives none. Raises ``FrameError``."""
    if not payload:
        return None
    try:
        payload[2:].decode()
    except UnicodeDecodeError:
        raise FrameError(1007, "invalid UTF-8 in a close frame") from None
    code = int.from_bytes(payload[:2]) if len(payload) > 1 else 0
    if not (1000 <= code <= 1003 or 1007 <= code <= 1014 or 3000 <= code <= 4999):
        raise FrameError(1002, "invalid close code")
    return code


class Parser:
    """Takes a client's bytes apart into messages.

    ``error`` is set by the first violation; whatever comes after it is dropped.
    """

    __slots__ = ("_fragments", "_kind", "_max_bytes", "_rest", "error")

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes`` bounds one message, and with it what is kept of unfinished ones."""
        self._max_bytes = max_bytes
        self._rest: bytearray | None = None
        """The beginning of a frame."""
        self._fragments: bytearray | None = None
        """The beginning of a message of several frames."""
        self._kind = Opcode.TEXT
        self.error: FrameError | None = None

    def feed(self, data: bytes) -> list[tuple[Opcode, bytes]]:
        """The messages and control frames that ``data`` completes, in order. The text of a text
        message is not decoded yet."""
        received: list[tuple[Opcode, bytes]] = []
        if self.error is not None:
            return received
        buffer: bytes | bytearray = data
        if self._rest is not None:
            self._rest += data
            buffer = self._rest
        start = 0
        try:
            while (end := self._frame(buffer, start, received)) is not None:
                start = end
        except FrameError as error:
            self.error = error
            self._rest = self._fragments = None
            return received
        if start == len(buffer):
            self._rest = None
        elif start or self._rest is None:
            self._rest = bytearray(memoryview(buffer)[start:])
        return received

    def _frame(
        self, buffer: bytes | bytearray, start: int, received: list[tuple[Opcode, bytes]]
    ) -> int | None:
        """Reads one frame; gives where it ends, or None if it is not complete."""
        left = len(buffer) - start
        if left < 2:
            return None
        first, second = buffer[start], buffer[start + 1]
        if first & _RESERVED:
            raise FrameError(1002, "reserved bits must be 0")
        try:
            opcode = Opcode(first & 0x0F)
        except ValueError:
            raise FrameError(1002, "invalid opcode") from None
        if not second & _MASKED:
            raise FrameError(1002, "incorrect masking")
        fin = bool(first & _FIN)
        size = second & 0x7F
        begin = start + 2
        if opcode >= Opcode.CLOSE:
            if size > _CONTROL_MAX_BYTES:
                raise FrameError(1002, "control frame too long")
            if not fin:
                raise FrameError(1002, "fragmented control frame")
        elif size >= 126:
            length_bytes = 2 if size == 126 else 8
            if left < 2 + length_bytes:
                return None
            begin += length_bytes
            size = int.from_bytes(buffer[start + 2 : begin])
        if opcode is Opcode.CONT:
            if self._fragments is None:
                raise FrameError(1002, "unexpected continuation frame")
            if len(self._fragments) + size > self._max_bytes:
                raise FrameError(1009, "message too big")
        elif opcode < Opcode.CLOSE:
            if self._fragments is not None:
                raise FrameError(1002, "expected a continuation frame")
            if size > self._max_bytes:
                raise FrameError(1009, "message too big")
        end = begin + 4 + size
        if len(buffer) < end:
            return None
        payload = _unmasked(buffer[begin : begin + 4], buffer[begin + 4 : end])
        if opcode >= Opcode.CLOSE or (fin and opcode is not Opcode.CONT):
            received.append((opcode, payload))
        elif opcode is not Opcode.CONT:
            self._kind = opcode
            self._fragments = bytearray(payload)
        else:
            assert self._fragments is not None
            self._fragments += payload
            if fin:
                received.append((self._kind, bytes(self._fragments)))
                self._fragments = None
        return end


def _unmasked(mask: bytes | bytearray, payload: bytes | bytearray) -> bytes:
    size = len(payload)
    key = (bytes(mask) * (size // 4 + 1))[:size]
    return (int.from_bytes(payload) ^ int.from_bytes(key)).to_bytes(size)
