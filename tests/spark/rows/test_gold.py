"""Gold tables, all rows, against SQL of DuckDB that was written without a look at Spark's."""

import re
from functools import cache, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.core.formats.events import to_line
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.gold.tables import GOLD, poison, queues, waits
from postroom.pipeline.schema import EVENTS
from postroom.pipeline.silver.events import events as silver_events
from tests.spark.conftest import TablesOf
from tests.spark.oracle import Rows, in_order, oracle, stored
from tests.spark.plainrows import plain
from tests.spark.realstore import Store

MACROS = """
CREATE MACRO hour_of(us) AS CAST(us // 3600000000 * 3600000000 AS BIGINT);
CREATE MACRO born(created_us, first_us) AS hour_of(coalesce(created_us, first_us));
"""

BOUNDS = """
CREATE TABLE bounds AS
SELECT CAST(n AS BIGINT) AS le FROM range(32) AS exact(n)
UNION SELECT CAST((step + 1) * (1::BIGINT << (octave - 4)) - 1 AS BIGINT)
FROM range(5, 44) AS octaves(octave), range(16, 32) AS steps(step)
"""

WAITS = """
CREATE TABLE waits AS
WITH born_at AS (
    SELECT *, born(created_us, first_us) AS hour_us FROM messages WHERE queue_us IS NOT NULL
)
SELECT day, hour_us, org_id, type, priority, queue_us,
       row_number() OVER (PARTITION BY day, hour_us, org_id, type, priority ORDER BY queue_us) AS rank,
       count(*) OVER (PARTITION BY day, hour_us, org_id, type, priority) AS n
FROM born_at
"""

MOVES = """
CREATE TABLE moves AS
WITH told AS (
    SELECT *, state = 'QUEUED' AS waits,
           coalesce(lag(state) OVER (PARTITION BY source, message_id ORDER BY seq), '') = 'QUEUED' AS waited
    FROM events WHERE message_id IS NOT NULL AND state IS NOT NULL AND queue IS NOT NULL
)
SELECT day, CAST(ts_us // 60000000 * 60000000 AS BIGINT) AS minute_us, org_id, queue,
       count(*) FILTER (waits AND NOT waited) AS arrived, count(*) FILTER (waited AND NOT waits) AS "left"
FROM told WHERE waits <> waited GROUP BY ALL
"""

