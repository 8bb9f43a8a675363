-- The queries of a PostgreSQL store. {record} is the list of columns in the order of the fields of a record.
-- {lock} is empty in a reading; in a writing transaction it locks the rows. {on_disk} makes the commit of the
-- transaction wait for the disk.

-- name: by_seqs
SELECT {record} FROM postroom.records WHERE seq = ANY(%s) AND name IS NULL ORDER BY seq {lock}

-- name: by_names
SELECT {record} FROM postroom.records WHERE name = ANY(%s) ORDER BY seq {lock}

-- name: listing
SELECT {record} FROM postroom.records WHERE seq > %(after)s
    AND (%(queue)s::text IS NULL OR queue = %(queue)s) AND (%(state)s::text IS NULL OR state = %(state)s)
    ORDER BY seq LIMIT %(limit)s

-- name: listing_newest_first
SELECT {record} FROM postroom.records WHERE seq > %(after)s AND seq < %(before)s
    AND (%(queue)s::text IS NULL OR queue = %(queue)s) AND (%(state)s::text IS NULL OR state = %(state)s)
    ORDER BY seq DESC LIMIT %(limit)s

-- name: listing_of_state_newest_first
SELECT {record} FROM postroom.records
    WHERE state IN ('EXECUTING', 'DEAD_LETTER', 'CANCELLED', 'EXPIRED', 'QUARANTINED') AND state = %(state)s
    AND seq > %(after)s AND seq < %(before)s
    AND (%(queue)s::text IS NULL OR queue = %(queue)s) ORDER BY seq DESC LIMIT %(limit)s

-- name: listing_leased_newest_first
SELECT {record} FROM postroom.records WHERE state = 'PROCESSING' AND seq > %(after)s AND seq < %(before)s
    AND (%(queue)s::text IS NULL OR queue = %(queue)s) ORDER BY seq DESC LIMIT %(limit)s

-- name: listing_of_state
SELECT {record} FROM postroom.records
    WHERE state IN ('EXECUTING', 'DEAD_LETTER', 'CANCELLED', 'EXPIRED', 'QUARANTINED') AND state = %(state)s
    AND seq > %(after)s AND (%(queue)s::text IS NULL OR queue = %(queue)s) ORDER BY seq LIMIT %(limit)s

-- name: listing_leased
SELECT {record} FROM postroom.records WHERE state = 'PROCESSING' AND seq > %(after)s
    AND (%(queue)s::text IS NULL OR queue = %(queue)s) ORDER BY seq LIMIT %(limit)s

-- name: ending_lease
SELECT {record} FROM postroom.records WHERE state = 'PROCESSING' AND lease_until <= %s
    ORDER BY lease_until, seq LIMIT %s {skip}

-- name: ending_delay
SELECT {record} FROM postroom.records WHERE state IN ('SCHEDULED', 'RETRYING') AND due <= %s
    ORDER BY due, seq LIMIT %s {skip}

-- name: ending_expiry
SELECT {record} FROM postroom.records WHERE expires > 0 AND state IN ('QUEUED', 'SCHEDULED', 'RETRYING')
    AND expires <= %s ORDER BY expires, seq LIMIT %s {skip}

-- name: first_deadlines
SELECT (SELECT min(lease_until) FROM postroom.records WHERE state = 'PROCESSING'),
    (SELECT min(due) FROM postroom.records WHERE state IN ('SCHEDULED', 'RETRYING'))

-- name: pull
SELECT {record}, payload, type, parent_message_id FROM postroom.records
    WHERE state = 'QUEUED' AND lane = %s AND queue = %s ORDER BY place LIMIT %s {skip}

-- name: heads_by_seq
SELECT {record}, payload, type, parent_message_id FROM postroom.records WHERE seq = ANY(%s) AND name IS NULL
    ORDER BY seq {lock}

-- name: pull_many
SELECT found.* FROM unnest(%s::text[], %s::int[], %s::bigint[]) AS wanted(queue, lane, most)
    CROSS JOIN LATERAL (
        SELECT {record}, payload, type, parent_message_id FROM postroom.records r
        WHERE r.state = 'QUEUED' AND r.lane = wanted.lane AND r.queue = wanted.queue
        ORDER BY place LIMIT wanted.most {skip}
    ) AS found

