import pytest

from gateway.origins import normal_origin, origin_allowed


def test_a_client_without_an_origin_is_no_browser_and_passes() -> None:
    assert origin_allowed(None, "api.example.com", ())
    assert origin_allowed(None, "api.example.com", ("https://app.example.com",))


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("https://app.example.com", "app.example.com", True),
        ("https://APP.example.com", "app.Example.com", True),
        ("https://app.example.com", "app.example.com:443", True),
        ("http://localhost:8000", "localhost:8000", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://[::1]", "[::1]", True),
        ("http://localhost:3000", "localhost:8000", False),
        ("https://evil.example.com", "app.example.com", False),
        ("https://app.example.com.evil.com", "app.example.com", False),
        ("https://app.example.com@evil.com", "app.example.com", False),
        ("null", "app.example.com", False),
        ("", "app.example.com", False),
        ("https://", "", False),
        ("file://app.example.com", "app.example.com", False),
    ],
)
def test_without_a_list_the_page_must_come_from_the_same_host(
    origin: str, host: str, allowed: bool
) -> None:
    assert origin_allowed(origin, host, ()) is allowed


def test_with_a_list_only_exact_origins_pass() -> None:
    allowed = ("https://app.example.com", "http://localhost:3000")
    assert origin_allowed("https://app.example.com", "api.example.com", allowed)
    assert origin_allowed("https://app.example.com:443", "api.example.com", allowed)
    assert origin_allowed("http://localhost:3000", "api.example.com", allowed)
    for origin in (
        "http://app.example.com",
        "https://app.example.com:8443",
        "https://api.example.com",
        "https://x.app.example.com",
        "null",
        "*",
    ):
        assert not origin_allowed(origin, "api.example.com", allowed)


def test_a_star_lets_every_page_in() -> None:
    assert origin_allowed("null", "", ("*",))


def test_normal_origin() -> None:
    assert normal_origin("HTTPS://A.b:443") == "https://a.b"
    assert normal_origin("http://a.b:80") == "http://a.b"
    assert normal_origin("http://a.b:443") == "http://a.b:443"
    assert normal_origin("NULL") == "null"