ORACLE = {
    "gold_latency": """
        SELECT day, hour_us, org_id, type, priority, n,
               min(queue_us) FILTER (rank * 100 >= n * 50), min(queue_us) FILTER (rank * 100 >= n * 95),
               min(queue_us) FILTER (rank * 100 >= n * 99), max(queue_us),
               (SELECT list((le, k) ORDER BY le) FROM (
                    SELECT (SELECT min(le) FROM bounds WHERE le >= inner_.queue_us) AS le, count(*) AS k
                    FROM waits AS inner_
                    WHERE inner_.day = waits.day AND inner_.hour_us = waits.hour_us
                      AND inner_.org_id IS NOT DISTINCT FROM waits.org_id AND inner_.type = waits.type
                      AND inner_.priority = waits.priority
                    GROUP BY ALL))
        FROM waits GROUP BY ALL""",
    "gold_sla": """
        SELECT day, born(created_us, first_us), org_id, type, priority, target_us, count(*),
               count(*) FILTER (queue_us <= target_us), count(*) FILTER (queue_us <= target_us) / count(*)
        FROM messages
        JOIN (VALUES (0, 10000), (1, 50000), (2, 100000), (3, 500000)) AS promised(priority, target_us)
        USING (priority)
        WHERE queue_us IS NOT NULL GROUP BY ALL""",
    "gold_throughput": """
        SELECT day, hour_of(ts_us), org_id, type, count(*),
               count(*) FILTER (kind = 'created'), count(*) FILTER (kind = 'delivered'),
               count(*) FILTER (kind = 'dequeued'), count(*) FILTER (kind = 'execution_completed'),
               count(*) FILTER (kind = 'execution_failed'), count(*) FILTER (kind = 'retry_scheduled'),
               count(*) FILTER (kind = 'dead_letter'), count(*) FILTER (kind = 'expired'),
               count(*) FILTER (kind = 'cancelled'), count(*) FILTER (kind = 'quarantined'),
               count(*) FILTER (kind = 'rejected'), count(*) FILTER (kind = 'duplicate'),
               count(*) FILTER (kind = 'replayed'),
               CAST(coalesce(sum(body_bytes) FILTER (kind = 'created'), 0) AS BIGINT)
        FROM named_events WHERE message_id IS NOT NULL GROUP BY ALL""",
    "gold_errors": """
        SELECT day, hour_of(ts_us), org_id, type, kind, error_type, count(*), min(ts_us), max(ts_us)
        FROM named_events
        WHERE kind IN ('execution_failed', 'lease_lapsed', 'dead_letter', 'rejected', 'quarantined',
                       'conflict_resolution_failed')
        GROUP BY ALL""",
    "gold_flow": "SELECT * FROM moves",
    "gold_depth": """
        WITH marks AS (
            SELECT day, minute_us, org_id, queue FROM moves
            UNION SELECT days.day, epoch_us(days.day), queues.org_id, queues.queue
            FROM (SELECT DISTINCT day FROM moves) AS days,
                 (SELECT DISTINCT org_id, queue FROM moves) AS queues
        ),
        depths AS (
            SELECT marks.*, coalesce(arrived, 0) AS arrived, coalesce("left", 0) AS "left",
                   CAST(coalesce((SELECT sum(earlier.arrived - earlier."left") FROM moves AS earlier
                         WHERE earlier.org_id IS NOT DISTINCT FROM marks.org_id
                           AND earlier.queue = marks.queue
                           AND earlier.minute_us <= marks.minute_us), 0) AS BIGINT) AS depth
            FROM marks LEFT JOIN moves ON moves.minute_us = marks.minute_us AND moves.queue = marks.queue
                                      AND moves.org_id IS NOT DISTINCT FROM marks.org_id
        )
        SELECT * FROM depths WHERE arrived + "left" > 0 OR depth <> 0""",
    "gold_tokens": """
        WITH booked AS (
            SELECT * EXCLUDE detail, CAST(detail->>'$.tokens' AS BIGINT) AS n
            FROM named_events
            WHERE kind IN ('tokens_reserved', 'tokens_borrowed', 'tokens_returned', 'tokens_refused')
            UNION ALL
            SELECT * EXCLUDE detail, NULL
            FROM named_events WHERE coalesce(tokens_in, tokens_out) IS NOT NULL AND kind NOT LIKE 'tokens%'
        )
        SELECT day, hour_of(ts_us), org_id, goal_id, agent_id, model, count(coalesce(tokens_in, tokens_out)),
               CAST(coalesce(sum(tokens_in), 0) AS BIGINT), CAST(coalesce(sum(tokens_out), 0) AS BIGINT),
               CAST(coalesce(sum(n) FILTER (kind = 'tokens_reserved'), 0) AS BIGINT),
               CAST(coalesce(sum(n) FILTER (kind = 'tokens_borrowed'), 0) AS BIGINT),
               CAST(coalesce(sum(n) FILTER (kind = 'tokens_returned'), 0) AS BIGINT),
               CAST(coalesce(sum(n) FILTER (kind = 'tokens_refused'), 0) AS BIGINT)
        FROM booked GROUP BY ALL HAVING count(coalesce(tokens_in, tokens_out)) > 0 OR sum(n) > 0""",
    "gold_cost": """
        SELECT day, hour_of(ts_us), org_id, goal_id, agent_id, model, count(*),
               CAST(sum(cost_usd) AS DECIMAL(28,9))
        FROM events WHERE cost_usd IS NOT NULL GROUP BY ALL""",
    "gold_crashes": """
        SELECT day, message_id,
               count(*) FILTER (kind = 'lease_lapsed'), count(*) FILTER (kind = 'quarantined'),
               (min(ts_us), min(org_id), min(type), min(agent_id), min(goal_id), min(queue)), max(ts_us),
               coalesce(list_sort(list(DISTINCT worker_id) FILTER (kind = 'lease_lapsed')), [])
        FROM named_events WHERE kind IN ('lease_lapsed', 'quarantined') GROUP BY ALL""",
    "gold_poison_suspects": """
        SELECT message_id, min(org_id), min(type), min(agent_id), min(goal_id), min(queue),
               count(*) FILTER (kind = 'lease_lapsed') AS lapses,
               count(DISTINCT worker_id) FILTER (kind = 'lease_lapsed'), bool_or(kind = 'quarantined'),
               min(ts_us), max(ts_us)
        FROM named_events WHERE kind IN ('lease_lapsed', 'quarantined') GROUP BY message_id
        HAVING count(*) FILTER (kind = 'lease_lapsed') >= 2 OR bool_or(kind = 'quarantined')""",
    "gold_traffic": """
        SELECT day, org_id, coalesce(sender, contract), coalesce(recipient, service, agent_id, queue), type,
               count(*), CAST(coalesce(sum(body_bytes), 0) AS BIGINT),
               count(*) FILTER (outcome = 'dead_letter')
        FROM messages WHERE created_us IS NOT NULL GROUP BY ALL""",
    "gold_flames": """
        SELECT day, hour_of(start_us), goal_id, org_id, stack, count(*),
               CAST(sum(CASE WHEN duration_us > coalesce(queue_us, 0) THEN duration_us - coalesce(queue_us, 0)
                             ELSE 0 END) AS BIGINT),
               CAST(sum(coalesce(queue_us, 0)) AS BIGINT),
               count(*) FILTER (outcome IN ('dead_letter', 'quarantined')),
               count(*) FILTER (end_us IS NULL)
        FROM spans WHERE goal_id IS NOT NULL GROUP BY ALL""",
}
"""The patterns of dead letters have a test file of their own."""
FILES = Path(__file__).parents[1] / "oracles"
ORACLE |= {file.stem: file.read_text("utf-8") for file in sorted(FILES.glob("*.sql"))}
WITHOUT_FAULTS = ("gold_flow", "gold_depth")
"""Who was never accepted has not waited, whatever is told of it."""


