-- The application's own tables. Tidegate's stand in the schema "tidegate".

CREATE TABLE IF NOT EXISTS orders (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer   text NOT NULL,
    dish       text NOT NULL,
    status     text NOT NULL DEFAULT 'received'
               CHECK (status IN ('received', 'preparing', 'ready', 'picked up', 'cancelled')),
    version    integer NOT NULL DEFAULT 1,          -- rises with every change of the order
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX IF NOT EXISTS orders_open ON orders (id)
    WHERE status IN ('received', 'preparing', 'ready');

-- The journal: one row for every change of an order, written in the same transaction as the change
-- and its message. It is what the page checks the deliveries against, and knows nothing of Tidegate.
CREATE TABLE IF NOT EXISTS order_change (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    order_id   bigint NOT NULL,
    status     text NOT NULL,
    version    integer NOT NULL,
    txid       xid8 NOT NULL DEFAULT pg_current_xact_id(),
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX IF NOT EXISTS order_change_txid ON order_change (txid);
