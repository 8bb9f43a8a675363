# ruff: noqa: S608 - every part of a statement is ours
"""The same tables by other means: SQL of DuckDB over the same segments, written without a look at Spark's."""

from functools import cache
from pathlib import Path
from typing import Any

import duckdb

from postroom.core.redaction import Redactor
from postroom.pipeline.delta.tables import Tables
from tests.spark.plainrows import plain, records

FIELDS = {
    "event_id": "VARCHAR", "seq": "BIGINT", "ts_us": "BIGINT", "kind": "VARCHAR", "contract": "VARCHAR",
    "source": "VARCHAR", "schema": "INTEGER", "queue": "VARCHAR", "org_id": "VARCHAR", "user_id": "VARCHAR",
    "agent_id": "VARCHAR", "message_id": "VARCHAR", "goal_id": "VARCHAR", "task_id": "VARCHAR",
    "parent_message_id": "VARCHAR", "type": "VARCHAR", "priority": "INTEGER", "state": "VARCHAR",
    "attempt": "INTEGER", "worker_id": "VARCHAR", "trace_id": "VARCHAR", "span_id": "VARCHAR",
    "duration_us": "BIGINT", "error_type": "VARCHAR", "error": "VARCHAR", "model": "VARCHAR",
    "tokens_in": "BIGINT", "tokens_out": "BIGINT", "cost_usd": "DECIMAL(18,9)", "body_bytes": "BIGINT",
    "payload": "VARCHAR", "sender": "VARCHAR", "recipient": "VARCHAR", "service": "VARCHAR",
    "lease": "BIGINT", "prior": "VARCHAR", "detail": "VARCHAR",
}  # fmt: skip

DAY = "CAST(make_timestamp({}) AS DATE)"

LINES = """
CREATE TABLE lines AS
SELECT {fields}, CAST(NULL AS VARCHAR) AS rescued, parse_filename(filename) AS segment,
       CAST(NULL AS VARCHAR) AS redaction, CAST(regexp_extract(filename, 'date=([0-9-]+)', 1) AS DATE) AS date
FROM read_json('{folder}/date=*/hour=*/*.jsonl', format = 'newline_delimited', columns = {columns},
               filename = true, hive_partitioning = false)
"""

EVENTS = f"""
CREATE TABLE events AS
SELECT DISTINCT ON (event_id) * EXCLUDE (rescued, segment, redaction, date), {DAY.format("ts_us")} AS day
FROM lines ORDER BY event_id, ts_us
"""

MESSAGES = f"""
CREATE TABLE messages AS
WITH mine AS (SELECT * FROM events WHERE message_id IS NOT NULL),
told AS (
    SELECT DISTINCT ON (message_id) * FROM mine ORDER BY message_id, kind <> 'created', ts_us, seq
),
ends AS (
    SELECT message_id, ts_us,
           CASE kind WHEN 'execution_completed' THEN 'completed' WHEN 'delivered' THEN 'completed'
                     ELSE kind END AS outcome,
           kind = 'delivered' AS is_receipt
    FROM mine
    WHERE kind IN ('execution_completed', 'delivered', 'dead_letter', 'cancelled', 'expired', 'quarantined')
),
last_end AS (
    SELECT DISTINCT ON (message_id) * FROM ends ORDER BY message_id, is_receipt, ts_us DESC
),
times AS (
    SELECT message_id,
           min(ts_us) FILTER (kind = 'created') AS created_us,
           min(ts_us) FILTER (kind = 'enqueued') AS enqueued_us,
           min(ts_us) FILTER (kind = 'dequeued') AS first_dequeued_us,
           min(ts_us) FILTER (kind = 'delivered') AS first_delivered_us,
           min(ts_us) FILTER (kind = 'rejected') AS rejected_us,
           max(ts_us) FILTER (kind = 'replayed') AS replayed_us,
           min(ts_us) AS first_us, max(ts_us) AS last_us,
           coalesce(max(attempt), 0) AS attempts
    FROM mine GROUP BY message_id
),
lives AS (
    SELECT times.*,
           CASE WHEN last_end.ts_us >= coalesce(replayed_us, 0) THEN last_end.ts_us END AS finished_us,
           last_end.outcome AS last_outcome
    FROM times LEFT JOIN last_end USING (message_id)
)
SELECT message_id, org_id, type, priority, agent_id, goal_id, parent_message_id, user_id, task_id, queue,
       contract, source, trace_id, span_id, sender, recipient, service, body_bytes,
       created_us, enqueued_us, first_dequeued_us, first_delivered_us, finished_us, rejected_us, replayed_us,
       first_us, last_us, attempts,
       CASE WHEN finished_us IS NULL THEN 'open' ELSE last_outcome END AS outcome,
       first_dequeued_us - enqueued_us AS queue_us, finished_us - created_us AS total_us,
       {DAY.format("coalesce(created_us, first_us)")} AS day
FROM lives JOIN told USING (message_id)
"""

NAMED = """
SELECT told.* REPLACE (coalesce(told.org_id, mine.org_id) AS org_id, coalesce(told.type, mine.type) AS type,
                       CASE WHEN told.type IS NULL OR told.org_id IS NULL
                            THEN coalesce(told.goal_id, mine.goal_id) ELSE told.goal_id END AS goal_id,
                       CASE WHEN told.type IS NULL OR told.org_id IS NULL
                            THEN coalesce(told.agent_id, mine.agent_id) ELSE told.agent_id END AS agent_id)
FROM {} AS told LEFT JOIN messages AS mine USING (message_id)
"""

