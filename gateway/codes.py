"""Every code that a client can be told, in one table.

The numbers are those of the Centrifuge client protocol, whose SDKs act on the ranges:

* errors: codes below 100, temporary ones and 109 are tried again, others end the request;
* closes: below 3000, 3000-3499 and 4000-4499 the SDK reconnects, 3500-3999 and 4500-4999 are final;
* unsubscribes: from 2500 on the SDK subscribes again with its position, below the end is final.

``docs/codes.md`` is made from this module (``python -m gateway.codes``).
"""

from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """The error of a reply: ``{"error": {"code", "message", "temporary"}}``."""

    code: int
    message: str
    temporary: bool = False
    meaning: str = ""
    """For the documentation: when it is sent."""

    @property
    def retried(self) -> bool:
        """Whether an SDK tries the request again by itself."""
        return self.code < 100 or self.temporary or self.code == 109


@dataclass(frozen=True, slots=True)
class CloseCode:
    """A WebSocket close code with its reason."""

    code: int
    reason: str
    meaning: str = ""
    """For the documentation: when it is sent."""

    @property
    def reconnect(self) -> bool:
        """Whether an SDK comes back by itself."""
        if self.code == 1009:
            return False
        return self.code < 3500 or 4000 <= self.code < 4500


@dataclass(frozen=True, slots=True)
class UnsubscribeCode:
    """The push that ends a subscription: ``{"unsubscribe": {"code", "reason"}}``."""

    code: int
    reason: str
    meaning: str = ""
    """For the documentation: when it is sent."""

    @property
    def resubscribe(self) -> bool:
        """Whether an SDK subscribes again, with its position."""
        return self.code >= 2500


INTERNAL = ErrorCode(
    100, "internal error", True, "A store is out of reach or the gateway failed: try again."
)
UNAUTHORIZED = ErrorCode(
    101, "unauthorized", False, "No token, and clients without a token are not let in."
)
UNKNOWN_CHANNEL = ErrorCode(
    102, "unknown channel", False, "The channel's name is not a room's name."
)
PERMISSION_DENIED = ErrorCode(
    103, "permission denied", False, "The namespace does not allow this client to do this."
)
METHOD_NOT_FOUND = ErrorCode(
    104, "method not found", False, "The gateway does not support the command."
)
ALREADY_SUBSCRIBED = ErrorCode(
    105, "already subscribed", False, "The connection is subscribed to the channel already."
)
LIMIT_EXCEEDED = ErrorCode(
    106,
    "limit exceeded",
    False,
    "A configured limit of this client or the message size is reached.",
)
BAD_REQUEST = ErrorCode(107, "bad request", False, "The command's fields are missing or wrong.")
NOT_AVAILABLE = ErrorCode(108, "not available", False, "The namespace does not offer this.")
TOKEN_EXPIRED = ErrorCode(
    109,
    "token expired",
    False,
    "The token has expired: the SDK asks the application for a new one.",
)
EXPIRED = ErrorCode(110, "expired", False, "The time for which this was granted is over.")
TOO_MANY_REQUESTS = ErrorCode(
    111, "too many requests", True, "The gateway is at a limit of its own: try again later."
)
UNRECOVERABLE_POSITION = ErrorCode(
    112, "unrecoverable position", False, "A history was asked for from a position that is lost."
)

ERRORS = (
    INTERNAL,
    UNAUTHORIZED,
    UNKNOWN_CHANNEL,
    PERMISSION_DENIED,
    METHOD_NOT_FOUND,
    ALREADY_SUBSCRIBED,
    LIMIT_EXCEEDED,
    BAD_REQUEST,
    NOT_AVAILABLE,
    TOKEN_EXPIRED,
    EXPIRED,
    TOO_MANY_REQUESTS,
    UNRECOVERABLE_POSITION,
)

