-- Takes a batch from the outbox and gives every message its positions. Runs after the locks of the
-- shards at hand were taken, as a statement of its own and so in a snapshot that is younger than
-- every sequencing before it.
--
-- Parameters: shards int[] and, parallel to it, marks bigint[] and snapshots text[] (NULL: none),
-- limit_rows and limit_bytes per shard, batch text.
--
-- For each shard the caller remembers a mark and a snapshot: every row that the snapshot shows up
-- to that id has been taken. What can be left is above the mark, or invisible to the snapshot:
-- written by a transaction that was under way in it or began later. A lower id may get its
-- transaction id late, so neither the id nor the transaction id alone would do. Looking only there
-- keeps a batch from stepping over the dead rows that somebody's old snapshot keeps in the table.
-- `+ 0` leaves each of the three looks exactly one index that fits it: the table is mostly empty, so
-- the planner would have nothing to choose by.
WITH
asked AS MATERIALIZED (
    SELECT shard, mark, snapshot::pg_snapshot AS snapshot
    FROM unnest(%(shards)s::int[], %(marks)s::bigint[], %(snapshots)s::text[])
         AS a (shard, mark, snapshot)
),
present AS MATERIALIZED (
    SELECT pg_current_snapshot() AS snapshot
),
candidate AS MATERIALIZED (
    SELECT a.shard, c.id, c.tid, c.size_bytes
    FROM asked a CROSS JOIN LATERAL (
        (SELECT o.id, o.ctid AS tid, o.size_bytes
         FROM tidegate.outbox o
         WHERE o.shard = a.shard AND o.id > a.mark
         ORDER BY o.id LIMIT %(limit_rows)s)
        UNION ALL
        -- Those still under way have nothing visible, however many rows they have written.
        (SELECT o.id, o.tid, o.size_bytes
         FROM pg_snapshot_xip(a.snapshot) AS x (txid)
         CROSS JOIN LATERAL (
             SELECT o.id, o.ctid AS tid, o.size_bytes
             FROM tidegate.outbox o
             WHERE o.shard + 0 = a.shard AND o.txid = x.txid AND o.id + 0 <= a.mark
             ORDER BY o.id LIMIT %(limit_rows)s
         ) o
         WHERE pg_visible_in_snapshot(x.txid, (SELECT snapshot FROM present)))
        UNION ALL
        (SELECT o.id, o.ctid, o.size_bytes
         FROM tidegate.outbox o
         WHERE o.shard + 0 = a.shard AND o.txid >= pg_snapshot_xmax(a.snapshot)
           AND o.id + 0 <= a.mark)
        ORDER BY id LIMIT %(limit_rows)s
    ) c
),
picked AS MATERIALIZED (
    SELECT shard, id, tid
    FROM (SELECT shard, id, tid,
                 sum(size_bytes) OVER (PARTITION BY shard ORDER BY id) - size_bytes AS bytes_before
          FROM candidate) c
    WHERE bytes_before < %(limit_bytes)s
),
-- Only rows that are really deleted get a position: if somebody else removed one, there is no hole.
taken AS (
    DELETE FROM tidegate.outbox
    WHERE ctid = ANY (ARRAY(SELECT tid FROM picked))
    RETURNING id, shard, tenant, room, payload, payload_bin, tags, size_bytes, txid, created_at
),
-- Positions are counted down from the new heads, which the numbers in reverse order allow.
ranked AS (
    SELECT *,
           row_number() OVER (PARTITION BY shard ORDER BY id DESC) - 1 AS before_shard_head,
           row_number() OVER (PARTITION BY tenant, room ORDER BY id DESC) - 1 AS before_room_head
    FROM taken
),
room_total AS MATERIALIZED (
    SELECT n.tenant, n.room, n.shard, n.messages, r.tid, coalesce(r.head, 0) + n.messages AS head
    FROM (SELECT tenant, room, min(shard) AS shard, count(*) AS messages
          FROM taken GROUP BY tenant, room) n
    LEFT JOIN LATERAL (
        SELECT r.ctid AS tid, r.head FROM tidegate.room r
        WHERE r.tenant = n.tenant AND r.name = n.room
        ORDER BY r.head DESC LIMIT 1
    ) r ON true
),
new_room AS (
    INSERT INTO tidegate.room (tenant, name, shard, head)
    SELECT tenant, room, shard, head FROM room_total WHERE tid IS NULL
),
raised_room AS (
    UPDATE tidegate.room r SET head = n.head
    FROM room_total n
    WHERE r.ctid = ANY (ARRAY(SELECT tid FROM room_total)) AND r.tenant = n.tenant AND r.name = n.room
),
shard_total AS MATERIALIZED (
    SELECT n.shard, s.tid, s.head + n.messages AS head
    FROM (SELECT shard, count(*) AS messages FROM taken GROUP BY shard) n
    CROSS JOIN LATERAL (
        SELECT s.ctid AS tid, s.head FROM tidegate.shard s
        WHERE s.id = n.shard
        ORDER BY s.head DESC LIMIT 1
    ) s
),
raised_shard AS (
    UPDATE tidegate.shard s SET head = n.head
    FROM shard_total n
    WHERE s.ctid = ANY (ARRAY(SELECT tid FROM shard_total)) AND s.id = n.shard
),
logged AS (
    INSERT INTO tidegate.message (shard, seq, tenant, room, "offset", batch, txid, tags, payload,
                                  payload_bin, size_bytes, created_at, sequenced_at)
    SELECT t.shard, s.head - t.before_shard_head, t.tenant, t.room, r.head - t.before_room_head,
           %(batch)s, t.txid, t.tags, t.payload, t.payload_bin, t.size_bytes, t.created_at,
           statement_timestamp()
    FROM ranked t
    JOIN shard_total s ON s.shard = t.shard
    JOIN room_total r ON r.tenant = t.tenant AND r.room = t.room
    RETURNING *
)
SELECT {columns}, NULL AS epoch, NULL AS snapshot, NULL AS last_id, NULL AS emptied
FROM logged
UNION ALL
-- One row for each shard, also if nothing was taken: what to remember.
SELECT a.shard, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
       (SELECT epoch FROM tidegate.meta), (SELECT snapshot FROM present)::text, p.last_id,
       coalesce(c.messages, 0) < %(limit_rows)s AND coalesce(c.messages = p.messages, true)
FROM asked a
LEFT JOIN (SELECT shard, count(*) AS messages FROM candidate GROUP BY shard) c USING (shard)
LEFT JOIN (SELECT shard, count(*) AS messages, max(id) AS last_id FROM picked GROUP BY shard) p
     USING (shard)
