# ruff: noqa: S608 - every part of a statement is ours
"""The same work by DuckDB and Polars, on the same files, each as its users would write it."""

from collections.abc import Sequence
from pathlib import Path

import duckdb
import polars as pl

from postroom.pipeline.schema import EVENTS
from postroom.pipeline.silver.tables import ATTRIBUTES

SQL_TYPES = {"string": "VARCHAR", "int": "INTEGER", "bigint": "BIGINT", "decimal(18,9)": "DECIMAL(18,9)"}
POLARS_TYPES = {"string": pl.String, "int": pl.Int32, "bigint": pl.Int64, "decimal(18,9)": pl.Float64}
"""Polars reads no decimals from JSON."""
ENDS = {
    "execution_completed": (3, 3),
    "dead_letter": (3, 4),
    "cancelled": (3, 1),
    "quarantined": (3, 5),
    "delivered": (2, 3),
    "expired": (3, 2),
    "deleted": (0, 1),
}
"""What an end weighs, and its code; as the engines of the generated histories tell them."""
OUTCOMES = ("open", "cancelled", "expired", "completed", "dead_letter", "quarantined")
TIMES = {
    "created_us": "created",
    "enqueued_us": "enqueued",
    "first_dequeued_us": "dequeued",
    "first_delivered_us": "delivered",
    "rejected_us": "rejected",
}
HOUR = "ts_us // 3600000000 * 3600000000"
BORN = "coalesce(created_us, first_us) // 3600000000 * 3600000000"
COUNTED = (
    *("created", "delivered", "dequeued", "execution_completed", "execution_failed", "retry_scheduled"),
    *("dead_letter", "expired", "cancelled", "quarantined", "rejected", "duplicate", "replayed"),
)
BUDGETS = ("tokens_reserved", "tokens_borrowed", "tokens_returned", "tokens_refused")


def paths(files: Sequence[Path]) -> list[str]:
    return [str(file) for file in files]


# ---- JSON to Parquet -------------------------------------------------------------------------------------


def duckdb_bronze(segments: Sequence[Path], out: Path) -> None:
    columns = {field.name: SQL_TYPES[field.dataType.simpleString()] for field in EVENTS.fields}
    with duckdb.connect() as con:
        con.execute(
            f"""COPY (SELECT {", ".join(columns)}, parse_filename(filename) AS segment, date
            FROM read_json({paths(segments)}, format = 'newline_delimited', columns = {columns},
                           filename = true, hive_partitioning = true, hive_types = {{'date': DATE}}))
            TO '{out}' (FORMAT parquet, COMPRESSION zstd, PARTITION_BY (date))"""
        )


def polars_bronze(segments: Sequence[Path], out: Path) -> None:
    schema = {field.name: POLARS_TYPES[field.dataType.simpleString()] for field in EVENTS.fields}
    lines = pl.scan_ndjson(list(segments), schema=schema, include_file_paths="segment")
    lines.sink_parquet(out, compression="zstd")


# ---- one row a message -------------------------------------------------------------------------------------


def duckdb_fold(con: duckdb.DuckDBPyConnection, events: Sequence[Path], out: Path) -> None:
    ends = " ".join(
        f"WHEN '{kind}' THEN ({weight}::BIGINT << 56) + (ts_us << 3) + {code}"
        for kind, (weight, code) in ENDS.items()
    )
    times = ", ".join(f"min(ts_us) FILTER (kind = '{kind}') AS {name}" for name, kind in TIMES.items())
    outcome = " ".join(f"WHEN {code} THEN '{word}'" for code, word in enumerate(OUTCOMES))
    con.execute(
        f"""COPY (WITH folded AS (
            SELECT message_id, {times}, min(ts_us) AS first_us, max(ts_us) AS last_us,
                   max(ts_us) FILTER (kind = 'replayed') AS replayed_us,
                   coalesce(max(attempt), 0) AS attempts, max(CASE kind {ends} END) AS end_code,
                   arg_min(struct_pack({", ".join(ATTRIBUTES)}),
                           CASE kind WHEN 'created' THEN 0 ELSE 1::BIGINT << 60 END + ts_us) AS told
            FROM read_parquet({paths(events)}) WHERE message_id IS NOT NULL GROUP BY message_id
        ), ended AS (
            SELECT * EXCLUDE told, unnest(told), (end_code & ((1::BIGINT << 56) - 1)) >> 3 AS end_us
            FROM folded
        ), known AS (
            SELECT *, coalesce(end_us >= coalesce(replayed_us, 0), false) AS is_over FROM ended
        )
        SELECT *, CASE WHEN is_over THEN end_us END AS finished_us,
               CASE WHEN is_over THEN CASE end_code % 8 {outcome} END ELSE 'open' END AS outcome,
               first_dequeued_us - enqueued_us AS queue_us,
               CASE WHEN is_over THEN end_us END - created_us AS total_us,
               CAST(make_timestamp(coalesce(created_us, first_us)) AS DATE) AS day
        FROM known) TO '{out}' (FORMAT parquet, COMPRESSION zstd)"""
    )


