"""Publishing through SQLAlchemy and Django: their connections, transactions and errors."""

from collections.abc import Iterator
from typing import Any

import django
import psycopg
import pytest
import sqlalchemy as sa
from django.conf import settings
from django.db import IntegrityError, connection, connections, transaction
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from publisher import Message, Rejected, publish, publish_async, publish_many, statement

UPDATE = "UPDATE orders SET status = 'paid' WHERE id = "


@pytest.fixture
def other(migrated: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(migrated, autocommit=True) as conn:
        conn.execute("CREATE TABLE orders (id int PRIMARY KEY, status text)")
        conn.execute("INSERT INTO orders VALUES (42, 'new')")
        yield conn


def stored(other: psycopg.Connection[Any]) -> tuple[str, list[tuple[Any, ...]]]:
    """The order's status, and (room, payload, payload_bin, tags, txid) of all messages."""
    status = other.execute("SELECT status FROM orders").fetchone()
    assert status is not None
    messages = other.execute(
        "SELECT room, payload::text, payload_bin, tags, txid::text FROM tidegate.outbox ORDER BY id"
    ).fetchall()
    return status[0], messages


class TestSQLAlchemy:
    @pytest.fixture
    def engine(self, migrated: str, other: Any) -> Iterator[sa.Engine]:
        engine = sa.create_engine(migrated.replace("postgresql://", "postgresql+psycopg://"))
        yield engine
        engine.dispose()

    def test_a_session_publishes_with_its_transaction(self, engine: sa.Engine, other: Any) -> None:
        message = statement("orders:42", {"a": "é"}, tags={"k": "v"}, paramstyle="named")
        binary = statement("orders:42", b"\0\xff", paramstyle="named")
        with Session(engine) as session:
            session.execute(sa.text(UPDATE + ":id"), {"id": 42})
            txid = session.execute(sa.text(message.sql), message.params).scalar_one()
            session.execute(sa.text(binary.sql), binary.params)
            assert stored(other) == ("new", [])
            session.commit()
            assert stored(other) == (
                "paid",
                [
                    ("orders:42", '{"a":"é"}', None, {"k": "v"}, txid),
                    ("orders:42", None, b"\0\xff", None, txid),
                ],
            )
            session.execute(sa.text(message.sql), message.params)
            session.rollback()
        assert len(stored(other)[1]) == 2

    def test_a_nested_transaction(self, engine: sa.Engine, other: Any) -> None:
        message = statement("room", 1, paramstyle="named")
        with Session(engine) as session, session.begin():
            session.execute(sa.text(message.sql), message.params)
            with session.begin_nested() as savepoint:
                session.execute(sa.text(message.sql), message.params)
                savepoint.rollback()
        assert len(stored(other)[1]) == 1

    def test_one_statement_as_text(self, engine: sa.Engine, other: Any) -> None:
        message = statement("orders:42", {"a": 1}, paramstyle="named")
        with engine.begin() as conn:
            conn.execute(sa.text(f"WITH {message.cte} {UPDATE}:id"), {**message.params, "id": 42})
        status, messages = stored(other)
        assert (status, [row[1] for row in messages]) == ("paid", ['{"a":1}'])

    def test_one_statement_as_an_expression(self, engine: sa.Engine, other: Any) -> None:
        orders = sa.table("orders", sa.column("id"), sa.column("status"))
        message = statement("orders:42", {"a": 1}, paramstyle="named")
        cte = sa.text(message.sql).columns(sa.column("txid", sa.Text)).cte("message")
        update = orders.update().where(orders.c.id == 42).values(status="paid").add_cte(cte)
        with engine.begin() as conn:
            conn.execute(update, message.params)
        status, messages = stored(other)
        assert (status, [row[1] for row in messages]) == ("paid", ['{"a":1}'])

    def test_its_raw_connections(self, engine: sa.Engine, other: Any) -> None:
        with Session(engine) as session, session.begin():
            raw = session.connection().connection
            txid = publish(raw, "room", 1)
            publish_many(raw, [Message("room", 2)])
            assert raw.driver_connection is not None
            publish(raw.driver_connection, "room", 3)
        assert [(row[1], row[4]) for row in stored(other)[1]] == [(n, txid) for n in "123"]

    def test_a_session_itself_is_refused_with_the_remedy(self, engine: sa.Engine) -> None:
        with Session(engine) as session:
            for target in (session, session.connection(), engine):
                with pytest.raises(TypeError, match=r"with SQLAlchemy run publisher.statement"):
                    publish(target, "room", 1)  # type: ignore[arg-type]

    def test_a_refusal(self, engine: sa.Engine) -> None:
        message = statement("a b", 1, paramstyle="named")
        with engine.begin() as conn, pytest.raises(sa.exc.IntegrityError) as caught:
            conn.execute(sa.text(message.sql), message.params)
        assert 'room name "a b" is not allowed' in str(caught.value.orig)
        with engine.begin() as conn, pytest.raises(Rejected, match='room name "a b"'):
            publish(conn.connection, "a b", 1)

    async def test_async(self, migrated: str, other: Any) -> None:
        engine = create_async_engine(migrated.replace("postgresql://", "postgresql+psycopg://"))
        message = statement("room", 1, paramstyle="named")
        async with engine.begin() as conn:
            txid = (await conn.execute(sa.text(message.sql), message.params)).scalar_one()
            driver = (await conn.get_raw_connection()).driver_connection
            assert driver is not None
            await publish_async(driver, "room", 2)
        await engine.dispose()
        assert [(row[1], row[4]) for row in stored(other)[1]] == [("1", txid), ("2", txid)]


@pytest.fixture
def _django(migrated: str, other: Any) -> Iterator[None]:
    server = conninfo_to_dict(migrated)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": server["dbname"],
        "HOST": server["host"],
        "PORT": server["port"],
        "USER": server["user"],
        "PASSWORD": server["password"],
    }
    if not settings.configured:
        settings.configure(DATABASES={"default": database})
        django.setup()
    connections.databases["default"].update(database)
    yield
    connection.close()
    del connections["default"]