ATTEMPTS = f"""
CREATE TABLE attempts AS
WITH mine AS (
    SELECT * FROM events
    WHERE message_id IS NOT NULL AND attempt >= 1
      AND (kind IN ('dequeued', 'execution_started', 'heartbeat', 'execution_completed', 'execution_failed',
                    'lease_lapsed', 'released')
           OR (kind IN ('cancelled', 'deferred') AND worker_id IS NOT NULL))
),
begun AS (
    SELECT DISTINCT ON (message_id, attempt) message_id, attempt, org_id, type, priority, agent_id, goal_id,
           queue, worker_id, lease
    FROM mine ORDER BY message_id, attempt, kind <> 'dequeued', ts_us
),
done AS (
    SELECT DISTINCT ON (message_id, attempt) message_id, attempt, ts_us AS ended_us, error_type, error, model,
           service, tokens_in, tokens_out, cost_usd,
           CASE kind WHEN 'execution_completed' THEN 'completed' WHEN 'execution_failed' THEN 'failed'
                     WHEN 'lease_lapsed' THEN 'lapsed' WHEN 'deferred' THEN 'released' ELSE kind END AS result
    FROM mine
    WHERE kind IN ('execution_completed', 'execution_failed', 'lease_lapsed', 'released', 'deferred',
                   'cancelled')
    ORDER BY message_id, attempt, ts_us
),
times AS (
    SELECT message_id, attempt, min(ts_us) FILTER (kind = 'dequeued') AS dequeued_us,
           min(ts_us) FILTER (kind = 'execution_started') AS started_us,
           max(ts_us) FILTER (kind = 'heartbeat') AS heartbeat_us, min(ts_us) AS first_us,
           min(duration_us) FILTER (kind = 'dequeued') AS waited_us
    FROM mine GROUP BY ALL
)
SELECT message_id, attempt, org_id, type, priority, agent_id, goal_id, queue, worker_id, lease, dequeued_us,
       started_us, ended_us, heartbeat_us, first_us, waited_us, ended_us - dequeued_us AS worked_us,
       coalesce(result, 'open') AS result, error_type, error, model, service, tokens_in, tokens_out, cost_usd,
       {DAY.format("first_us")} AS day
FROM times JOIN ({NAMED.format("begun")}) USING (message_id, attempt)
LEFT JOIN done USING (message_id, attempt)
"""

SPANS = """
CREATE TABLE spans AS
WITH RECURSIVE tree AS (
    SELECT message_id, coalesce(parent_message_id, message_id) AS root_message_id,
           CASE WHEN parent_message_id IS NULL THEN 0 ELSE 1 END AS depth,
           CASE WHEN parent_message_id IS NULL THEN '' ELSE '?;' END || coalesce(type, '?') AS stack
    FROM messages WHERE coalesce(parent_message_id, '') NOT IN (SELECT message_id FROM messages)
    UNION ALL
    SELECT child.message_id, tree.root_message_id, tree.depth + 1,
           tree.stack || ';' || coalesce(child.type, '?')
    FROM tree JOIN messages AS child ON child.parent_message_id = tree.message_id
)
SELECT message_id, parent_message_id, root_message_id, depth, stack, org_id, goal_id, trace_id, span_id,
       agent_id, type, outcome, created_us AS start_us, finished_us AS end_us, total_us AS duration_us,
       queue_us, attempts, day
FROM messages LEFT JOIN tree USING (message_id)
"""

Rows = list[tuple[Any, ...]]


@cache
def oracle(folder: Path) -> duckdb.DuckDBPyConnection:
    """A database with the tables lines, events, messages, attempts and spans of a folder of segments.

    In `named_events` an event without a type or an organization has the names of its message.
    """
    con = duckdb.connect()
    con.execute(LINES.format(fields=", ".join(FIELDS), folder=folder, columns=FIELDS))
    redactor = Redactor("medium")
    con.create_function("redact_payload", redactor.payload, ["VARCHAR"], "VARCHAR")
    con.create_function("redact_text", redactor.text, ["VARCHAR"], "VARCHAR")
    named = f"CREATE VIEW named_events AS {NAMED.format('events')}"
    for statement in (EVENTS, MESSAGES, ATTEMPTS, SPANS, named):
        con.execute(statement)
        if statement is EVENTS:
            con.execute("UPDATE events SET payload = redact_payload(payload), error = redact_text(error)")
    return con


def expected(con: duckdb.DuckDBPyConnection, table: str) -> tuple[list[str], Rows]:
    found = con.execute(f"SELECT * FROM {table}")
    return [column[0] for column in found.description or ()], in_order(found.fetchall())


def stored(tables: Tables, table: str, columns: list[str] | None = None) -> Rows:
    """What a table holds, to be compared with what was expected."""
    rows = records(tables, table)
    return in_order(plain([row[name] for name in columns] if columns else row) for row in rows)


def in_order(rows: Any) -> Rows:
    return sorted(rows, key=repr)
