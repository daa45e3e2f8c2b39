"""What a Redis URL says: one server, a master that sentinels watch over, or a cluster.

    redis://[user:password@]host[:port][/db]         rediss:// the same with TLS
    unix://[user:password@]/path[?db=0]
    redis+sentinel://[user:password@]host[:port][,host[:port]…]/master[/db]
    redis+cluster://[user:password@]host[:port][,host[:port]…]

Pure. Errors name no part of the URL that could be a part of a password.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from outbox.errors import OutboxError

Address: TypeAlias = tuple[str, int]
"""Host and TCP port."""

SERVER_PORT = 6379
SENTINEL_PORT = 26379
FORMS = (
    "redis://host:6379/0, rediss://…, unix:///path, redis+sentinel://host:26379,…/master or "
    "redis+cluster://host:6379,…"
)
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "redis": ("db",),
    "rediss": ("db", *TLS_OPTIONS),
    "unix": ("db",),
    "redis+sentinel": ("sentinel_username", "sentinel_password", "tls", *TLS_OPTIONS),
    "redis+cluster": ("tls", *TLS_OPTIONS),
}
TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
VERIFICATIONS = ("required", "optional", "none")


class RedisUrlError(OutboxError, ValueError):
    """The URL is malformed. The message goes on after "the Redis URL" or the setting's name."""


@dataclass(frozen=True, slots=True)
class Login:
    """Empty texts: none."""

    username: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Tls:
    """How servers are verified; empty file names: what the system trusts, no client certificate."""

    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    check_hostname: bool = True
    verification: str = "required"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A URL, taken apart."""

    kind: Literal["server", "sentinel", "cluster"]
    addresses: tuple[Address, ...]
    """The server, the sentinels, or the first nodes to ask; empty with a ``path``."""
    path: str = ""
    """Of a Unix socket."""
    db: int = 0
    login: Login = field(default_factory=Login)
    tls: Tls | None = None
    master: str = ""
    """The name under which sentinels know the master."""
    sentinel_login: Login = field(default_factory=Login)


def parse_redis_url(text: str) -> RedisUrl:
    """Raises RedisUrlError."""
    try:
        parts = urlsplit(text)
    except ValueError:  # an IPv6 address without its other bracket
        raise RedisUrlError(f"is malformed: it must be like {FORMS}") from None
    if parts.scheme not in OPTIONS or not text[len(parts.scheme) :].startswith("://"):
        raise RedisUrlError(f"must be like {FORMS}")
    if parts.fragment:
        raise RedisUrlError("has a #: percent-encode it (%23)")
    userinfo, _, hosts = parts.netloc.rpartition("@")
    username, _, password = userinfo.partition(":")
    login = Login(unquote(username), unquote(password))
    if parts.scheme == "unix":
        if hosts or not parts.path:
            raise RedisUrlError("must name a socket by its whole path, like unix:///run/redis.sock")
        options = _options(parts)
        return RedisUrl("server", (), unquote(parts.path), _db(options.get("db", "")), login)
    addresses = _addresses(hosts, SENTINEL_PORT if "sentinel" in parts.scheme else SERVER_PORT)
    options = _options(parts)
    wanted = parts.scheme == "rediss" or _truth(options, "tls", False)
    tls = _tls(options) if wanted else None
    if parts.scheme == "redis+sentinel":
        return _sentinel(parts, addresses, login, tls, options)
    if parts.scheme == "redis+cluster":
        if parts.path not in ("", "/", "/0"):
            raise RedisUrlError("names a database: a cluster has only the one")
        return RedisUrl("cluster", addresses, login=login, tls=tls)
    if len(addresses) > 1:
        raise RedisUrlError("has several hosts: only redis+sentinel:// and redis+cluster:// may")
    return RedisUrl(
        "server", addresses, db=_db(options.get("db") or parts.path[1:]), login=login, tls=tls
    )


def _sentinel(
    parts: SplitResult,
    addresses: tuple[Address, ...],
    login: Login,
    tls: Tls | None,
    options: Mapping[str, str],
) -> RedisUrl:
    master, _, db = parts.path[1:].partition("/")
    if not master:
        raise RedisUrlError("has no name of a master: redis+sentinel://host:26379/master")
    sentinel_login = Login(
        options.get("sentinel_username", ""), options.get("sentinel_password", "")
    )
    return RedisUrl(
        "sentinel",
        addresses,
        db=_db(db),
        login=login,
        tls=tls,
        master=unquote(master),
        sentinel_login=sentinel_login,
    )


def _addresses(hosts: str, default_port: int) -> tuple[Address, ...]:
    addresses = []
    for entry in hosts.split(","):
        if entry.startswith("["):
            host, bracket, rest = entry[1:].partition("]")
            colon, port = rest[:1], rest[1:]
            if not bracket or colon not in ("", ":"):
                raise RedisUrlError("has an IPv6 address that is not like [::1]:6379")
        else:
            host, colon, port = entry.partition(":")
        if not host:
            raise RedisUrlError("has no host, or an empty one (percent-encode / ? # in passwords)")
        if not colon:
            addresses.append((unquote(host), default_port))
            continue
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
            raise RedisUrlError(
                "has a port that is not a number from 1 to 65535 (percent-encode / ? # in "
                "passwords)"
            )
        addresses.append((unquote(host), int(port)))
    return tuple(addresses)


def _options(parts: SplitResult) -> dict[str, str]:
    known = OPTIONS[parts.scheme]
    try:
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True))
    except ValueError:
        if parts.query:
            raise RedisUrlError("has options that are not like ?name=value&name=value") from None
        return {}
    for name in options:
        if name not in known:
            # What follows a "?" may be the rest of a password that was not percent-encoded.
            named = f"the option {name[:40]}" if "@" not in parts.query else "an option"
            raise RedisUrlError(f"has {named}, which is not one of {', '.join(known)}")
    return options


def _db(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise RedisUrlError("has a database that is not a number, like …:6379/0")
    return int(text)


def _truth(options: Mapping[str, str], name: str, default: bool) -> bool:
    value = options.get(name)
    if value is None:
        return default
    if value.lower() not in TRUTHS:
        raise RedisUrlError(f"has an option {name} that is neither true nor false")
    return TRUTHS[value.lower()]


def _tls(options: Mapping[str, str]) -> Tls:
    verification = options.get("ssl_cert_reqs", "required")
    if verification not in VERIFICATIONS:
        raise RedisUrlError(f"has an ssl_cert_reqs that is not one of {', '.join(VERIFICATIONS)}")
    return Tls(
        ca_file=options.get("ssl_ca_certs", ""),
        certificate_file=options.get("ssl_certfile", ""),
        key_file=options.get("ssl_keyfile", ""),
        check_hostname=verification == "required" and _truth(options, "ssl_check_hostname", True),
        verification=verification,
    )