def polars_fold(events: Sequence[Path], out: Path) -> None:
    kind, ts_us = pl.col("kind"), pl.col("ts_us")
    end = pl.lit(None, pl.Int64)
    for name, (weight, code) in ENDS.items():
        end = pl.when(kind == name).then((weight << 56) + ts_us * 8 + code).otherwise(end)
    rank = pl.when(kind == "created").then(0).otherwise(1 << 60) + ts_us
    first = pl.col("rank").arg_min()
    folded = (
        pl.scan_parquet(list(events))
        .filter(pl.col("message_id").is_not_null())
        .with_columns(rank.alias("rank"), end.alias("end_code"))
        .group_by("message_id")
        .agg(
            *(pl.col(name).get(first) for name in ATTRIBUTES),
            *(ts_us.filter(kind == named).min().alias(name) for name, named in TIMES.items()),
            ts_us.min().alias("first_us"),
            ts_us.max().alias("last_us"),
            ts_us.filter(kind == "replayed").max().alias("replayed_us"),
            pl.col("attempt").max().fill_null(0).alias("attempts"),
            pl.col("end_code").max(),
        )
    )
    end_us = (pl.col("end_code") & ((1 << 56) - 1)) // 8
    is_over = (end_us >= pl.col("replayed_us").fill_null(0)).fill_null(value=False)
    outcome = pl.when(is_over).then(pl.col("end_code") % 8).otherwise(0)
    folded.with_columns(
        pl.when(is_over).then(end_us).alias("finished_us"),
        outcome.replace_strict(dict(enumerate(OUTCOMES)), return_dtype=pl.String).alias("outcome"),
        (pl.col("first_dequeued_us") - pl.col("enqueued_us")).alias("queue_us"),
        (pl.when(is_over).then(end_us) - pl.col("created_us")).alias("total_us"),
        pl.from_epoch(pl.coalesce("created_us", "first_us"), time_unit="us").dt.date().alias("day"),
    ).sink_parquet(out, compression="zstd")


def outcomes(messages: Sequence[Path]) -> dict[str, tuple[int, int]]:
    """How many messages came to which end, and how long they waited: it has to be the same for all."""
    statement = "SELECT outcome, count(*), coalesce(sum(queue_us), 0)::BIGINT"
    with duckdb.connect() as con:
        found = con.execute(f"{statement} FROM read_parquet({paths(messages)}) GROUP BY outcome").fetchall()
    return {outcome: (count, waited_us) for outcome, count, waited_us in found}


def need_exact(table: Path, events: Path) -> None:
    """End the bench when a table lacks an event of some segments, or has one twice.

    Its files are those of its first version.
    """
    lines = f"read_json('{events}/date=*/hour=*/*.jsonl', columns = {{event_id: 'VARCHAR'}})"
    rows = f"read_parquet('{table}/*/*.parquet')"
    with duckdb.connect() as con:
        told = con.execute(f"SELECT count(*), count(DISTINCT event_id) FROM {rows}").fetchall()[0]
        lost = con.execute(
            f"SELECT count(*) FROM (SELECT event_id FROM {lines} EXCEPT SELECT event_id FROM {rows})"
        ).fetchall()[0]
    if told[0] != told[1] or lost[0]:
        raise SystemExit(f"{table.name} is not exact: {told[0]:,} rows, {told[1]:,} events, {lost[0]:,} lost")


# ---- what is summed up from them --------------------------------------------------------------------------

