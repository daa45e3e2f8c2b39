"""The text of the statements; that they work is shown against Postgres."""

import pytest

from publisher import InvalidMessage, Message, statement
from publisher.statement import many_params


def test_pyformat() -> None:
    built = statement("orders:42", {"a": 1}, tenant="acme", tags={"kind": "order"})
    assert built.sql == (
        "INSERT INTO tidegate.outbox (tenant, room, payload, tags) VALUES "
        "(CAST(%(message_tenant)s AS text), CAST(%(message_room)s AS text), "
        "CAST(%(message_payload)s AS json), CAST(%(message_tags)s AS jsonb)) "
        "RETURNING pg_current_xact_id()::text AS txid"
    )
    assert built.params == {
        "message_tenant": "acme",
        "message_room": "orders:42",
        "message_payload": '{"a":1}',
        "message_tags": '{"kind":"order"}',
    }
    assert built.cte == f"message AS ({built.sql})"


def test_named() -> None:
    built = statement("orders:42", b"\0", paramstyle="named", name="second")
    assert "CAST(:second_payload_bin AS bytea)" in built.sql
    assert built.params["second_payload_bin"] == b"\0"
    assert built.cte.startswith("second AS (INSERT")


def test_values_never_stand_in_the_text() -> None:
    built = statement("orders:'; DROP", "it's %(x)s :y", tenant="'", tags={"'": "%s"})
    assert "'" not in built.sql


@pytest.mark.parametrize("name", ["", "1st", "a b", "A", "x;", "é"])
def test_a_name_that_is_no_identifier(name: str) -> None:
    with pytest.raises(InvalidMessage, match="statement name"):
        statement("orders:42", 1, name=name)


def test_an_unknown_paramstyle() -> None:
    with pytest.raises(InvalidMessage, match="paramstyle 'qmark' is not known: pyformat or named"):
        statement("orders:42", 1, paramstyle="qmark")  # type: ignore[arg-type]


def test_many_names_the_index() -> None:
    messages = [Message("a", 1), Message("b", float("nan"))]
    with pytest.raises(InvalidMessage, match=r"^message 1: data is nan"):
        many_params(messages)


def test_many_takes_only_messages() -> None:
    with pytest.raises(TypeError, match="message 0 must be a Message, not tuple"):
        many_params([("room", 1)])  # type: ignore[list-item]
