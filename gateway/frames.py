"""WebSocket frames from the server (RFC 6455, section 5.2): unmasked, unfragmented, finished bytes.

A frame is made once and the same bytes are written to every subscriber, so it is built here and
not by the per-connection protocol object.
"""

from struct import Struct

_MEDIUM = Struct("!BBH").pack
_LONG = Struct("!BBQ").pack
_FIN_TEXT = 0x81


def text_frame(payload: bytes) -> bytes:
    """A text frame; ``payload`` is UTF-8 of any length."""
    size = len(payload)
    if size < 126:
        return bytes((_FIN_TEXT, size)) + payload
    if size < 65536:
        return _MEDIUM(_FIN_TEXT, 126, size) + payload
    return _LONG(_FIN_TEXT, 127, size) + payload