def built(spark: SparkSession, tables: Tables, name: str) -> DataFrame:
    """A gold table from silver, without writing it."""
    table = GOLD[name]
    inputs = [
        built(spark, tables, source) if source in GOLD else tables.read(spark, source)
        for source in table.inputs
    ]
    return table.build(*inputs)


@cache
def database(folder: Path) -> duckdb.DuckDBPyConnection:
    con = oracle(folder)
    for statement in (MACROS, BOUNDS, WAITS, MOVES):
        con.execute(statement)
    return con


def test_every_gold_table_has_an_oracle() -> None:
    assert {*ORACLE, "gold_dlq_templates", "gold_dlq_patterns"} == set(GOLD)


@pytest.mark.parametrize("name", ORACLE)
def test_every_row_is_what_the_oracle_says(tables_of: TablesOf, name: str) -> None:
    folder, tables = tables_of(faults=name not in WITHOUT_FAULTS)
    said = expected_gold(folder, name)
    assert stored(tables, name) == said
    assert said


def expected_gold(folder: Path, name: str) -> Rows:
    return in_order(plain(row) for row in database(folder).execute(ORACLE[name]).fetchall())


def test_incremental_gold_tables_are_partitioned_by_day() -> None:
    following = [table for table in GOLD.values() if table.change is not None]
    assert {table.partition_by for table in following} == {("day",)}
    several = {table.inputs for table in following if len(table.inputs) > 1}
    assert several == {("silver_events", "silver_messages")}


def test_percentiles_do_not_depend_on_partitions(spark: SparkSession, tables_of: TablesOf) -> None:
    _, tables = tables_of()
    many = tables.read(spark, "silver_messages").repartition(7, F.rand(3))
    assert in_order(plain(row.asDict(recursive=True)) for row in waits.latency(many).collect()) == stored(
        tables, "gold_latency"
    )


def test_buckets_hold_their_values_and_are_never_wider_than_a_sixteenth(spark: SparkSession) -> None:
    values = sorted(
        {0, 1, 15, 16, 31, 32, 33, 10**6, 10**12, *(2**n + k for n in range(5, 42) for k in (-1, 0, 1))}
    )
    found = spark.createDataFrame([(value,) for value in values], "value BIGINT")
    told = {row[0]: row[1] for row in found.select("value", waits.bucket_us(F.col("value"))).collect()}
    assert all(value <= le <= value * 17 / 16 for value, le in told.items())
    assert all(told[before] <= told[after] for before, after in pairwise(values))


def test_money_is_exact(spark: SparkSession) -> None:
    events = spark.createDataFrame(
        [("2025-01-01", 5, "o", "g", "a", "m", "0.100000001")] * 10_000,
        "day STRING, ts_us BIGINT, org_id STRING, goal_id STRING, agent_id STRING, model STRING, cost STRING",
    ).withColumn("cost_usd", F.col("cost").cast("decimal(18,9)"))
    assert [str(row["cost_usd"]) for row in GOLD["gold_cost"].build(events).collect()] == ["1000.000010000"]


def test_a_message_with_two_lapsed_leases_is_suspected(spark: SparkSession) -> None:
    def event(day: str, ts_us: int, kind: str, message_id: str, worker: str | None) -> tuple[Any, ...]:
        return (day, ts_us, kind, message_id, worker, "o", "t", "a", "g", "q")

    events = spark.createDataFrame(
        [
            event("2025-01-01", 10, "lease_lapsed", "across midnight", "w1"),
            event("2025-01-02", 20, "lease_lapsed", "across midnight", "w2"),
            event("2025-01-02", 30, "lease_lapsed", "once", "w1"),
            event("2025-01-02", 40, "quarantined", "put aside", None),
            event("2025-01-02", 50, "released", "given back", "w1"),
        ],
        "day STRING, ts_us BIGINT, kind STRING, message_id STRING, worker_id STRING, org_id STRING, "
        "type STRING, agent_id STRING, goal_id STRING, queue STRING",
    )
    found = poison.poison_suspects(poison.crashes(events)).orderBy("message_id")
    assert [tuple(row) for row in found.collect()] == [
        ("across midnight", "o", "t", "a", "g", "q", 2, 2, False, 10, 20),
        ("put aside", "o", "t", "a", "g", "q", 0, 0, True, 40, 40),
    ]


