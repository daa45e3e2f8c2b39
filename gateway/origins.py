"""Which web pages may open a connection: the guard against cross-site WebSocket hijacking.

Browsers send the page's origin and let no page change it. Clients that are not browsers send none
and pass: they could claim any.
"""

from collections.abc import Collection

ANY = "*"
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def origin_allowed(origin: str | None, host: str, allowed: Collection[str]) -> bool:
    """Whether a request with headers ``Origin`` and ``Host`` may be upgraded.

    ``allowed`` are exact origins (``https://app.example.com``) or ``*``; if it is empty, the page
    must come from the host that it connects to. The scheme is not compared then: behind a proxy
    that ends TLS the gateway does not know its own.
    """
    if origin is None or ANY in allowed:
        return True
    if allowed:
        return normal_origin(origin) in allowed
    scheme, separator, authority = origin.lower().partition("://")
    if not separator or scheme not in _DEFAULT_PORTS or not host:
        return False
    default_port = _DEFAULT_PORTS[scheme]
    return _split(authority, default_port) == _split(host.lower(), default_port)


def normal_origin(origin: str) -> str:
    """``origin`` in lower case and without the default port of its scheme."""
    scheme, separator, authority = origin.lower().partition("://")
    if not separator:
        return scheme
    default_port = _DEFAULT_PORTS.get(scheme, "")
    return f"{scheme}://{authority.removesuffix(':' + default_port)}"


def _split(authority: str, default_port: str) -> tuple[str, str]:
    host, colon, port = authority.rpartition(":")
    if not colon or not port.isdigit():
        return authority, default_port
    return host, port
