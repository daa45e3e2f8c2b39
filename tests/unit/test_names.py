"""The grammar of names."""

import pytest

from outbox import names


@pytest.mark.parametrize(
    "room", ["a", "orders:42", "0", "Chat/room#1", "a,b@c=d+e~f!g|h", "r" * 200]
)
def test_rooms(room: str) -> None:
    assert names.room_error(room) is None


@pytest.mark.parametrize("room", ["", " ", "a b", ":a", "-a", "é", "a\n", "a\x00", "٣", "a*", "$a"])
def test_not_rooms(room: str) -> None:
    error = names.room_error(room)
    assert error is not None
    assert error == f"room name {room!r} is not allowed: {names.ROOM_GRAMMAR}"
    assert "\n" not in error


@pytest.mark.parametrize("tenant", ["a", "default", "0", "A.b_c-d", "t" * 64])
def test_tenants(tenant: str) -> None:
    assert names.tenant_error(tenant) is None


@pytest.mark.parametrize("tenant", ["", "a:b", "a/b", ".a", "_a", "a\n"])
def test_not_tenants(tenant: str) -> None:
    assert names.tenant_error(tenant) == (
        f"tenant name {tenant!r} is not allowed: {names.TENANT_GRAMMAR}"
    )


def test_long_names_are_not_repeated() -> None:
    assert names.room_error("r" * 240) == "room name has 240 characters, the limit is 200"
    assert names.tenant_error("t" * 65) == "tenant name has 65 characters, the limit is 64"


@pytest.mark.parametrize(
    ("room", "namespace"),
    [("orders:42", "orders"), ("orders:42:x", "orders"), ("orders", None), ("a:", "a")],
)
def test_namespace(room: str, namespace: str | None) -> None:
    assert names.namespace(room) == namespace