SUMS = {
    "gold_latency": f"""
        SELECT day, {BORN} AS hour_us, org_id, type, priority, count(*) AS n,
               quantile_disc(queue_us, [0.5, 0.95, 0.99]) AS ranks, max(queue_us) AS max_us,
               histogram(CASE WHEN queue_us < 32 THEN queue_us ELSE
                   (((queue_us >> (bit_length(queue_us::BIT) - 5)::INT)) + 1) END) AS histogram
        FROM messages WHERE queue_us IS NOT NULL GROUP BY ALL""",
    "gold_sla": f"""
        SELECT day, {BORN} AS hour_us, org_id, type, priority, target_us, count(*) AS n,
               count(*) FILTER (queue_us <= target_us) AS within
        FROM messages
        JOIN (VALUES (0, 10000), (1, 50000), (2, 100000), (3, 500000)) AS told(priority, target_us)
        USING (priority)
        WHERE queue_us IS NOT NULL GROUP BY ALL""",
    "gold_throughput": f"""
        SELECT day, {HOUR} AS hour_us, org_id, type, count(*) AS events,
               {", ".join(f"count(*) FILTER (kind = '{kind}') AS {kind}" for kind in COUNTED)},
               sum(body_bytes) FILTER (kind = 'created') AS bytes
        FROM events WHERE message_id IS NOT NULL GROUP BY ALL""",
    "gold_errors": f"""
        SELECT day, {HOUR} AS hour_us, org_id, type, kind, error_type, count(*) AS n,
               min(ts_us) AS first_us, max(ts_us) AS last_us
        FROM events
        WHERE kind IN ('execution_failed', 'lease_lapsed', 'dead_letter', 'rejected', 'quarantined',
                       'conflict_resolution_failed') GROUP BY ALL""",
    "gold_flow": """
        WITH told AS (
            SELECT *, state = 'QUEUED' AS waits, coalesce(
                lag(state) OVER (PARTITION BY message_id, source ORDER BY seq) = 'QUEUED', false) AS waited
            FROM events WHERE message_id IS NOT NULL AND state IS NOT NULL AND queue IS NOT NULL)
        SELECT day, ts_us // 60000000 * 60000000 AS minute_us, org_id, queue,
               count(*) FILTER (waits) AS arrived, count(*) FILTER (waited) AS "left"
        FROM told WHERE waits <> waited GROUP BY ALL""",
    "gold_depth": """
        SELECT minute_us, org_id, queue, arrived, "left",
               sum(arrived - "left") OVER (PARTITION BY org_id, queue ORDER BY minute_us) AS depth
        FROM gold_flow""",
    "gold_tokens": f"""
        SELECT day, {HOUR} AS hour_us, org_id, goal_id, agent_id, model,
               count(coalesce(tokens_in, tokens_out)) AS calls,
               sum(tokens_in) AS tokens_in, sum(tokens_out) AS tokens_out,
               {", ".join(f"sum(n) FILTER (kind = '{kind}') AS {kind}" for kind in BUDGETS)}
        FROM (SELECT *, CASE WHEN kind IN {BUDGETS} THEN (detail->>'$.tokens')::BIGINT END AS n FROM events)
        WHERE tokens_in IS NOT NULL OR tokens_out IS NOT NULL OR n IS NOT NULL GROUP BY ALL""",
    "gold_cost": f"""
        SELECT day, {HOUR} AS hour_us, org_id, goal_id, agent_id, model, count(*) AS calls,
               sum(cost_usd) AS cost_usd
        FROM events WHERE cost_usd IS NOT NULL GROUP BY ALL""",
    "gold_crashes": """
        SELECT day, message_id, min(struct_pack(ts_us, org_id, type, agent_id, goal_id, queue)) AS first,
               count(*) FILTER (kind = 'lease_lapsed') AS lapses,
               list_sort(list(DISTINCT worker_id) FILTER (kind = 'lease_lapsed')) AS workers,
               count(*) FILTER (kind = 'quarantined') AS quarantines, max(ts_us) AS last_us
        FROM events WHERE kind IN ('lease_lapsed', 'quarantined') AND message_id IS NOT NULL GROUP BY ALL""",
    "gold_traffic": """
        SELECT day, org_id, coalesce(sender, contract) AS sender,
               coalesce(recipient, service, agent_id, queue) AS recipient, type, count(*) AS messages,
               sum(body_bytes) AS bytes, count(*) FILTER (outcome = 'dead_letter') AS dead_letters
        FROM messages WHERE created_us IS NOT NULL GROUP BY ALL""",
}
"""Those tables of gold that one statement of SQL says."""


def duckdb_gold(events: Sequence[Path], out: Path) -> None:
    """The fold and the sums, each written."""
    with duckdb.connect() as con:
        duckdb_fold(con, events, out / "messages.parquet")
        con.execute(
            f"""CREATE VIEW events AS SELECT *, CAST(make_timestamp(ts_us) AS DATE) AS day
            FROM read_parquet({paths(events)}, hive_partitioning = false)"""
        )
        con.execute(f"CREATE VIEW messages AS FROM read_parquet('{out}/messages.parquet')")
        for name, statement in SUMS.items():
            con.execute(f"COPY ({statement}) TO '{out}/{name}.parquet' (FORMAT parquet, COMPRESSION zstd)")
            con.execute(f"CREATE VIEW {name} AS FROM read_parquet('{out}/{name}.parquet')")