# Sent by the WebSocket library, with a reason of its own.
MESSAGE_TOO_BIG = CloseCode(
    1009,
    "frame with N bytes exceeds limit of M bytes",
    "A frame of the client is larger than TIDEGATE_MESSAGE_MAX_BYTES.",
)
CONNECTION_CLOSED = CloseCode(3000, "connection closed", "The connection ends without an error.")
SHUTDOWN = CloseCode(3001, "shutdown", "This gateway stops; another one is there.")
SERVER_ERROR = CloseCode(3004, "internal server error", "The gateway failed on this connection.")
CONNECTION_EXPIRED = CloseCode(
    3005, "connection expired", "The token expired and the client brought no new one."
)
SLOW = CloseCode(
    3008, "slow", "The client read nothing for TIDEGATE_CLIENT_STALL_TIMEOUT_S; it can resume."
)
INSUFFICIENT_STATE = CloseCode(
    3010, "insufficient state", "The gateway lost the position of the connection; it can resume."
)
NO_PONG = CloseCode(
    3012, "no pong", "No answer to a ping within TIDEGATE_PONG_TIMEOUT_S: the peer is gone."
)
TOO_MANY_CONNECTIONS = CloseCode(
    3013, "too many requests", "The gateway is at a limit of its own: come back later."
)
INVALID_TOKEN = CloseCode(
    3500, "invalid token", "The token is malformed or its signature is wrong."
)
BAD_FRAME = CloseCode(
    3501, "bad request", "The frame is not JSON, not a command, or came before connect."
)
STALE = CloseCode(
    3502, "stale", "No connect command within TIDEGATE_HANDSHAKE_TIMEOUT_S of the handshake."
)
FORCE_DISCONNECT = CloseCode(
    3503, "force disconnect", "The application ended the connection and wants it to stay so."
)
CONNECTION_DENIED = CloseCode(3507, "permission denied", "The client may no longer be connected.")

CLOSES = (
    MESSAGE_TOO_BIG,
    CONNECTION_CLOSED,
    SHUTDOWN,
    SERVER_ERROR,
    CONNECTION_EXPIRED,
    SLOW,
    INSUFFICIENT_STATE,
    NO_PONG,
    TOO_MANY_CONNECTIONS,
    INVALID_TOKEN,
    BAD_FRAME,
    STALE,
    FORCE_DISCONNECT,
    CONNECTION_DENIED,
)

UNSUBSCRIBED = UnsubscribeCode(
    2000, "server unsubscribe", "The client may no longer read this channel."
)
RESUBSCRIBE = UnsubscribeCode(
    2500,
    "insufficient state",
    "Subscribe again: from the client's position if it still holds, else told not recovered.",
)

UNSUBSCRIBES = (UNSUBSCRIBED, RESUBSCRIBE)


def markdown() -> str:
    """The text of ``docs/codes.md``."""
    rows = chain(
        (
            "# Codes that a client can receive",
            "",
            "Made from `gateway/codes.py` by `python -m gateway.codes`. Do not edit by hand.",
            "",
            "## Errors in replies",
            "",
            "| code | message | tried again by the SDK | when |",
            "|---|---|---|---|",
        ),
        (f"| {e.code} | {e.message} | {_yes(e.retried)} | {e.meaning} |" for e in ERRORS),
        (
            "",
            "## Close codes of the WebSocket",
            "",
            "| code | reason | SDK reconnects | when |",
            "|---|---|---|---|",
        ),
        (f"| {c.code} | {c.reason} | {_yes(c.reconnect)} | {c.meaning} |" for c in CLOSES),
        (
            "",
            "## Codes of the unsubscribe push",
            "",
            "| code | reason | SDK subscribes again | when |",
            "|---|---|---|---|",
        ),
        (f"| {u.code} | {u.reason} | {_yes(u.resubscribe)} | {u.meaning} |" for u in UNSUBSCRIBES),
    )
    return "\n".join(rows) + "\n"


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


if __name__ == "__main__":
    print(markdown(), end="")  # noqa: T201
