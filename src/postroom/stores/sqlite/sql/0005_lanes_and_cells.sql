-- The accepted priority and the lane are kept apart, crashes are counted, and named values are cells.
-- The table is copied, because columns that are read often must stand before the payload.

DROP VIEW task_queue;
DROP INDEX turns;
DROP INDEX expiring;
DROP INDEX named;
ALTER TABLE records RENAME TO records_before;

-- The bulky columns stand last: SQLite reads a row up to the last column that is asked for.
CREATE TABLE records (
    seq               INTEGER PRIMARY KEY,
    message_id        TEXT,               -- NULL when the store made the id: then it follows from seq
    queue             INTEGER NOT NULL,
    state             TEXT NOT NULL,
    priority          INTEGER NOT NULL,   -- as accepted
    lane              INTEGER NOT NULL,   -- in which it waits
    place             INTEGER NOT NULL,   -- the number of the event that put it there
    attempt           INTEGER NOT NULL,
    retries           INTEGER NOT NULL,
    crashes           INTEGER NOT NULL,
    max_retries       INTEGER NOT NULL,
    lease             INTEGER NOT NULL,
    worker_id         TEXT NOT NULL,
    lease_ns          INTEGER NOT NULL,
    turn              INTEGER NOT NULL,   -- place, end of the delay, or end of the lease; 0 in lines 10 to 14
    ready_at          INTEGER NOT NULL,
    expires           INTEGER NOT NULL,
    durability        TEXT NOT NULL,
    created_us        INTEGER NOT NULL,
    claimed_us        INTEGER NOT NULL,
    heartbeat_us      INTEGER NOT NULL,
    ended_us          INTEGER NOT NULL,
    sender            TEXT,               -- NULL when an operator or the library sent it
    line              INTEGER,            -- 16 * queue + lane when it can be claimed, 8 while it is delayed,
                                          -- 9 while it is leased, 10 EXECUTING, 11 DEAD_LETTER, 12 CANCELLED,
                                          -- 13 EXPIRED, 14 QUARANTINED, NULL when COMPLETED or DONE
    type              TEXT NOT NULL,
    parent_message_id TEXT NOT NULL,
    key               TEXT NOT NULL,
    delay_ns          INTEGER NOT NULL,
    ttl_ns            INTEGER NOT NULL,
    payload           BLOB NOT NULL,
    result            BLOB,
    trail             TEXT,               -- events that do not follow from the row, one a line
    room              BLOB                -- empty bytes that the first claim frees: a row that grows into them
                                          -- does not split its page
);

INSERT INTO records
SELECT
    seq, message_id, queue, state, first_priority, priority, place, attempt, retries, 0, max_retries, lease,
    worker_id, lease_ns, CASE WHEN lane IS NULL THEN 0 ELSE turn END, ready_at, expires, durability, created_us,
    claimed_us, heartbeat_us, ended_us, sender,
    CASE
        WHEN lane < 8 THEN 16 * queue + lane
        WHEN lane IS NOT NULL THEN lane
        WHEN state = 'EXECUTING' THEN 10
        WHEN state = 'DEAD_LETTER' THEN 11
        WHEN state = 'CANCELLED' THEN 12
        WHEN state = 'EXPIRED' THEN 13
        WHEN state = 'QUARANTINED' THEN 14
    END,
    type, parent_message_id, key, delay_ns, ttl_ns, payload, result, trail, room
FROM records_before;
DROP TABLE records_before;

CREATE UNIQUE INDEX named ON records (message_id) WHERE message_id IS NOT NULL;
-- The order of delivery of each lane, the deadlines of delays and leases, and records by state.
CREATE INDEX turns ON records (line, turn) WHERE line IS NOT NULL;
-- Messages of organizations by their age, for promotion. Their lines begin at 2^40.
CREATE INDEX aging ON records (lane, ready_at) WHERE line > 1099511627776;
CREATE INDEX expiring ON records (expires) WHERE expires > 0 AND (line = 8 OR line >= 16);