-- name: all_active
SELECT lanes.lane, one.queue FROM generate_series(0, 3) AS lanes(lane) CROSS JOIN LATERAL (
    WITH RECURSIVE found(queue) AS (
        (SELECT queue FROM postroom.records WHERE state = 'QUEUED' AND lane = lanes.lane
            AND queue >= 'org:' AND queue < 'org;' ORDER BY queue LIMIT 1)
        UNION ALL
        SELECT (SELECT r.queue FROM postroom.records r WHERE r.state = 'QUEUED' AND r.lane = lanes.lane
            AND r.queue > found.queue AND r.queue < 'org;' ORDER BY r.queue LIMIT 1)
        FROM found WHERE found.queue IS NOT NULL
    ) SELECT queue FROM found WHERE queue IS NOT NULL LIMIT 100
) AS one LIMIT 100

-- name: all_heads
SELECT found.* FROM (
    SELECT lanes.lane, one.queue FROM generate_series(0, 3) AS lanes(lane) CROSS JOIN LATERAL (
        WITH RECURSIVE names(queue) AS (
            (SELECT queue FROM postroom.records WHERE state = 'QUEUED' AND lane = lanes.lane
                AND queue >= 'org:' AND queue < 'org;' ORDER BY queue LIMIT 1)
            UNION ALL
            SELECT (SELECT r.queue FROM postroom.records r WHERE r.state = 'QUEUED' AND r.lane = lanes.lane
                AND r.queue > names.queue AND r.queue < 'org;' ORDER BY r.queue LIMIT 1)
            FROM names WHERE names.queue IS NOT NULL
        ) SELECT queue FROM names WHERE queue IS NOT NULL LIMIT 100
    ) AS one LIMIT 100
) AS active CROSS JOIN LATERAL (
    SELECT {record}, payload, type, parent_message_id FROM postroom.records r
    WHERE r.state = 'QUEUED' AND r.lane = active.lane AND r.queue = active.queue
    ORDER BY place LIMIT 8 {skip}
) AS found

-- name: all_oldest
SELECT one.* FROM generate_series(0, 3) AS lanes(lane) CROSS JOIN LATERAL (
    SELECT {record} FROM postroom.records WHERE state = 'QUEUED' AND left(queue, 4) = 'org:'
    AND lane = lanes.lane ORDER BY ready_at, seq LIMIT 1
) AS one

-- name: active
WITH RECURSIVE found(queue) AS (
    (SELECT queue FROM postroom.records WHERE state = 'QUEUED' AND lane = %(lane)s AND queue > %(after)s
        AND queue >= 'org:' AND queue < 'org;' ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT r.queue FROM postroom.records r WHERE r.state = 'QUEUED' AND r.lane = %(lane)s
        AND r.queue > found.queue AND r.queue < 'org;' ORDER BY r.queue LIMIT 1)
    FROM found WHERE found.queue IS NOT NULL
) SELECT queue FROM found WHERE queue IS NOT NULL LIMIT %(limit)s

-- name: stored
SELECT type, parent_message_id, key, delay_ns, ttl_ns, payload, result, trail FROM postroom.records
    WHERE seq = %s

-- name: payloads
SELECT seq, payload FROM postroom.records WHERE seq = ANY(%s) AND name IS NULL

-- name: results
SELECT seq, result FROM postroom.records WHERE seq = ANY(%s) AND name IS NULL AND result IS NOT NULL

-- name: insert
INSERT INTO postroom.records ({record}, type, parent_message_id, key, delay_ns, ttl_ns, payload)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s,
        %s, %s, %s, %s, %s, %s)

-- name: update
UPDATE postroom.records SET state = %s, lane = %s, place = %s, attempt = %s, retries = %s, crashes = %s,
    lease = %s, worker_id = %s, lease_ns = %s, lease_until = %s, due = %s, ready_at = %s, expires = %s,
    claimed_us = %s, heartbeat_us = %s, ended_us = %s, result = coalesce(%s, result),
    trail = CASE WHEN length(coalesce(trail, '')) < {trail_max} THEN coalesce(trail || %s::bytea, trail, %s)
        ELSE trail END
    WHERE seq = %s

