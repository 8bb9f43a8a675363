-- The agent that sent a task to another agent; NULL for tasks of operators and of the library.
ALTER TABLE records ADD COLUMN sender TEXT;

-- Every task as a row of foreman's table `task_queue`, for any SQLite tool. The view is read-only, so tasks change only
-- through postroom. The harness's own queue of decisions is left out. Times are RFC 3339 in UTC.
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
WHERE queues.name <> 'harness.decisions';