CREATE TABLE cells (
    kind  TEXT NOT NULL,
    key   TEXT NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (kind, key)
) WITHOUT ROWID;
INSERT INTO cells
SELECT 'key', length(queues.name) || ':' || queues.name || keys.key, CAST(json_array(message_id, seen_us) AS BLOB)
FROM keys JOIN queues ON queues.queue = keys.queue;
INSERT INTO cells
SELECT 'limits', name, CAST(json_object(
    'max_depth', max_depth, 'max_payload_bytes', max_payload_bytes, 'durability', durability
) AS BLOB)
FROM queues WHERE max_depth IS NOT NULL;
INSERT INTO cells SELECT 'outbox', '', CAST(value AS BLOB) FROM facts WHERE name = 'outbox';
DELETE FROM facts WHERE name = 'outbox';
DROP TABLE keys;
ALTER TABLE queues DROP COLUMN max_depth;
ALTER TABLE queues DROP COLUMN max_payload_bytes;
ALTER TABLE queues DROP COLUMN durability;

-- QUEUED records are counted by lane from now on, so everything is counted again. Lapses are known only as a count.
UPDATE queues SET depths = json_patch(
    (
        SELECT json_group_object(what, n) FROM (
            SELECT CASE state WHEN 'QUEUED' THEN 'P' || lane ELSE state END AS what, count(*) AS n
            FROM records
            WHERE records.queue = queues.queue AND seq <= coalesce((SELECT max(seq) FROM events), 0)
            GROUP BY what
        )
    ),
    json_object('LAPSES', coalesce(depths ->> 'LAPSES', 0) + coalesce((
        SELECT sum(change.value ->> 2) FROM events, json_each(events.counts) AS change
        WHERE events.seq > coalesce((SELECT value FROM facts WHERE name = 'counted'), 0)
            AND change.value ->> 0 = queues.queue AND change.value ->> 1 = 'LAPSES'
    ), 0))
);
INSERT INTO facts VALUES ('counted', coalesce((SELECT max(seq) FROM events), 0))
ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- Every task as a row of foreman's table: see 0004.
CREATE VIEW task_queue AS
SELECT
    coalesce(
        records.message_id, (SELECT value FROM facts WHERE name = 'store_id') || '-' || records.seq
    ) AS task_id,
    queues.name AS agent_url,
    CASE records.state
        WHEN 'SCHEDULED' THEN 'pending'
        WHEN 'QUEUED' THEN 'pending'
        WHEN 'RETRYING' THEN 'pending'
        WHEN 'PROCESSING' THEN 'claimed'
        WHEN 'COMPLETED' THEN 'completed'
        WHEN 'EXECUTING' THEN 'completed'
        WHEN 'DONE' THEN 'done'
        WHEN 'CANCELLED' THEN 'cancelled'
        WHEN 'EXPIRED' THEN 'expired'
        WHEN 'QUARANTINED' THEN 'quarantined'
        ELSE 'failed'
    END AS status,
    CAST(records.payload AS TEXT) AS payload,
    strftime('%Y-%m-%dT%H:%M:%S', records.created_us / 1000000, 'unixepoch')
        || printf('.%06dZ', records.created_us % 1000000) AS created_at,
    CASE WHEN records.claimed_us > 0 THEN
        strftime('%Y-%m-%dT%H:%M:%S', records.claimed_us / 1000000, 'unixepoch')
            || printf('.%06dZ', records.claimed_us % 1000000)
    END AS claimed_at,
    CASE WHEN records.ended_us > 0 THEN
        strftime('%Y-%m-%dT%H:%M:%S', records.ended_us / 1000000, 'unixepoch')
            || printf('.%06dZ', records.ended_us % 1000000)
    END AS completed_at,
    CAST(records.result AS TEXT) AS result,
    records.retries AS retry_count,
    CASE WHEN records.heartbeat_us > 0 THEN
        strftime('%Y-%m-%dT%H:%M:%S', records.heartbeat_us / 1000000, 'unixepoch')
            || printf('.%06dZ', records.heartbeat_us % 1000000)
    END AS last_heartbeat
FROM records JOIN queues ON queues.queue = records.queue
WHERE queues.name <> 'harness.decisions' AND queues.name NOT LIKE 'org:%';
