-- The outbox, the message log and what they need: design in docs/concepts.md.
--
-- Apply with `tidegate migrate`, or by hand in one transaction:
--     psql -1 -v ON_ERROR_STOP=1 -v shards=16 -v spread=4 -f 0001_outbox.sql
-- Both numbers become literals of the schema and cannot be changed afterwards: each room's messages
-- are ordered within its shard.
--
-- Constraints of tidegate.outbox end in `OR tidegate.reject(...)`: a bare CHECK or NOT NULL would
-- print the whole row, payload included, into the error and the server's log.

CREATE SCHEMA tidegate;

CREATE TABLE tidegate.migration (
    id         int PRIMARY KEY,
    name       text NOT NULL,
    sha256     text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE tidegate.migration IS 'Which files of the schema were applied, and their content.';

CREATE TABLE tidegate.meta (
    only_row       boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    schema_version int NOT NULL,
    shards         int NOT NULL CHECK (shards BETWEEN 1 AND 1024),
    spread         int NOT NULL,
    epoch          text NOT NULL CHECK (epoch ~ '^[0-9a-f]{16}$'),
    CHECK (spread BETWEEN 1 AND shards)
);
COMMENT ON COLUMN tidegate.meta.epoch IS
    'Identity of the whole log; replaced only when delivered commits were lost.';
INSERT INTO tidegate.meta (schema_version, shards, spread, epoch)
VALUES (1, :shards, :spread, left(md5(gen_random_uuid()::text), 16));

-- The head belongs to the key of both tables so that the newest version of a row is the last index
-- entry: read with ORDER BY head DESC LIMIT 1, which steps over none of the older versions. While
-- somebody holds an old snapshot they cannot be removed, one for each batch.
CREATE TABLE tidegate.shard (
    id   int NOT NULL,
    head bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (id, head)
) WITH (
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0
);
COMMENT ON COLUMN tidegate.shard.head IS 'The last seq. A relay that sequences holds the row lock.';
INSERT INTO tidegate.shard (id) SELECT generate_series(0, :shards - 1);

CREATE TABLE tidegate.room (
    tenant text NOT NULL,
    name   text NOT NULL,
    shard  int NOT NULL,
    head   bigint NOT NULL,
    PRIMARY KEY (tenant, name, head)
) WITH (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.1,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0
);
COMMENT ON TABLE tidegate.room IS
    'The last offset of each room, one row each: the lock of its shard guards against a second one. '
    'Rows are never deleted: offsets never go back.';

CREATE FUNCTION tidegate.reject(reason text) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING MESSAGE = reason, ERRCODE = 'check_violation';
END
$$;
COMMENT ON FUNCTION tidegate.reject IS 'Fails with the reason, and nothing else, as the message.';

-- The same expression as in the generated column, for operators and tests. The column has it
-- inline: a function in a generated column costs every insert 14 %.
CREATE FUNCTION tidegate.shard_of(tenant text, room text) RETURNS int
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (('x' || left(md5(tenant), 7))::bit(28)::int
      + ('x' || left(md5(tenant || ':' || room), 7))::bit(28)::int % :spread) % :shards;

CREATE TABLE tidegate.outbox (
    id          bigint GENERATED ALWAYS AS IDENTITY (CACHE 1),
    -- NULL names are caught below; until then they need a shard, or NOT NULL would print the row.
    shard       int GENERATED ALWAYS AS (
                    (('x' || left(md5(coalesce(tenant, '')), 7))::bit(28)::int
                   + ('x' || left(md5(coalesce(tenant || ':' || room, '')), 7))::bit(28)::int
                     % :spread) % :shards) STORED,
    tenant      text DEFAULT 'default',
    room        text,
    payload     json,
    payload_bin bytea,
    tags        jsonb,
    size_bytes  int GENERATED ALWAYS AS (
                    coalesce(octet_length(payload::text), octet_length(payload_bin))) STORED,
    txid        xid8 DEFAULT pg_current_xact_id(),
    created_at  timestamptz DEFAULT clock_timestamp(),
    PRIMARY KEY (shard, id),

    CONSTRAINT tenant_name CHECK (
        (tenant IS NOT NULL AND length(tenant) <= 64
         AND tenant COLLATE "C" ~ '^[A-Za-z0-9][A-Za-z0-9_.-]*$')
        OR tidegate.reject(CASE
            WHEN tenant IS NULL THEN 'the tenant is null: give its name, or leave the column out'
            WHEN length(tenant) > 64 THEN
                format('tenant name has %s characters, the limit is 64', length(tenant))
            ELSE format('tenant name %s is not allowed: a letter or digit, then letters, digits'
                        ' and any of _ . -', to_json(tenant)) END)),
    CONSTRAINT room_name CHECK (
        (room IS NOT NULL AND length(room) <= 200
         AND room COLLATE "C" ~ '^[A-Za-z0-9][A-Za-z0-9_.:,/@#=+~!|-]*$')
        OR tidegate.reject(CASE
            WHEN room IS NULL THEN 'the room is null: give its name'
            WHEN length(room) > 200 THEN
                format('room name has %s characters, the limit is 200', length(room))
            ELSE format('room name %s is not allowed: a letter or digit, then letters, digits'
                        ' and any of _ . : , / @ # = + ~ ! | -', to_json(room)) END)),
    CONSTRAINT one_payload CHECK (
        num_nonnulls(payload, payload_bin) = 1
        OR tidegate.reject(CASE WHEN payload IS NULL
            THEN 'there is no payload: give payload or payload_bin'
            ELSE 'give payload or payload_bin, not both' END)),
    CONSTRAINT payload_size CHECK (
        size_bytes <= 1048576
        OR size_bytes IS NULL  -- said by one_payload
        OR tidegate.reject(format('payload has %s bytes, the limit is 1048576', size_bytes))),
    CONSTRAINT tags_form CHECK (
        tags IS NULL
        OR (jsonb_typeof(tags) = 'object'
            AND octet_length(tags::text) <= 4096
            AND NOT tags ? 'txid'
            AND NOT tags @? 'strict $.* ? (@.type() != "string")')
        OR tidegate.reject(CASE
            WHEN jsonb_typeof(tags) <> 'object' THEN
                format('tags must be a JSON object of strings, not of type %s', jsonb_typeof(tags))
            WHEN octet_length(tags::text) > 4096 THEN
                format('tags have %s bytes, the limit is 4096', octet_length(tags::text))
            WHEN tags ? 'txid' THEN 'the tag "txid" is reserved: every message carries it'
            ELSE 'tags must be strings: a value of another type is among them' END)),
    CONSTRAINT own_columns CHECK (
        (txid IS NOT NULL AND created_at IS NOT NULL)
        OR tidegate.reject('txid and created_at are set by the table: leave them out'))
) WITH (
    -- Rows live for milliseconds: clean up early and at full speed.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_insert_threshold = -1,
    autovacuum_vacuum_cost_delay = 0,
    toast.autovacuum_vacuum_scale_factor = 0,
    toast.autovacuum_vacuum_threshold = 2000,
    toast.autovacuum_vacuum_cost_delay = 0
);
-- An expression, so that the planner cannot take the primary key instead, whose entries of dead rows
-- sequencing must not step over, nor this one instead of the primary key.
CREATE INDEX outbox_txid ON tidegate.outbox ((shard + 0), txid, id);
COMMENT ON TABLE tidegate.outbox IS
    'Committed messages that no relay has taken yet. Insert into tenant, room, payload (JSON) or '
    'payload_bin, tags (an object of strings).';

-- Wakes a sleeping relay. The relay holds the advisory lock of its shards exclusively while it
-- sleeps (1414087749 is "TIDE" in ASCII), so under load no commit touches the notification queue
-- and the lock that serialises it.
CREATE FUNCTION tidegate.ring() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('tidegate', NEW.shard::text);
    RETURN NULL;
END
$$;
CREATE TRIGGER doorbell AFTER INSERT ON tidegate.outbox FOR EACH ROW
    WHEN (NOT pg_try_advisory_xact_lock_shared(1414087749, NEW.shard))
    EXECUTE FUNCTION tidegate.ring();

CREATE FUNCTION tidegate.set_doorbell(enabled boolean) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF enabled THEN
        ALTER TABLE tidegate.outbox ENABLE TRIGGER doorbell;
    ELSE
        ALTER TABLE tidegate.outbox DISABLE TRIGGER doorbell;
    END IF;
    -- Relays that sleep until it rings look whether it still does.
    NOTIFY tidegate, 'switched';
END
$$;
COMMENT ON FUNCTION tidegate.set_doorbell IS
    'Without the doorbell relays poll. It must be off where transactions that publish are prepared '
    '(two-phase commit): PREPARE TRANSACTION refuses NOTIFY.';
SELECT tidegate.set_doorbell(current_setting('max_prepared_transactions')::int = 0);

CREATE FUNCTION tidegate.refuse_update() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM tidegate.reject('a message cannot be changed: delete the row and publish anew');
    RETURN NULL;
END
$$;
CREATE TRIGGER refuse_update BEFORE UPDATE ON tidegate.outbox
    EXECUTE FUNCTION tidegate.refuse_update();

-- No index here: each partition gets unique ones, which a partitioned index could not be.
CREATE TABLE tidegate.message (
    shard        int NOT NULL,
    seq          bigint NOT NULL,
    tenant       text NOT NULL,
    room         text NOT NULL,
    "offset"     bigint NOT NULL,
    batch        text NOT NULL,
    txid         xid8 NOT NULL,
    tags         jsonb,
    payload      json,
    payload_bin  bytea,
    size_bytes   int NOT NULL,
    created_at   timestamptz NOT NULL,
    sequenced_at timestamptz NOT NULL
) PARTITION BY RANGE (sequenced_at);
COMMENT ON TABLE tidegate.message IS
    'The log: every message with its position. Append-only; retention drops whole days.';

CREATE FUNCTION tidegate.make_partitions(days int) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    made  int := 0;
    today date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
    day   date;
    part  text;
BEGIN
    PERFORM pg_advisory_xact_lock(1414087749, -2);
    FOR ahead IN 0 .. days LOOP
        day := today + ahead;
        part := 'message_' || to_char(day, 'YYYYMMDD');
        CONTINUE WHEN to_regclass('tidegate.' || part) IS NOT NULL;
        -- Made apart and then attached: CREATE ... PARTITION OF would lock out every reader.
        EXECUTE format('CREATE TABLE tidegate.%I (LIKE tidegate.message INCLUDING ALL)', part);
        EXECUTE format('CREATE UNIQUE INDEX %I ON tidegate.%I (tenant, room, "offset")',
                       part || '_room', part);
        EXECUTE format('CREATE UNIQUE INDEX %I ON tidegate.%I (shard, seq)', part || '_seq', part);
        EXECUTE format('ALTER TABLE tidegate.message ATTACH PARTITION tidegate.%I '
                       'FOR VALUES FROM (%L) TO (%L)', part,
                       to_char(day, 'YYYY-MM-DD') || ' 00:00:00+00',
                       to_char(day + 1, 'YYYY-MM-DD') || ' 00:00:00+00');
        made := made + 1;
    END LOOP;
    RETURN made;
END
$$;
COMMENT ON FUNCTION tidegate.make_partitions IS
    'Makes the log''s partitions for today (UTC) and the given number of days after it.';

CREATE FUNCTION tidegate.drop_oldest_partition(retention_days int) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    today date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
    part  text;
BEGIN
    IF retention_days IS NULL OR retention_days < 1 THEN
        RAISE EXCEPTION 'retention_days is %, the least is 1', retention_days;
    END IF;
    SELECT c.relname INTO part
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'tidegate.message'::regclass
      AND c.relname ~ '^message_[0-9]{8}$'
      AND to_date(right(c.relname, 8), 'YYYYMMDD') < today - retention_days
    ORDER BY c.relname LIMIT 1;
    IF part IS NOT NULL THEN
        EXECUTE format('DROP TABLE tidegate.%I', part);
    END IF;
    RETURN part;
END
$$;
COMMENT ON FUNCTION tidegate.drop_oldest_partition IS
    'Drops the oldest partition whose messages are all older than the given number of days, and '
    'returns its name; NULL if there is none. Set lock_timeout: readers queue behind it.';

-- Publishing as a function, for JSON as text, json or jsonb, and for bytes. The text variant is what
-- an untyped literal or parameter resolves to.
CREATE FUNCTION tidegate.publish(tenant text, room text, payload json, tags jsonb DEFAULT NULL)
RETURNS xid8 LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO tidegate.outbox (tenant, room, payload, tags) VALUES ($1, $2, $3, $4);
    RETURN pg_current_xact_id();
END
$$;
CREATE FUNCTION tidegate.publish(tenant text, room text, payload text, tags jsonb DEFAULT NULL)
RETURNS xid8 LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO tidegate.outbox (tenant, room, payload, tags) VALUES ($1, $2, $3::json, $4);
    RETURN pg_current_xact_id();
END
$$;
CREATE FUNCTION tidegate.publish(tenant text, room text, payload jsonb, tags jsonb DEFAULT NULL)
RETURNS xid8 LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO tidegate.outbox (tenant, room, payload, tags) VALUES ($1, $2, $3::json, $4);
    RETURN pg_current_xact_id();
END
$$;
CREATE FUNCTION tidegate.publish(tenant text, room text, payload bytea, tags jsonb DEFAULT NULL)
RETURNS xid8 LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO tidegate.outbox (tenant, room, payload_bin, tags) VALUES ($1, $2, $3, $4);
    RETURN pg_current_xact_id();
END
$$;

-- Least privilege. A publisher can neither read the outbox nor set id, txid or created_at.
CREATE FUNCTION tidegate.allow_publish(role regrole) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA tidegate TO %s', role);
    EXECUTE format('GRANT INSERT (tenant, room, payload, payload_bin, tags) ON tidegate.outbox TO %s',
                   role);
    EXECUTE format('GRANT EXECUTE ON FUNCTION tidegate.publish(text, text, json, jsonb), '
                   'tidegate.publish(text, text, text, jsonb), '
                   'tidegate.publish(text, text, jsonb, jsonb), '
                   'tidegate.publish(text, text, bytea, jsonb), '
                   'tidegate.reject(text), tidegate.shard_of(text, text) TO %s', role);
END
$$;
CREATE FUNCTION tidegate.allow_relay(role regrole) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA tidegate TO %s', role);
    EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA tidegate TO %s', role);
    EXECUTE format('GRANT DELETE ON tidegate.outbox TO %s', role);
    EXECUTE format('GRANT UPDATE (head) ON tidegate.shard TO %s', role);
    EXECUTE format('GRANT INSERT, UPDATE (head) ON tidegate.room TO %s', role);
    EXECUTE format('GRANT INSERT ON tidegate.message TO %s', role);
    EXECUTE format('GRANT UPDATE (epoch) ON tidegate.meta TO %s', role);
    EXECUTE format('GRANT EXECUTE ON FUNCTION tidegate.make_partitions(int), '
                   'tidegate.drop_oldest_partition(int), tidegate.shard_of(text, text) TO %s', role);
END
$$;
CREATE FUNCTION tidegate.allow_gateway(role regrole) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM tidegate.allow_publish(role);
    EXECUTE format('GRANT SELECT ON tidegate.message, tidegate.room, tidegate.shard, '
                   'tidegate.meta, tidegate.migration TO %s', role);
END
$$;
COMMENT ON FUNCTION tidegate.allow_publish IS 'Lets the role publish, and nothing else.';
COMMENT ON FUNCTION tidegate.allow_relay IS 'Lets the role run `tidegate relay`.';
COMMENT ON FUNCTION tidegate.allow_gateway IS 'Lets the role run `tidegate gateway`.';

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA tidegate FROM PUBLIC;

SELECT tidegate.make_partitions(7);