-- name: insert_alike
INSERT INTO postroom.records ({record}, type, parent_message_id, key, delay_ns, ttl_ns, payload)
    SELECT %(first)s + (ordinality - 1) * %(step)s, NULL, %(queue)s, %(state)s, %(priority)s, %(priority)s,
        %(first)s + (ordinality - 1) * %(step)s, 0, 0, 0, %(max_retries)s, 0, '', 0, 0, %(due)s, %(now)s,
        %(expires)s, %(durability)s, %(wall_us)s, 0, 0, 0, %(sender)s, %(type)s, %(parent)s, '', %(delay_ns)s,
        %(ttl_ns)s, payload
    FROM unnest(%(payloads)b::bytea[]) WITH ORDINALITY AS new(payload, ordinality)

-- name: lease_many
UPDATE postroom.records AS r SET state = 'PROCESSING', attempt = r.attempt + 1,
    lease = %(first)s + new.ordinality - 1, worker_id = %(worker)s, lease_ns = %(lease_ns)s,
    lease_until = %(until)s, due = 0, claimed_us = %(wall_us)s, heartbeat_us = %(wall_us)s, ended_us = 0
    FROM unnest(%(seqs)b::bigint[]) WITH ORDINALITY AS new(seq, ordinality) WHERE r.seq = new.seq

-- name: leased
SELECT r.seq, r.lease, r.queue, r.lane, r.worker_id, r.attempt,
    r.lease_until - r.lease_ns - 1000 * greatest(0, r.heartbeat_us - r.claimed_us), r.durability
    FROM postroom.records r WHERE r.seq = ANY(%s) AND r.state = 'PROCESSING' AND r.name IS NULL
    AND r.lease_until > %s ORDER BY r.seq FOR NO KEY UPDATE

-- name: complete_many
UPDATE postroom.records AS r SET state = 'COMPLETED', place = new.place, lease_until = 0, due = 0,
    ended_us = %(wall_us)s, result = new.result
    FROM unnest(%(seqs)b::bigint[], %(places)b::bigint[], %(results)b::bytea[]) AS new(seq, place, result)
    WHERE r.seq = new.seq

-- name: complete_alike
UPDATE postroom.records AS r SET state = 'COMPLETED', place = new.place, lease_until = 0, due = 0,
    ended_us = %(wall_us)s, result = %(result)s
    FROM unnest(%(seqs)b::bigint[], %(places)b::bigint[]) AS new(seq, place) WHERE r.seq = new.seq

-- name: forget
DELETE FROM postroom.records AS r USING unnest(%b::bigint[], %b::bigint[], %s::text[]) AS old(seq, place, state)
    WHERE r.seq = old.seq AND r.place = old.place AND r.state = old.state

-- name: append_events
INSERT INTO postroom.events (number, writer, count, batch) VALUES (%s, %s, %s, %s)

-- name: was_committed
SELECT EXISTS (SELECT 1 FROM postroom.events WHERE number = %s AND writer = %s)

-- name: events_after
SELECT position, count, number, batch FROM postroom.events WHERE position > %s AND count > 0
    ORDER BY position LIMIT %s

-- name: newest_events
SELECT position, count, number, batch FROM postroom.events WHERE position <= (SELECT position FROM postroom.feed)
    AND count > 0 ORDER BY position DESC LIMIT 1

-- name: event_row
SELECT (extract(epoch FROM at) * 1000000)::bigint, batch FROM postroom.events WHERE number = %s AND count > 0

-- name: forget_events
DELETE FROM postroom.events WHERE position <= %s
    AND position < (SELECT max(position) FROM postroom.events WHERE count > 0)

-- name: cell
SELECT value FROM postroom.cells WHERE kind = %s AND key = %s

-- name: cells
SELECT key, value FROM postroom.cells WHERE kind = %s AND key > %s ORDER BY key LIMIT %s

-- name: put_cells
INSERT INTO postroom.cells (kind, key, value) SELECT * FROM unnest(%s::text[], %s::text[], %b::bytea[])
    ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value

-- name: add_cells
INSERT INTO postroom.cells (kind, key, value) SELECT * FROM unnest(%s::text[], %s::text[], %b::bytea[])
    ON CONFLICT (kind, key) DO NOTHING

