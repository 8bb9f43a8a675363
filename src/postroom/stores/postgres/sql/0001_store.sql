-- Rule 1: text is compared byte by byte (COLLATE "C"), as in every other store.
-- Rule 2: a later script only adds, because workers of the previous version still run while it is applied.

CREATE TABLE postroom.facts (
    name text PRIMARY KEY,
    value text NOT NULL
);

-- Numbers of records, events and leases. `take_numbers` moves it on; the first number is 1.
CREATE SEQUENCE postroom.numbers MINVALUE 0 START 0;

CREATE TABLE postroom.records (
    seq bigint PRIMARY KEY,
    name text COLLATE "C",  -- an id that the caller chose; NULL: the id follows from seq
    queue text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL,
    priority smallint NOT NULL,
    lane smallint NOT NULL,
    place bigint NOT NULL,
    attempt bigint NOT NULL,
    retries bigint NOT NULL,
    crashes bigint NOT NULL,
    max_retries bigint NOT NULL,
    lease bigint NOT NULL,
    worker_id text COLLATE "C" NOT NULL,
    lease_ns bigint NOT NULL,
    lease_until bigint NOT NULL,
    due bigint NOT NULL,
    ready_at bigint NOT NULL,
    expires bigint NOT NULL,
    durability text COLLATE "C" NOT NULL,
    created_us bigint NOT NULL,
    claimed_us bigint NOT NULL,
    heartbeat_us bigint NOT NULL,
    ended_us bigint NOT NULL,
    sender text COLLATE "C" NOT NULL,
    type text COLLATE "C" NOT NULL,
    parent_message_id text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    delay_ns bigint NOT NULL,
    ttl_ns bigint NOT NULL,
    payload bytea NOT NULL,
    result bytea,
    trail bytea  -- events that the record does not imply, as JSON lines
) WITH (
    fillfactor = 85,
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_analyze_scale_factor = 0.05
);

CREATE UNIQUE INDEX records_by_name ON postroom.records (name) WHERE name IS NOT NULL;
CREATE INDEX records_ready ON postroom.records (lane, queue, place) WHERE state = 'QUEUED';
CREATE INDEX records_oldest ON postroom.records (lane, ready_at) WHERE state = 'QUEUED' AND left(queue, 4) = 'org:';
CREATE INDEX records_leased ON postroom.records (lease_until, seq) WHERE state = 'PROCESSING';
CREATE INDEX records_delayed ON postroom.records (due, seq) WHERE state IN ('SCHEDULED', 'RETRYING');
CREATE INDEX records_expiring ON postroom.records (expires, seq)
    WHERE expires > 0 AND state IN ('QUEUED', 'SCHEDULED', 'RETRYING');
CREATE INDEX records_by_state ON postroom.records (state, seq)
    WHERE state IN ('EXECUTING', 'DEAD_LETTER', 'CANCELLED', 'EXPIRED', 'QUARANTINED');

-- One row for each commit: its events, packed. `position` is that of the last of them, given by `place_events`.
CREATE TABLE postroom.events (
    number bigint NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    writer bigint NOT NULL,  -- random; tells whether a commit with an unknown outcome happened
    count bigint NOT NULL,
    position bigint,
    batch bytea NOT NULL
) PARTITION BY RANGE (at);

CREATE INDEX events_by_position ON postroom.events (position);
CREATE INDEX events_without_position ON postroom.events (number) WHERE position IS NULL;
CREATE INDEX events_by_number ON postroom.events (number);
CREATE TABLE postroom.events_other PARTITION OF postroom.events DEFAULT;

-- The last position that was given: one row.
CREATE TABLE postroom.feed (
    position bigint NOT NULL
) WITH (fillfactor = 50);
INSERT INTO postroom.feed VALUES (0);

