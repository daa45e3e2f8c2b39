-- Makes publishing cheap: a trigger checks each row and computes its shard and size, in place of
-- constraints and generated columns.
--
-- Postgres keeps those, and the WHEN of a trigger, as the text of expression trees, which each INSERT
-- parses, plans and compiles anew. Ours were 25 KB: an insert of one row spent four fifths of its
-- time on them. What a PL/pgSQL function evaluates is parsed and planned once for each session.
--
-- Nothing changes for those who publish, nor for relays and gateways that know version 1: columns,
-- values, error messages and rights are the same. Locks are held for a moment, no row is read. By
-- hand: SET lock_timeout first, and try again if it is reached.

-- Before any other lock, so that nobody waits for those while this one is waited for.
LOCK TABLE tidegate.outbox IN ACCESS EXCLUSIVE MODE;

-- Bodies that are parsed here and now: no search_path of those who publish changes what they mean.
-- PL/pgSQL expands the calls of `acceptable`, `acceptable_tags` and `shard_of`, which must stay
-- IMMUTABLE and a single expression for that. Each transaction prepares each function and operator
-- in them anew, about 0.2 us apiece: keep them few, and what is rare apart.
CREATE FUNCTION tidegate.acceptable(
    tenant text, room text, payload json, payload_bin bytea, size_bytes int, txid xid8,
    created_at timestamptz
) RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (
    -- A name that is allowed has as many bytes as characters.
    octet_length(tenant) <= 64 AND tenant COLLATE "C" ~ '^[A-Za-z0-9][A-Za-z0-9_.-]*$'
    AND octet_length(room) <= 200
    AND room COLLATE "C" ~ '^[A-Za-z0-9][A-Za-z0-9_.:,/@#=+~!|-]*$'
    AND (payload IS NULL) <> (payload_bin IS NULL) AND size_bytes <= 1048576
    AND txid IS NOT NULL AND created_at IS NOT NULL
) IS TRUE;
CREATE FUNCTION tidegate.acceptable_tags(tags jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (
    jsonb_typeof(tags) = 'object' AND octet_length(tags::text) <= 4096
    AND NOT tags ? 'txid' AND NOT tags @? 'strict $.* ? (@.type() != "string")'
) IS TRUE;
COMMENT ON FUNCTION tidegate.acceptable IS
    'Whether such a row can be delivered later; tidegate.objection says why not.';
COMMENT ON FUNCTION tidegate.acceptable_tags IS
    'Whether a message can have these tags; tidegate.objection says why not.';

CREATE FUNCTION tidegate.objection(
    tenant text, room text, payload json, payload_bin bytea, tags jsonb, size_bytes int, txid xid8,
    created_at timestamptz
) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN payload IS NULL AND payload_bin IS NULL THEN
        'there is no payload: give payload or payload_bin'
    WHEN payload IS NOT NULL AND payload_bin IS NOT NULL THEN
        'give payload or payload_bin, not both'
    WHEN txid IS NULL OR created_at IS NULL THEN
        'txid and created_at are set by the table: leave them out'
    WHEN size_bytes > 1048576 THEN
        'payload has ' || size_bytes::text || ' bytes, the limit is 1048576'
    WHEN room IS NULL THEN 'the room is null: give its name'
    WHEN length(room) > 200 THEN
        'room name has ' || length(room)::text || ' characters, the limit is 200'
    WHEN room COLLATE "C" !~ '^[A-Za-z0-9][A-Za-z0-9_.:,/@#=+~!|-]*$' THEN
        'room name ' || to_jsonb(room)::text || ' is not allowed: a letter or digit, then letters, '
        'digits and any of _ . : , / @ # = + ~ ! | -'
    WHEN jsonb_typeof(tags) <> 'object' THEN
        'tags must be a JSON object of strings, not of type ' || jsonb_typeof(tags)
    WHEN octet_length(tags::text) > 4096 THEN
        'tags have ' || octet_length(tags::text)::text || ' bytes, the limit is 4096'
    WHEN tags ? 'txid' THEN 'the tag "txid" is reserved: every message carries it'
    WHEN tags @? 'strict $.* ? (@.type() != "string")' THEN
        'tags must be strings: a value of another type is among them'
    WHEN tenant IS NULL THEN 'the tenant is null: give its name, or leave the column out'
    WHEN length(tenant) > 64 THEN
        'tenant name has ' || length(tenant)::text || ' characters, the limit is 64'
    ELSE
        'tenant name ' || to_jsonb(tenant)::text || ' is not allowed: a letter or digit, then '
        'letters, digits and any of _ . -'
END;
COMMENT ON FUNCTION tidegate.objection IS
    'Why tidegate.outbox refuses a row: names, sizes and limits, never the payload.';

-- Checks a row, and rings if it is called by the trigger doorbell: wakes a sleeping relay. The relay
-- holds the advisory lock of its shards exclusively while it sleeps (1414087749 is "TIDE" in ASCII),
-- so under load no commit touches the notification queue and the lock that serialises it.
--
-- STABLE, since it reads no table: so evaluating costs no snapshot. Refusals come from tidegate.reject,
-- by which publishers know them.
CREATE FUNCTION tidegate.accept() RETURNS trigger
LANGUAGE plpgsql STABLE AS $$
BEGIN
    NEW.size_bytes := coalesce(pg_catalog.octet_length(NEW.payload::pg_catalog.text),
                               pg_catalog.octet_length(NEW.payload_bin));
    IF NOT tidegate.acceptable(NEW.tenant, NEW.room, NEW.payload, NEW.payload_bin, NEW.size_bytes,
                               NEW.txid, NEW.created_at) THEN
        PERFORM tidegate.reject(tidegate.objection(
            NEW.tenant, NEW.room, NEW.payload, NEW.payload_bin, NEW.tags, NEW.size_bytes, NEW.txid,
            NEW.created_at));
    END IF;
    IF NEW.tags IS NOT NULL THEN
        IF NOT tidegate.acceptable_tags(NEW.tags) THEN
            PERFORM tidegate.reject(tidegate.objection(
                NEW.tenant, NEW.room, NEW.payload, NEW.payload_bin, NEW.tags, NEW.size_bytes,
                NEW.txid, NEW.created_at));
        END IF;
    END IF;
    NEW.shard := tidegate.shard_of(NEW.tenant, NEW.room);
    IF NOT pg_catalog.pg_try_advisory_xact_lock_shared(1414087749, NEW.shard) THEN
        IF TG_NAME = 'doorbell' THEN
            PERFORM pg_catalog.pg_notify('tidegate', NEW.shard::pg_catalog.text);
        END IF;
    END IF;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION tidegate.accept IS
    'Refuses what could not be delivered later and computes shard and size_bytes.';

ALTER TABLE tidegate.outbox
    DROP CONSTRAINT tenant_name,
    DROP CONSTRAINT room_name,
    DROP CONSTRAINT one_payload,
    DROP CONSTRAINT payload_size,
    DROP CONSTRAINT tags_form,
    DROP CONSTRAINT own_columns,
    ALTER COLUMN shard DROP EXPRESSION,
    ALTER COLUMN size_bytes DROP EXPRESSION;

-- One of the two triggers is always on, ALWAYS: also where session_replication_role turns others off.
CREATE OR REPLACE FUNCTION tidegate.set_doorbell(enabled boolean) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF enabled THEN
        ALTER TABLE tidegate.outbox ENABLE ALWAYS TRIGGER doorbell, DISABLE TRIGGER accept;
    ELSE
        ALTER TABLE tidegate.outbox ENABLE ALWAYS TRIGGER accept, DISABLE TRIGGER doorbell;
    END IF;
    -- Relays that sleep until it rings look whether it still does.
    NOTIFY tidegate, 'switched';
END
$$;
DO $$
DECLARE
    rings boolean := tgenabled <> 'D' FROM pg_catalog.pg_trigger
                     WHERE tgrelid = 'tidegate.outbox'::regclass AND tgname = 'doorbell';
BEGIN
    DROP TRIGGER doorbell ON tidegate.outbox;
    DROP FUNCTION tidegate.ring();
    CREATE TRIGGER doorbell BEFORE INSERT ON tidegate.outbox FOR EACH ROW
        EXECUTE FUNCTION tidegate.accept();
    CREATE TRIGGER accept BEFORE INSERT ON tidegate.outbox FOR EACH ROW
        EXECUTE FUNCTION tidegate.accept();
    PERFORM tidegate.set_doorbell(rings);
END
$$;

CREATE OR REPLACE FUNCTION tidegate.allow_publish(role regrole) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA tidegate TO %s', role);
    EXECUTE format('GRANT INSERT (tenant, room, payload, payload_bin, tags) ON tidegate.outbox TO %s',
                   role);
    EXECUTE format('GRANT EXECUTE ON FUNCTION tidegate.publish(text, text, json, jsonb), '
                   'tidegate.publish(text, text, text, jsonb), '
                   'tidegate.publish(text, text, jsonb, jsonb), '
                   'tidegate.publish(text, text, bytea, jsonb), '
                   'tidegate.reject(text), tidegate.shard_of(text, text), tidegate.acceptable, '
                   'tidegate.acceptable_tags, tidegate.objection TO %s', role);
END
$$;
REVOKE ALL ON FUNCTION tidegate.accept, tidegate.acceptable, tidegate.acceptable_tags,
    tidegate.objection FROM PUBLIC;
-- Whoever may insert so far has tidegate.reject for it, and goes on.
DO $$
DECLARE
    grantee text;
BEGIN
    FOR grantee IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
        FROM pg_catalog.pg_proc p CROSS JOIN pg_catalog.aclexplode(p.proacl) a
        WHERE p.oid = 'tidegate.reject(text)'::regprocedure AND a.privilege_type = 'EXECUTE'
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION tidegate.shard_of, tidegate.acceptable, '
                       'tidegate.acceptable_tags, tidegate.objection TO %s', grantee);
    END LOOP;
END
$$;

UPDATE tidegate.meta SET schema_version = 3;
