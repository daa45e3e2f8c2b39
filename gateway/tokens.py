"""Client tokens: JWTs signed with HMAC-SHA-256 by the application, checked here.

Claims (RFC 7519): ``sub``, the user, required; ``tenant``, else ``default``; ``exp``, after which
the connection ends (no leeway); ``nbf`` and ``iat``, not in the future by more than the leeway.
All times are seconds since 1970 UTC. No error holds the token or a part of it.
"""

import json
import math
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from joserfc import jwt
from joserfc.errors import BadSignatureError, MissingAlgorithmError, UnsupportedAlgorithmError
from joserfc.jwk import OctKey
from joserfc.jws import JWSRegistry

from gateway.namespaces import Identity
from gateway.settings import SECRET_MIN_BYTES
from outbox.names import DEFAULT_TENANT, tenant_error

ALGORITHM: Final = "HS256"
CLOCK_LEEWAY_S: Final = 30.0
USER_MAX_CHARS: Final = 255
_LATEST: Final = 253_402_300_800.0
"""The year 10,000: a time beyond it is a mistake of units."""

# Header parameters that nobody registered are ignored, as RFC 7515 section 4 demands; an unknown
# one that is marked critical is refused. The list keeps `none` and public-key algorithms out.
_REGISTRY: Final = JWSRegistry(algorithms=[ALGORITHM], strict_check_header=False)


class TokenError(Exception):
    """Base of what is wrong with a token."""


class TokenInvalid(TokenError):
    """The token proves nothing: wrong form, algorithm, signature or claims. Terminal."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the token is not valid: {reason}")
        self.reason = reason


class TokenExpired(TokenError):
    """The token was good and its ``exp`` has passed: the client should bring a new one."""

    def __init__(self) -> None:
        super().__init__("the token has expired")


def verify(token: str, secret: str, now: float) -> Identity:
    """Who the holder of ``token`` is, at ``now`` (seconds since 1970 UTC).

    Raises TokenExpired, TokenInvalid.
    """
    if len(secret.encode()) < SECRET_MIN_BYTES:
        raise TokenInvalid("this gateway has no TIDEGATE_TOKEN_HMAC_SECRET to check it with")
    claims = _claims(token, secret)
    not_before = max(_time(claims, "nbf", 0.0), _time(claims, "iat", 0.0))
    if not_before > now + CLOCK_LEEWAY_S:
        raise TokenInvalid("its nbf or iat is in the future: compare the clocks of both machines")
    user = claims.get("sub")
    if not isinstance(user, str) or not 0 < len(user) <= USER_MAX_CHARS:
        raise TokenInvalid(f"its sub must be a text of 1 to {USER_MAX_CHARS} characters")
    tenant = claims.get("tenant", DEFAULT_TENANT)
    if not isinstance(tenant, str) or tenant_error(tenant):
        raise TokenInvalid("its tenant is not a tenant's name")
    expires_at = _time(claims, "exp", math.inf)
    if expires_at <= now:
        raise TokenExpired
    return Identity(tenant, user, None if expires_at == math.inf else expires_at, anonymous=False)


def sign(secret: str, tenant: str, user: str, *, now: float, ttl_s: float | None = None) -> str:
    """A token as an application makes it; without ``ttl_s`` it never expires.

    Raises ValueError for a name or a secret that ``verify`` would refuse.
    """
    if len(secret.encode()) < SECRET_MIN_BYTES:
        raise ValueError(
            f"the secret has {len(secret.encode())} bytes, {SECRET_MIN_BYTES} are needed"
        )
    if problem := tenant_error(tenant):
        raise ValueError(problem)
    if not 0 < len(user) <= USER_MAX_CHARS:
        raise ValueError(f"user must have 1 to {USER_MAX_CHARS} characters, not {len(user)}")
    claims: dict[str, object] = {"sub": user, "tenant": tenant, "iat": math.floor(now)}
    if ttl_s is not None:
        claims["exp"] = math.ceil(now + ttl_s)
    return jwt.encode({"alg": ALGORITHM}, claims, _key(secret), registry=_REGISTRY)


def claimed_tenant(token: str) -> str | None:
    """The tenant that a token names, unverified: for its holder only. None if it is no token."""
    body = token.split(".")[1:2]
    try:
        claims = json.loads(urlsafe_b64decode(body[0] + "=" * (-len(body[0]) % 4)))
        return str(claims.get("tenant", DEFAULT_TENANT))
    except (IndexError, ValueError, AttributeError):
        return None


def _claims(token: str, secret: str) -> Mapping[str, object]:
    try:
        return jwt.decode(token, _key(secret), registry=_REGISTRY).claims
    except BadSignatureError:
        reason = "its signature does not match TIDEGATE_TOKEN_HMAC_SECRET"
    except (MissingAlgorithmError, UnsupportedAlgorithmError):
        reason = f"its algorithm is not {ALGORITHM}"
    except Exception:
        # Whatever a stranger's text provokes in a parser (joserfc 1.8 lets TypeError and
        # RecursionError through) says one thing. The cause would quote the token: it is dropped.
        reason = "it is not a signed JWT"
    raise TokenInvalid(reason)


def _time(claims: Mapping[str, object], name: str, default: float) -> float:
    value = claims.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TokenInvalid(f"its {name} must be a number of seconds since 1970")
    # Compared before it is converted: JSON may hold an integer that no float can.
    if not 0 <= value < _LATEST:
        raise TokenInvalid(f"its {name} must be seconds since 1970, not milliseconds")
    return float(value)


@lru_cache(maxsize=8)
def _key(secret: str) -> OctKey:
    # Importing a key tries every public-key format first: once is enough.
    return OctKey.import_key(secret)
