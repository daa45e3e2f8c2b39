import pytest

from gateway.namespaces import Identity, Namespace, Namespaces, Who

ALICE = Identity("acme", "alice", None, anonymous=False)
NOBODY = Identity("default", "", None, anonymous=True)


def test_defaults_let_any_client_read_and_none_write() -> None:
    namespaces = Namespaces({})
    for room in ("lobby", "orders:42", "a:b:c"):
        for client in (ALICE, NOBODY):
            assert namespaces.may_subscribe(client, room)
            assert not namespaces.may_publish(client, room)


@pytest.mark.parametrize(
    ("who", "alice", "anonymous"),
    [("anyone", True, True), ("authenticated", True, False), ("nobody", False, False)],
)
def test_who(who: Who, alice: bool, anonymous: bool) -> None:
    namespaces = Namespaces({"chat": Namespace(subscribe=who, publish=who)})
    assert namespaces.may_subscribe(ALICE, "chat:1") is alice
    assert namespaces.may_publish(ALICE, "chat:1") is alice
    assert namespaces.may_subscribe(NOBODY, "chat:1") is anonymous
    assert namespaces.may_publish(NOBODY, "chat:1") is anonymous


def test_the_namespace_is_what_stands_before_the_first_colon() -> None:
    orders, other = Namespace(history_messages=7), Namespace(history_messages=9)
    namespaces = Namespaces({"orders": orders, "*": other})
    assert namespaces.of("orders:42") is orders
    assert namespaces.of("orders:42:lines") is orders
    assert namespaces.of("orders") is other
    assert namespaces.of("Orders:42") is other
    assert namespaces.of("orders2:42") is other


def test_a_later_change_of_the_table_changes_nothing() -> None:
    table = {"orders": Namespace()}
    namespaces = Namespaces(table)
    table["orders"] = Namespace(subscribe="nobody")
    assert namespaces.may_subscribe(ALICE, "orders:1")