-- name: change_cells
UPDATE postroom.cells AS c SET value = new.value
    FROM unnest(%s::text[], %s::text[], %b::bytea[], %b::bytea[]) AS new(kind, key, value, before)
    WHERE c.kind = new.kind AND c.key = new.key AND c.value = new.before

-- name: drop_cells
DELETE FROM postroom.cells AS c USING unnest(%s::text[], %s::text[]) AS old(kind, key)
    WHERE c.kind = old.kind AND c.key = old.key

-- name: drop_known_cells
DELETE FROM postroom.cells AS c USING unnest(%s::text[], %s::text[], %b::bytea[]) AS old(kind, key, value)
    WHERE c.kind = old.kind AND c.key = old.key AND c.value = old.value

-- name: count
INSERT INTO postroom.count_changes (queue, counter, change)
    SELECT * FROM unnest(%s::text[], %s::text[], %b::bigint[])

-- name: depths_of
SELECT queue, counter, sum(n)::bigint FROM (
    SELECT queue, counter, n FROM postroom.counts WHERE queue = ANY(%(queues)s::text[])
    UNION ALL SELECT queue, counter, change FROM postroom.count_changes WHERE queue = ANY(%(queues)s::text[])
) AS every GROUP BY queue, counter

-- name: total
SELECT counter, sum(n)::bigint FROM (
    SELECT counter, n FROM postroom.counts WHERE queue = ''
    UNION ALL SELECT counter, change FROM postroom.count_changes WHERE left(queue, 4) = 'org:'
) AS every GROUP BY counter

-- name: count_active
WITH changed AS (
    SELECT queue, sum(change) AS n FROM postroom.count_changes
    WHERE left(queue, 4) = 'org:' AND counter IN ('P0', 'P1', 'P2', 'P3') GROUP BY queue
), differing AS (
    SELECT (folded.n + changed.n > 0)::int - (folded.n > 0)::int AS n FROM changed CROSS JOIN LATERAL (
        SELECT coalesce(sum(n), 0) AS n FROM postroom.counts
        WHERE queue = changed.queue AND counter IN ('P0', 'P1', 'P2', 'P3')
    ) AS folded
)
SELECT (SELECT count(DISTINCT queue) FROM postroom.counts
    WHERE n > 0 AND counter IN ('P0', 'P1', 'P2', 'P3') AND left(queue, 4) = 'org:')
    + (SELECT coalesce(sum(n), 0) FROM differing)::bigint

-- name: depths
SELECT queue, counter, sum(n)::bigint FROM (
    SELECT queue, counter, n FROM postroom.counts WHERE queue <> '' AND starts_with(queue, %(prefix)s)
    UNION ALL SELECT queue, counter, change FROM postroom.count_changes WHERE starts_with(queue, %(prefix)s)
) AS every GROUP BY queue, counter HAVING sum(n) <> 0

-- name: active_depths
WITH active AS (
    SELECT queue FROM postroom.counts
    WHERE n > 0 AND counter IN ('P0', 'P1', 'P2', 'P3') AND left(queue, 4) = 'org:'
    UNION SELECT queue FROM postroom.count_changes
    WHERE left(queue, 4) = 'org:' AND counter IN ('P0', 'P1', 'P2', 'P3')
)
SELECT queue, counter, sum(n)::bigint FROM (
    SELECT queue, counter, n FROM active JOIN postroom.counts USING (queue)
    UNION ALL SELECT queue, counter, change FROM active JOIN postroom.count_changes USING (queue)
) AS every GROUP BY queue, counter HAVING sum(n) <> 0

-- name: wrong_counters
WITH held AS (
    SELECT queue, CASE state WHEN 'QUEUED' THEN 'P' || lane ELSE state END AS counter, count(*) AS n
    FROM postroom.records GROUP BY 1, 2
), counted AS (
    SELECT queue, counter, n FROM postroom.counts
    UNION ALL SELECT queue, counter, change FROM postroom.count_changes
    UNION ALL SELECT '', counter, change FROM postroom.count_changes WHERE left(queue, 4) = 'org:'
), differences AS (
    SELECT queue, counter, n AS held, 0 AS counted FROM held
    UNION ALL SELECT '', counter, n, 0 FROM held WHERE left(queue, 4) = 'org:'
    UNION ALL SELECT queue, counter, 0, n FROM counted WHERE counter <> 'LAPSES'
)
SELECT queue, counter, sum(counted)::bigint, sum(held)::bigint FROM differences
GROUP BY queue, counter HAVING sum(counted) <> sum(held) ORDER BY queue, counter LIMIT %s