@pytest.mark.usefixtures("_django")
class TestDjango:
    def test_the_connection_publishes_with_its_transaction(self, other: Any) -> None:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute(UPDATE + "%s", [42])
                publish(cursor, "orders:42", {"a": "é"}, tags={"k": "v"})
            txid = publish(connection, "orders:42", b"\0\xff")
            publish_many(connection, [Message("orders:42", 3)])
            assert stored(other) == ("new", [])
        assert stored(other) == (
            "paid",
            [
                ("orders:42", '{"a":"é"}', None, {"k": "v"}, txid),
                ("orders:42", None, b"\0\xff", None, txid),
                ("orders:42", "3", None, None, txid),
            ],
        )

    def test_without_a_transaction(self, other: Any) -> None:
        publish(connection, "room", 1)
        assert len(stored(other)[1]) == 1

    def test_atomic_blocks_roll_back(self, other: Any) -> None:
        with transaction.atomic():
            publish(connection, "room", 1)
            with pytest.raises(ZeroDivisionError), transaction.atomic():  # noqa: PT012
                publish(connection, "room", 2)
                raise ZeroDivisionError
            publish(connection, "room", 3)
        assert [row[1] for row in stored(other)[1]] == ["1", "3"]

    def test_a_statement(self, other: Any) -> None:
        message = statement("orders:42", {"a": 1}, tags={"k": "%s"})
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(message.sql, message.params)
            (txid,) = cursor.fetchone()
        assert stored(other)[1] == [("orders:42", '{"a":1}', None, {"k": "%s"}, txid)]

    def test_one_statement(self, other: Any) -> None:
        message = statement("orders:42", {"a": 1})
        with connection.cursor() as cursor:
            cursor.execute(f"WITH {message.cte} {UPDATE}%(id)s", {**message.params, "id": 42})
            assert cursor.rowcount == 1
        status, messages = stored(other)
        assert (status, [row[1] for row in messages]) == ("paid", ['{"a":1}'])

    def test_refusals(self, other: Any) -> None:
        with transaction.atomic():
            with pytest.raises(Rejected, match='room name "a b"') as caught, transaction.atomic():
                publish(connection, "a b", 1)
            assert isinstance(caught.value.__cause__, IntegrityError)
            publish(connection, "room", 2)
        message = statement("a b", 1)
        with connection.cursor() as cursor, pytest.raises(IntegrityError, match='room name "a b"'):
            cursor.execute(message.sql, message.params)
        assert len(stored(other)[1]) == 1

    def test_its_query_log_and_wrappers_see_the_statement(self) -> None:
        seen = []

        def watch(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
            seen.append(sql)
            return execute(sql, params, many, context)

        with connection.execute_wrapper(watch):
            publish(connection, "room", 1)
        assert len(seen) == 1