FIRST_US, DAY_US = 1_735_689_600_000_000, 86_400_000_000
OVERNIGHT = [
    # message, day, kind, state, lease, duration_us
    ("claimed in the morning", 0, "created", "QUEUED", None, None),
    ("claimed in the morning", 1, "dequeued", "PROCESSING", 7, DAY_US),
    ("expired in the morning", 0, "created", "QUEUED", None, None),
    ("expired in the morning", 1, "expired", "EXPIRED", None, None),
    ("never accepted", 1, "dequeued", "PROCESSING", 8, 0),
    ("retried in the morning", 0, "created", "QUEUED", None, None),
    ("retried in the morning", 0, "dequeued", "PROCESSING", 9, 1),
    ("retried in the morning", 0, "retry_scheduled", "RETRYING", None, None),
    ("retried in the morning", 1, "enqueued", "QUEUED", None, None),
    ("retried in the morning", 1, "dequeued", "PROCESSING", 10, 1),
    ("cancelled in somebody's hands", 0, "created", "QUEUED", None, None),
    ("cancelled in somebody's hands", 0, "dequeued", "PROCESSING", 11, 1),
    ("cancelled in somebody's hands", 1, "cancelled", "CANCELLED", 11, None),
    ("sent once more", 0, "created", "QUEUED", None, None),
    ("sent once more", 1, "duplicate", "QUEUED", None, None),
]


def test_who_waits_overnight_is_counted_once(spark: SparkSession) -> None:
    """By events of an earlier version, which do not tell the state before."""
    facts = [
        (FIRST_US + day * DAY_US + n, n, message_id, kind, state, lease, us)
        for n, (message_id, day, kind, state, lease, us) in enumerate(OVERNIGHT)
    ]
    columns = ("ts_us", "seq", "message_id", "kind", "state", "lease", "duration_us")
    shared = {"source": "s", "contract": "engine", "org_id": "o", "queue": "q"}
    made = [{**shared, **dict(zip(columns, row, strict=True))} for row in facts]
    assert depths(spark, made) == [(5, 2, 3), (1, 3, 1)]


def depths(spark: SparkSession, made: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Arrived, left and waiting, minute by minute."""
    return [(row["arrived"], row["left"], row["depth"]) for row in depth_rows(spark, made)]


def depth_rows(spark: SparkSession, made: list[dict[str, Any]]) -> list[Row]:
    """Rows of `gold_depth`. The flow of each day is built by itself, as jobs do."""
    rows = [tuple(event.get(name) for name in EVENTS.names) for event in made]
    events = silver_events(spark.createDataFrame(rows, EVENTS), {})
    days = {row["day"] for row in events.select("day").collect()}
    flows = [queues.flow(events.where(F.col("day") == day)) for day in sorted(days)]
    return queues.depth(reduce(DataFrame.unionByName, flows)).orderBy("minute_us").collect()


def test_depth_is_what_a_real_store_counted_on_every_day(spark: SparkSession) -> None:
    store = Store()
    told = [{**msgspec.json.decode(to_line(event)), "detail": None} for event in store.events()]
    priors = {(event["kind"], event.get("prior")) for event in told}
    for prior in ("QUEUED", "SCHEDULED", "RETRYING"):
        assert ("cancelled", prior) in priors
    assert ("delivered", "EXECUTING") in priors
    rows = depth_rows(spark, told)
    for now_us, queue, waiting in store.counted:
        last = [row["depth"] for row in rows if row["queue"] == queue and row["minute_us"] <= now_us][-1:]
        assert last == [waiting], (now_us, queue)


def test_nothing_leaves_the_jvm_and_no_organization_is_one_task(
    spark: SparkSession, tables_of: TablesOf
) -> None:
    """Where most events are of one organization, they may not all meet in one place: see `skew-pipeline`."""
    _, tables = tables_of()
    for name in GOLD:
        plan = built(spark, tables, name)._jdf.queryExecution().executedPlan().toString()
        assert "Python" not in plan, name
        if name == "gold_latency":
            assert plan.count("Exchange") == 1
        for keys in re.findall(r"hashpartitioning\((.*?), \d+\)", plan):
            names = {key.partition("#")[0].strip() for key in keys.split(",")}
            assert names - {"day", "org_id"}, (name, keys)
