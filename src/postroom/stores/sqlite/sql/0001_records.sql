-- The first schema. A transaction of one message touches three pages: its record, its entry in `turns`, its events.

CREATE TABLE facts (
    name  TEXT PRIMARY KEY,
    value NOT NULL
) WITHOUT ROWID;

-- `depths` counts the records by state, up to the event number in facts.counted. Later changes are in `events`.
CREATE TABLE queues (
    queue             INTEGER PRIMARY KEY,
    name              TEXT NOT NULL UNIQUE,
    max_depth         INTEGER,
    max_payload_bytes INTEGER,
    durability        TEXT,
    depths            TEXT NOT NULL DEFAULT '{}'
);

-- The bulky columns stand last: a row is read up to the last column that is asked for.
CREATE TABLE records (
    seq               INTEGER PRIMARY KEY,
    message_id        TEXT,               -- NULL when the store made the id: then it follows from seq
    queue             INTEGER NOT NULL,
    state             TEXT NOT NULL,
    priority          INTEGER NOT NULL,
    place             INTEGER NOT NULL,   -- the number of the event that put it there
    attempt           INTEGER NOT NULL,
    retries           INTEGER NOT NULL,
    max_retries       INTEGER NOT NULL,
    lease             INTEGER NOT NULL,
    worker_id         TEXT NOT NULL,
    lease_ns          INTEGER NOT NULL,
    lane              INTEGER,            -- its priority when it can be claimed, 8 while it is delayed,
                                          -- 9 while it is leased, NULL at its end
    turn              INTEGER NOT NULL,   -- place, end of the delay, or end of the lease
    ready_at          INTEGER NOT NULL,
    expires           INTEGER NOT NULL,
    durability        TEXT NOT NULL,
    created_us        INTEGER NOT NULL,
    claimed_us        INTEGER NOT NULL,
    heartbeat_us      INTEGER NOT NULL,
    ended_us          INTEGER NOT NULL,
    type              TEXT NOT NULL,
    parent_message_id TEXT NOT NULL,
    key               TEXT NOT NULL,
    delay_ns          INTEGER NOT NULL,
    ttl_ns            INTEGER NOT NULL,
    first_priority    INTEGER NOT NULL,
    payload           BLOB NOT NULL,
    result            BLOB,
    trail             TEXT,               -- events that do not follow from the row, one a line
    room              BLOB                -- empty bytes that the first claim frees: a row that grows into them
                                          -- does not split its page
);

CREATE UNIQUE INDEX named ON records (message_id) WHERE message_id IS NOT NULL;
-- The order of delivery of each lane, and the deadlines of delays and leases.
CREATE INDEX turns ON records (queue, lane, turn) WHERE lane IS NOT NULL;
CREATE INDEX expiring ON records (expires) WHERE expires > 0 AND lane < 9;

CREATE TABLE keys (
    queue      INTEGER NOT NULL,
    key        TEXT NOT NULL,
    message_id TEXT NOT NULL,
    seen_us    INTEGER NOT NULL,
    PRIMARY KEY (queue, key)
) WITHOUT ROWID;
CREATE INDEX keys_by_age ON keys (seen_us);

-- One row per transaction, with the number of its last event, its changes of the depths, and its events as JSON.
-- The newest row is never purged: the next number follows from it.
CREATE TABLE events (
    seq    INTEGER PRIMARY KEY,
    ts_us  INTEGER NOT NULL,
    counts TEXT NOT NULL,
    batch  TEXT NOT NULL
);
