-- Redaction: one message becomes a tombstone that keeps its positions. Everything here is added:
-- relays and gateways that know version 1 go on working during this file and after it.
--
-- The only lock that others can notice is that of meta, for a moment. By hand: SET lock_timeout
-- first, and try again if it is reached.

ALTER TABLE tidegate.meta ADD COLUMN oldest_reader int NOT NULL DEFAULT 1;
COMMENT ON COLUMN tidegate.meta.oldest_reader IS
    'The oldest schema version whose relays and gateways may go on working with this schema.';
UPDATE tidegate.meta SET schema_version = 2;

CREATE TABLE tidegate.redaction (
    tenant      text NOT NULL,
    room        text NOT NULL,
    "offset"    bigint NOT NULL,
    shard       int NOT NULL,
    seq         bigint NOT NULL,
    reason      text,
    redacted_by text NOT NULL DEFAULT session_user,
    redacted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    txid        xid8 NOT NULL DEFAULT pg_current_xact_id(),
    PRIMARY KEY (tenant, room, "offset")
);
COMMENT ON TABLE tidegate.redaction IS
    'Which messages were redacted, by whom and why. Kept for ever: after a restore of an older '
    'backup, what was redacted since must be redacted again.';

CREATE FUNCTION tidegate.redact(
    tenant text, room text, "offset" bigint, reason text DEFAULT NULL,
    OUT shard int, OUT seq bigint, OUT first boolean, OUT txid xid8, OUT part text
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    head    bigint;
    waiting bigint;
BEGIN
    SELECT m.shard, m.seq, m.tableoid::regclass::text INTO $5, $6, $9
    FROM tidegate.message m
    WHERE m.tenant = $1 AND m.room = $2 AND m."offset" = $3
    FOR UPDATE;
    IF NOT FOUND THEN
        SELECT max(r.head) INTO head FROM tidegate.room r WHERE r.tenant = $1 AND r.name = $2;
        SELECT count(*) INTO waiting FROM tidegate.outbox o WHERE o.tenant = $1 AND o.room = $2;
        IF $3 < 1 OR $3 > coalesce(head, 0) THEN
            RAISE EXCEPTION USING ERRCODE = 'no_data_found', MESSAGE = format(
                'room %s of tenant %s stands at offset %s and never had %s%s', $2, $1,
                coalesce(head, 0), $3,
                CASE WHEN waiting > 0 THEN format(
                    '; %s of its messages wait in the outbox: a relay must give them their offsets '
                    'first', waiting) ELSE '' END);
        END IF;
        RAISE EXCEPTION USING ERRCODE = 'no_data_found', MESSAGE = format(
            'offset %s of room %s of tenant %s is gone from the log: retention has dropped it',
            $3, $2, $1);
    END IF;

    INSERT INTO tidegate.redaction AS d (tenant, room, "offset", shard, seq, reason)
    VALUES ($1, $2, $3, $5, $6, $4)
    ON CONFLICT DO NOTHING
    RETURNING d.txid INTO $8;
    $7 := FOUND;
    IF NOT $7 THEN
        SELECT d.txid INTO $8 FROM tidegate.redaction d
        WHERE d.tenant = $1 AND d.room = $2 AND d."offset" = $3;
        RETURN;
    END IF;
    UPDATE tidegate.message m
    SET payload = 'null', payload_bin = NULL, size_bytes = 4, tags = '{"redacted": "true"}'
    WHERE m.tenant = $1 AND m.room = $2 AND m."offset" = $3;
    -- The notice travels like any message, so it reaches every gateway, and every client that has
    -- the content already; when a relay appends it, the content leaves Redis in the same step.
    INSERT INTO tidegate.outbox (tenant, room, payload, tags)
    VALUES ($1, $2, 'null', jsonb_build_object('redacts', $3::text));
END
$$;
COMMENT ON FUNCTION tidegate.redact IS
    'Replaces a message in the log by a tombstone and publishes a notice of it. `tidegate redact` '
    'calls this and sees to the rest.';

CREATE FUNCTION tidegate.allow_redact(role regrole) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA tidegate TO %s', role);
    EXECUTE format('GRANT EXECUTE ON FUNCTION tidegate.redact(text, text, bigint, text) TO %s',
                   role);
    EXECUTE format('GRANT SELECT ON tidegate.meta, tidegate.shard, tidegate.redaction TO %s', role);
    EXECUTE format('GRANT SELECT (shard, txid) ON tidegate.outbox TO %s', role);
END
$$;
COMMENT ON FUNCTION tidegate.allow_redact IS 'Lets the role run `tidegate redact`.';

REVOKE ALL ON FUNCTION tidegate.redact, tidegate.allow_redact FROM PUBLIC;
