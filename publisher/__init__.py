"""What an application imports to publish: a message exists if its transaction commits.

Each example updates an order and publishes the change in one transaction.

Plain SQL, from any language:

```sql
BEGIN;
UPDATE orders SET status = 'paid' WHERE id = 42;
SELECT tidegate.publish('acme', 'orders:42', '{"status": "paid"}');
COMMIT;
```

psycopg:

```python
import psycopg
from publisher import publish

with psycopg.connect() as conn, conn.transaction():
    conn.execute("UPDATE orders SET status = 'paid' WHERE id = %s", (42,))
    txid = publish(conn, "orders:42", {"status": "paid"}, tenant="acme")
```

SQLAlchemy:

```python
from publisher import statement
from sqlalchemy import create_engine, text

engine = create_engine("postgresql+psycopg://")
message = statement("orders:42", {"status": "paid"}, tenant="acme", paramstyle="named")
with engine.begin() as connection:
    connection.execute(text("UPDATE orders SET status = 'paid' WHERE id = :id"), {"id": 42})
    txid = connection.execute(text(message.sql), message.params).scalar_one()
```

Django:

```python
from django.db import connection, transaction
from publisher import publish

with transaction.atomic():
    with connection.cursor() as cursor:
        cursor.execute("UPDATE orders SET status = 'paid' WHERE id = %s", [42])
    txid = publish(connection, "orders:42", {"status": "paid"}, tenant="acme")
```
"""

from publisher.errors import InvalidMessage, PublishError, Rejected
from publisher.message import Message, RawJSON
from publisher.publishing import publish, publish_async, publish_many, publish_many_async
from publisher.statement import Statement, statement

__all__ = [
    "InvalidMessage",
    "Message",
    "PublishError",
    "RawJSON",
    "Rejected",
    "Statement",
    "publish",
    "publish_async",
    "publish_many",
    "publish_many_async",
    "statement",
]
