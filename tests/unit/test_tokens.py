import base64
import hashlib
import hmac
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.namespaces import Identity
from gateway.tokens import (
    CLOCK_LEEWAY_S,
    TokenError,
    TokenExpired,
    TokenInvalid,
    claimed_tenant,
    sign,
    verify,
)

SECRET = "a secret of thirty-two bytes or more"
NOW = 1_800_000_000.0


def part(value: Any) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def token(claims: Any, header: Any = None, secret: str = SECRET) -> str:
    """A token by the letter of RFC 7515, made without the library under test."""
    signed = f"{part(header or {'alg': 'HS256', 'typ': 'JWT'})}.{part(claims)}"
    return f"{signed}.{part(hmac.new(secret.encode(), signed.encode(), hashlib.sha256).digest())}"


def refusal(text: str, secret: str = SECRET) -> str:
    with pytest.raises(TokenInvalid) as caught:
        verify(text, secret, NOW)
    return caught.value.reason


def test_a_token_of_another_maker() -> None:
    claims = {"sub": "alice", "tenant": "acme", "exp": NOW + 60}
    assert verify(token(claims), SECRET, NOW) == Identity("acme", "alice", NOW + 60, False)


def test_the_tenant_is_default_and_exp_may_be_missing() -> None:
    assert verify(token({"sub": "7"}), SECRET, NOW) == Identity("default", "7", None, False)


def test_what_sign_makes_verifies() -> None:
    text = sign(SECRET, "acme", "alice", now=NOW, ttl_s=60)
    assert verify(text, SECRET, NOW) == Identity("acme", "alice", NOW + 60, False)
    assert verify(sign(SECRET, "acme", "alice", now=NOW), SECRET, 2 * NOW).expires_at is None


def test_a_token_ends_at_its_exp_sharply() -> None:
    text = token({"sub": "alice", "exp": NOW})
    assert verify(text, SECRET, NOW - 0.001).user == "alice"
    with pytest.raises(TokenExpired):
        verify(text, SECRET, NOW)


@pytest.mark.parametrize("claim", ["nbf", "iat"])
def test_clocks_may_differ_a_little(claim: str) -> None:
    verify(token({"sub": "a", claim: NOW + CLOCK_LEEWAY_S}), SECRET, NOW)
    assert "in the future" in refusal(token({"sub": "a", claim: NOW + CLOCK_LEEWAY_S + 1}))


@pytest.mark.parametrize("algorithm", ["none", "None", "HS384", "HS512", "RS256", "", None, 5])
def test_only_hs256(algorithm: Any) -> None:
    header = {"alg": algorithm, "typ": "JWT"}
    for text in (token({"sub": "a"}, header), token({"sub": "a"}, header).rpartition(".")[0] + "."):
        refusal(text)
    refusal(token({"sub": "a"}, {"typ": "JWT"}))


def test_another_secret() -> None:
    reason = refusal(token({"sub": "a"}, secret=SECRET[::-1]))
    assert reason == "its signature does not match TIDEGATE_TOKEN_HMAC_SECRET"


def test_an_expired_token_of_another_secret_is_invalid_and_not_expired() -> None:
    refusal(token({"sub": "a", "exp": 1}, secret=SECRET[::-1]))


@pytest.mark.parametrize("secret", ["", "short"])
def test_without_a_secret_no_token_is_good(secret: str) -> None:
    assert "TIDEGATE_TOKEN_HMAC_SECRET" in refusal(token({"sub": "a"}, secret=secret), secret)


@pytest.mark.parametrize(
    ("claims", "word"),
    [
        ({}, "sub"),
        ({"sub": ""}, "sub"),
        ({"sub": 7}, "sub"),
        ({"sub": "x" * 256}, "sub"),
        ({"sub": "a", "tenant": ""}, "tenant"),
        ({"sub": "a", "tenant": "a:b"}, "tenant"),
        ({"sub": "a", "tenant": None}, "tenant"),
        ({"sub": "a", "tenant": ["acme"]}, "tenant"),
        ({"sub": "a", "exp": "soon"}, "exp"),
        ({"sub": "a", "exp": True}, "exp"),
        ({"sub": "a", "exp": NOW * 1000}, "exp"),
        ({"sub": "a", "exp": float("nan")}, "exp"),
        ({"sub": "a", "exp": 10**400}, "exp"),
        ({"sub": "a", "exp": -1}, "exp"),
        ({"sub": "a", "nbf": {}}, "nbf"),
        (["sub"], "JWT"),
        (b"not json", "JWT"),
        (b"[" * 50_000, "JWT"),
    ],
)
def test_wrong_claims(claims: Any, word: str) -> None:
    assert word in refusal(token(claims))


@pytest.mark.parametrize(
    "header", [b"[]", b'["alg"]', b'"alg"', b"5", b"\xff", {"alg": "HS256", "crit": 5}]
)
def test_wrong_headers(header: Any) -> None:
    refusal(token({"sub": "a"}, header))


def test_unknown_headers_are_ignored_unless_they_are_critical() -> None:
    verify(token({"sub": "a"}, {"alg": "HS256", "x-tool": 1}), SECRET, NOW)
    refusal(token({"sub": "a"}, {"alg": "HS256", "x-tool": 1, "crit": ["x-tool"]}))


@given(st.text() | st.from_regex(r"[A-Za-z0-9_.-]{0,80}", fullmatch=True))
def test_no_text_is_more_than_refused(text: str) -> None:
    refusal(text)


@given(st.integers(0, 2**32))
def test_a_changed_token_is_refused_and_shows_itself_in_no_error(seed: int) -> None:
    text = token({"sub": "alice", "tenant": "acme"})
    at = random.Random(seed).randrange(len(text) - 1)  # The last character has spare bits.
    changed = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
    with pytest.raises(TokenError) as caught:
        verify(changed, SECRET, NOW)
    assert caught.value.__cause__ is None
    for piece in changed.split("."):
        assert not piece or piece not in str(caught.value)


@pytest.mark.parametrize(
    ("secret", "tenant", "user"),
    [("short", "acme", "a"), (SECRET, "a:b", "a"), (SECRET, "acme", ""), (SECRET, "", "a")],
)
def test_sign_refuses_what_verify_would(secret: str, tenant: str, user: str) -> None:
    with pytest.raises(ValueError, match=r"secret|tenant|user"):
        sign(secret, tenant, user, now=NOW)


def test_claimed_tenant() -> None:
    assert claimed_tenant(sign(SECRET, "acme", "alice", now=NOW)) == "acme"
    assert claimed_tenant(token({"sub": "a"})) == "default"
    for text in ("", "a.b", "x", token([1]), "a.\u00e9.b", "a.5.b"):
        assert claimed_tenant(text) is None