-- name: indexes
SELECT c.relname, i.indisvalid AND i.indisready FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
WHERE c.relnamespace = %s::regnamespace ORDER BY c.relname

-- name: oldest_transaction
SELECT pid, application_name, extract(epoch FROM clock_timestamp() - xact_start)::float8 FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
    AND xact_start IS NOT NULL ORDER BY xact_start LIMIT 1

-- name: dead_rows
SELECT relname, n_dead_tup, n_live_tup FROM pg_stat_user_tables WHERE schemaname = %s ORDER BY relname

-- name: newest_time
SELECT greatest(
    coalesce((SELECT ready_at FROM postroom.records ORDER BY seq DESC LIMIT 1), 0),
    coalesce((SELECT max(lease_until - lease_ns) FROM postroom.records WHERE state = 'PROCESSING'), 0),
    coalesce((SELECT max(ready_at) FROM postroom.records WHERE state IN ('SCHEDULED', 'RETRYING')), 0))

-- name: restart_leases
UPDATE postroom.records SET lease_until = %s + lease_ns WHERE state = 'PROCESSING'

-- name: begin
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, pg_advisory_xact_lock(%s), {on_disk}

-- name: begin_with_numbers
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, pg_advisory_xact_lock(%s), {on_disk},
    postroom.take_numbers(%s, %s, %s)

-- name: lock_name
SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))

-- name: take_numbers
SELECT postroom.take_numbers(%s, %s, %s)

-- name: newest_number
SELECT last_value FROM postroom.numbers

-- name: place_events
SELECT postroom.place_events(%s), {on_disk}

-- name: fold_counts
SELECT postroom.fold_counts()

-- name: make_partitions
SELECT postroom.make_partitions()

-- name: drop_partitions
SELECT postroom.drop_partitions(%s)

-- name: fact
SELECT value FROM postroom.facts WHERE name = %s

-- name: add_fact
INSERT INTO postroom.facts VALUES (%s, %s) ON CONFLICT DO NOTHING

-- name: set_fact
INSERT INTO postroom.facts VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET value = excluded.value

-- name: values_of_records
SELECT seq, payload, result, trail FROM postroom.records WHERE seq > %s ORDER BY seq LIMIT %s {lock}

-- name: values_of_events
SELECT number, batch FROM postroom.events WHERE number > %s AND count > 0 ORDER BY number LIMIT %s

-- name: values_of_cells
SELECT kind, key, value FROM postroom.cells WHERE (kind, key) > (%s, %s) ORDER BY kind, key LIMIT %s {lock}

-- name: set_payload
UPDATE postroom.records SET payload = %s WHERE seq = %s

-- name: set_result
UPDATE postroom.records SET result = %s WHERE seq = %s

-- name: set_trail
UPDATE postroom.records SET trail = %s WHERE seq = %s

-- name: set_batch
UPDATE postroom.events SET batch = %s WHERE number = %s

-- name: set_cell
UPDATE postroom.cells SET value = %s WHERE kind = %s AND key = %s

-- name: kinds
SELECT DISTINCT kind FROM postroom.cells ORDER BY kind

-- name: is_used
SELECT EXISTS (SELECT 1 FROM postroom.records) OR EXISTS (SELECT 1 FROM postroom.events)
    OR EXISTS (SELECT 1 FROM postroom.cells)

-- name: copy_records
COPY postroom.records ({record}, type, parent_message_id, key, delay_ns, ttl_ns, payload, result, trail) FROM STDIN

-- name: copy_events
COPY postroom.events (number, writer, count, position, batch) FROM STDIN

-- name: copy_cells
COPY postroom.cells (kind, key, value) FROM STDIN

-- name: copy_counts
COPY postroom.count_changes (queue, counter, change) FROM STDIN

-- name: set_number
SELECT setval('postroom.numbers', %s)

-- name: set_feed
UPDATE postroom.feed SET position = %s