CREATE TABLE postroom.cells (
    kind text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (kind, key)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

-- Counters: what commits added, and what was folded. The queue '' is the sum of all organizations.
CREATE TABLE postroom.count_changes (
    queue text COLLATE "C" NOT NULL,
    counter text COLLATE "C" NOT NULL,
    change bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX count_changes_by_queue ON postroom.count_changes (queue);

CREATE TABLE postroom.counts (
    queue text COLLATE "C" NOT NULL,
    counter text COLLATE "C" NOT NULL,
    n bigint NOT NULL,
    PRIMARY KEY (queue, counter)
) WITH (fillfactor = 50);

-- The first of `wanted` consecutive numbers. `spare_first` to `spare_end` are numbers that the caller took
-- before and did not use: they are used now if nobody has taken numbers since. The lock is held for this call
-- only, so transactions do not wait for each other.
CREATE FUNCTION postroom.take_numbers(wanted bigint, spare_first bigint, spare_end bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    last bigint;
    first bigint;
BEGIN
    PERFORM pg_advisory_lock(hashtext('postroom.numbers'), 1);
    SELECT last_value INTO last FROM postroom.numbers;
    first := CASE WHEN spare_end = last AND spare_first <= last THEN spare_first ELSE last + 1 END;
    PERFORM setval('postroom.numbers', first + wanted - 1);
    PERFORM pg_advisory_unlock(hashtext('postroom.numbers'), 1);
    RETURN first;
EXCEPTION WHEN OTHERS THEN
    PERFORM pg_advisory_unlock(hashtext('postroom.numbers'), 1);
    RAISE;
END $$;

-- Give positions to committed events that have none, in the order of their numbers. Returns the last position.
CREATE FUNCTION postroom.place_events(commits_max bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    last bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('postroom.feed'), 1);
    SELECT position INTO last FROM postroom.feed;
    WITH fresh AS (
        SELECT number, at, count FROM postroom.events WHERE position IS NULL ORDER BY number LIMIT commits_max
    ), placed AS (
        SELECT number, at, last + sum(count) OVER (ORDER BY number) AS position FROM fresh
    ), updated AS (
        UPDATE postroom.events AS e SET position = placed.position FROM placed
        WHERE e.number = placed.number AND e.at = placed.at AND e.position IS NULL RETURNING e.position
    )
    SELECT coalesce(max(position), last) INTO last FROM updated;
    UPDATE postroom.feed SET position = last WHERE position < last;
    RETURN last;
END $$;

-- Add the changes of counters to the counters; one caller at a time, the others return at once.
CREATE FUNCTION postroom.fold_counts() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtext('postroom.counts'), 1) THEN
        RETURN;
    END IF;
    WITH gone AS (
        DELETE FROM postroom.count_changes RETURNING queue, counter, change
    ), sums AS (
        SELECT queue, counter, sum(change) AS n FROM gone GROUP BY queue, counter
        UNION ALL
        SELECT '', counter, sum(change) FROM gone WHERE left(queue, 4) = 'org:' GROUP BY counter
    )
    INSERT INTO postroom.counts AS c SELECT queue, counter, n FROM sums WHERE n <> 0
    ON CONFLICT (queue, counter) DO UPDATE SET n = c.n + excluded.n;
END $$;

-- Make the partitions of events for this month and the next one. Events of a month that nobody made a
-- partition for are in events_other, and stay there.
CREATE FUNCTION postroom.make_partitions() RETURNS void
LANGUAGE plpgsql SET lock_timeout = '200ms' AS $$
DECLARE
    month timestamptz;
    name text;
BEGIN
    FOR i IN 0..1 LOOP
        month := date_trunc('month', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' + make_interval(months => i);
        name := 'events_' || to_char(month AT TIME ZONE 'UTC', 'YYYYMM');
        CONTINUE WHEN to_regclass('postroom.' || name) IS NOT NULL;
        PERFORM pg_advisory_xact_lock(hashtext('postroom.partitions'), 1);
        CONTINUE WHEN to_regclass('postroom.' || name) IS NOT NULL;
        EXECUTE format(
            'CREATE TABLE postroom.%I PARTITION OF postroom.events FOR VALUES FROM (%L) TO (%L)',
            name, month,
            (month AT TIME ZONE 'UTC' + interval '1 month') AT TIME ZONE 'UTC'
        );
    END LOOP;
EXCEPTION WHEN check_violation OR duplicate_table OR lock_not_available THEN
    RETURN;
END $$;

-- Drop the partitions of past months whose events all have a position up to `up_to`. Returns how many.
CREATE FUNCTION postroom.drop_partitions(up_to bigint) RETURNS int
LANGUAGE plpgsql SET lock_timeout = '200ms' AS $$
DECLARE
    name text;
    is_needed boolean;
    dropped int := 0;
BEGIN
    FOR name IN
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'postroom.events'::regclass AND c.relname ~ '^events_[0-9]{6}$'
            AND c.relname < 'events_' || to_char(now() AT TIME ZONE 'UTC', 'YYYYMM')
    LOOP
        EXECUTE format(
            'SELECT EXISTS (SELECT 1 FROM postroom.%I WHERE position IS NULL OR position > %L) '
            'OR (SELECT position FROM postroom.feed) IN (SELECT position FROM postroom.%I)', name, up_to, name
        ) INTO is_needed;
        IF NOT is_needed THEN
            EXECUTE format('DROP TABLE postroom.%I', name);
            dropped := dropped + 1;
        END IF;
    END LOOP;
    RETURN dropped;
EXCEPTION WHEN lock_not_available THEN
    RETURN dropped;  -- the next call tries again
END $$;

-- A payload as JSON, for people; NULL when it is none that JSONB can hold.
CREATE FUNCTION postroom.as_json(payload bytea) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN convert_from(payload, 'UTF8')::jsonb;
EXCEPTION WHEN others THEN
    RETURN NULL;
END $$;

CREATE VIEW postroom.messages AS
    SELECT seq, name, queue, state, priority, lane, attempt, retries, worker_id,
        to_timestamp(created_us / 1e6) AS created_at,
        CASE WHEN ended_us > 0 THEN to_timestamp(ended_us / 1e6) END AS ended_at,
        type, parent_message_id, postroom.as_json(payload) AS payload, payload AS payload_bytes,
        postroom.as_json(result) AS result
    FROM postroom.records;

SELECT postroom.make_partitions();
