"""The report: gold tables read once each, summed up by Spark, and drawn as one HTML file.

Rule 1: what leaves Spark is bounded: columns of time, and the first of each ranking.
Rule 2: percentiles over several groups come from the histograms in `gold_latency`, which can be added up.
"""

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import msgspec
from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.html.facts import (
    Attained,
    Facts,
    Goal,
    Pair,
    Pattern,
    Percentiles,
    Queue,
    Spender,
    Suspect,
    Times,
)
from postroom.pipeline.html.flames import Profile, Stack, speedscope
from postroom.pipeline.html.page import MATRIX_MAX, page
from postroom.pipeline.html.plots import COLUMNS_MAX
from postroom.pipeline.tables import Tables, rows_of
from postroom.pipeline.transforms.gold import SLA_US
from postroom.pipeline.transforms.silver import HOUR_US
from postroom.pipeline.transforms.spans import UNKNOWN
from postroom.system.atomic import replace_file

RANKED_MAX: Final = 8  # of a list of the largest
PATTERNS_MAX: Final = 12
SUSPECTS_MAX: Final = 50
GOALS_MAX: Final = 6  # flame graphs on the page
PROFILES_MAX: Final = 100  # goals in a file for speedscope
STACKS_MAX: Final = 20_000  # of all of them
SERIES_MAX: Final = 40  # classes of errors, and models
WAITING: Final = "waiting"

_HAPPENED: Final = {
    "completed": "completed",
    "delivered": "delivered",
    "failed": "failed attempts",
    "dead_letters": "dead letters",
    "rejected": "rejected",
    "expired": "expired",
    "cancelled": "cancelled",
}
Progress = Callable[[str], None]


def write_report(
    spark: SparkSession,
    tables: Tables,
    out: Path,
    speedscope_out: Path | None = None,
    progress: Progress | None = None,
) -> Facts:
    """Write the page, and beside it a file for speedscope when one is wanted."""
    told = progress or (lambda _: None)
    reading = _Reading(spark, tables)
    facts = reading.facts(told)
    told("drawing")
    replace_file(out, page(facts).encode(), "os")
    if speedscope_out is not None:
        goals = reading.goals(PROFILES_MAX)
        profiles = [goal.profile for goal in goals]
        replace_file(speedscope_out, msgspec.json.encode(speedscope(profiles, "postroom goals")), "os")
    return facts


class _Reading:
    """The questions of one report to one folder of tables."""

    def __init__(self, spark: SparkSession, tables: Tables) -> None:
        self._spark = spark
        self._tables = tables
        self._step_us = HOUR_US

    def facts(self, told: Progress) -> Facts:
        told("reading gold_throughput")
        since_us, until_us = self._span()
        told("reading gold_latency and gold_sla")
        latency, overall = self._latency()
        sla = self._sla()
        told("reading gold_depth and gold_errors")
        depth, queues = self._depth()
        errors = self._series(
            "gold_errors", "hour_us", F.coalesce("error_type", F.lit("without a class")), "n"
        )
        told("reading gold_tokens and gold_cost")
        tokens = self._series("gold_tokens", "hour_us", _named("model"), "tokens_in + tokens_out")
        spending = {
            name: self._spending(column)
            for name, column in (
                ("model", "model"),
                ("organization", "org_id"),
                ("agent", "agent_id"),
                ("goal", "goal_id"),
            )
        }
        told("reading gold_dlq_patterns, gold_traffic and gold_flames")
        return Facts(
            since_us,
            until_us,
            self._step_us,
            rows_of(self._tables.files("silver_events")),
            {
                row["outcome"]: row["n"]
                for row in self._read("silver_messages").groupBy("outcome").agg(_n()).collect()
            },
            latency,
            overall,
            SLA_US,
            sla,
            self._throughput(),
            depth,
            queues,
            errors,
            tokens,
            spending,
            self._read("gold_cost").agg(F.sum("cost_usd")).collect()[0][0] or Decimal(0),
            self._traffic(),
            self._patterns(),
            self._suspects(),
            self.goals(GOALS_MAX),
        )

    def _read(self, name: str) -> DataFrame:
        return self._tables.read(self._spark, name)

    def _at(self, column: str) -> Column:
        """The column of time that something belongs to."""
        return F.col(column) - F.pmod(F.col(column), F.lit(self._step_us))

    def _span(self) -> tuple[int, int]:
        """From when to when, by whole columns of a width that keeps them few."""
        found = self._read("gold_throughput").agg(F.min("hour_us"), F.max("hour_us")).collect()[0]
        if found[0] is None:
            return 0, HOUR_US
        hours = (found[1] - found[0]) // HOUR_US + 1
        self._step_us = HOUR_US * -(-hours // COLUMNS_MAX)
        since_us = found[0] - found[0] % self._step_us
        until_us = found[1] - found[1] % self._step_us + self._step_us
        return since_us, until_us

    # ---- over time -----------------------------------------------------------------------------------

    def _latency(self) -> tuple[dict[int, dict[int, Percentiles]], dict[int, Percentiles]]:
        counts = (
            self._read("gold_latency")
            .where("priority IS NOT NULL")
            .select("priority", self._at("hour_us").alias("at_us"), F.explode("histogram").alias("bucket"))
            .groupBy("priority", "at_us", "bucket.le_us")
            .agg(F.sum("bucket.n").alias("n"))
            .persist()
        )
        try:
            by_time: dict[int, dict[int, Percentiles]] = {}
            for row in _percentiles(counts, "priority", "at_us").collect():
                by_time.setdefault(row["priority"], {})[row["at_us"]] = _percentiles_of(row)
            whole = counts.groupBy("priority", "le_us").agg(F.sum("n").alias("n"))
            overall = {
                row["priority"]: _percentiles_of(row) for row in _percentiles(whole, "priority").collect()
            }
        finally:
            counts.unpersist()
        return by_time, overall

    def _sla(self) -> dict[int, dict[int, Attained]]:
        found: dict[int, dict[int, Attained]] = {}
        rows = self._read("gold_sla").groupBy("priority", self._at("hour_us").alias("at_us"))
        for row in rows.agg(F.sum("n").alias("n"), F.sum("within").alias("within")).collect():
            found.setdefault(row["priority"], {})[row["at_us"]] = Attained(row["n"], row["within"])
        return found

    def _throughput(self) -> dict[str, Times]:
        sums = [F.sum(column).alias(column) for column in _HAPPENED]
        rows = self._read("gold_throughput").groupBy(self._at("hour_us").alias("at_us")).agg(*sums).collect()
        series = {name: {row["at_us"]: row[column] for row in rows} for column, name in _HAPPENED.items()}
        return {name: times for name, times in series.items() if any(times.values())}

    def _series(self, table: str, time: str, name: Column, measure: str) -> dict[str, Times]:
        """A sum for each name and column of time; the names of the largest sums."""
        parts = (
            self._read(table)
            .groupBy(name.alias("name"), self._at(time).alias("at_us"))
            .agg(F.sum(F.expr(measure)).alias("n"))
        )
        largest = (
            parts.groupBy("name")
            .agg(F.sum("n").alias("all"))
            .orderBy(F.desc("all"), "name")
            .limit(SERIES_MAX)
        )
        found: dict[str, Times] = {}
        for row in parts.join(F.broadcast(largest), "name").collect():
            found.setdefault(row["name"], {})[row["at_us"]] = row["n"]
        return found

    def _depth(self) -> tuple[Times, list[Queue]]:
        moves = self._read("gold_depth")
        change = F.sum(F.col("arrived") - F.col("left")).alias("change")
        so_far = Window.partitionBy(F.lit(0)).orderBy("minute_us")  # one row a minute
        total = moves.groupBy("minute_us").agg(change).withColumn("depth", F.sum("change").over(so_far))
        peaks = (
            total.groupBy(self._at("minute_us").alias("at_us")).agg(F.max("depth").alias("depth")).collect()
        )
        queues = _fullness(moves.groupBy("queue", "minute_us").agg(F.sum("arrived").alias("arrived"), change))
        ranked = queues.orderBy(F.desc("arrived"), "queue").limit(RANKED_MAX).collect()
        return (
            {row["at_us"]: row["depth"] for row in peaks},
            [Queue(row["queue"], row["arrived"], row["peak"], row["waiting"]) for row in ranked],
        )

    # ---- rankings ------------------------------------------------------------------------------------

    def _spending(self, column: str) -> list[Spender]:
        cost = (
            self._read("gold_cost")
            .groupBy(_named(column).alias("name"))
            .agg(F.sum("cost_usd").alias("cost_usd"), F.sum("calls").alias("calls"))
        )
        tokens = (
            self._read("gold_tokens")
            .groupBy(_named(column).alias("name"))
            .agg(F.sum(F.col("tokens_in") + F.col("tokens_out")).alias("tokens"))
        )
        rows = (
            cost.join(tokens, "name", "left").orderBy(F.desc("cost_usd"), "name").limit(RANKED_MAX).collect()
        )
        return [Spender(row["name"], row["calls"], row["tokens"] or 0, row["cost_usd"]) for row in rows]

    def _traffic(self) -> list[Pair]:
        """The pairs among those who send and those who get the most."""
        sums = F.sum("messages").alias("messages"), F.sum("dead_letters").alias("dead_letters")
        named = self._read("gold_traffic").withColumns(
            {side: _named(side) for side in ("sender", "recipient")}
        )
        pairs = named.groupBy("sender", "recipient").agg(*sums)
        for side in ("sender", "recipient"):
            ranked = named.groupBy(side).agg(F.sum("messages").alias("all")).orderBy(F.desc("all"), side)
            pairs = pairs.join(F.broadcast(ranked.limit(MATRIX_MAX).select(side)), side)
        rows = pairs.orderBy(F.desc("messages"), "sender", "recipient").collect()
        return [Pair(row["sender"], row["recipient"], row["messages"], row["dead_letters"]) for row in rows]

    def _patterns(self) -> list[Pattern]:
        rows = (
            self._read("gold_dlq_patterns").orderBy(F.desc("n"), "pattern_id").limit(PATTERNS_MAX).collect()
        )
        return [
            Pattern(
                row["pattern_id"],
                row["error_type"],
                row["pattern"],
                row["n"],
                row["templates"],
                row["first_us"],
                row["last_us"],
                row["trend"],
                row["systematic"],
                len(row["orgs"]),
                tuple(row["types"]),
                {hour["hour_us"]: hour["n"] for hour in row["hours"]},
                tuple((sample["message_id"], sample["error"] or "") for sample in row["samples"]),
            )
            for row in rows
        ]

    def _suspects(self) -> list[Suspect]:
        rows = self._read("gold_poison_suspects").orderBy("quarantined", F.desc("lapses"), "message_id")
        return [
            Suspect(
                row["message_id"],
                row["org_id"] or "",
                row["type"] or "",
                row["lapses"],
                row["workers"],
                row["quarantined"],
                row["last_us"],
            )
            for row in rows.limit(SUSPECTS_MAX).collect()
        ]

    def goals(self, limit: int) -> list[Goal]:
        """The goals that most messages serve, the largest first."""
        stacks = self._read("gold_flames")
        sizes = F.sum("messages").alias("size"), F.sum(F.col("work_us") + F.col("wait_us")).alias("whole_us")
        goals = stacks.groupBy("goal_id").agg(*sizes).where("whole_us > 0")
        largest = goals.orderBy(F.desc("size"), F.desc("whole_us"), "goal_id").limit(limit)
        rows = (
            stacks.join(F.broadcast(largest), "goal_id")
            .orderBy(F.desc("size"), F.desc("whole_us"), "goal_id", "stack", "hour_us")
            .limit(STACKS_MAX)
            .collect()
        )
        by_goal: dict[str, list[Row]] = {}
        for row in rows:
            by_goal.setdefault(row["goal_id"], []).append(row)
        return [_goal(goal_id, parts) for goal_id, parts in by_goal.items()]


def _n() -> Column:
    return F.count("*").alias("n")


def _named(column: str) -> Column:
    return F.coalesce(F.col(column), F.lit("unnamed"))


def _fullness(moves: DataFrame) -> DataFrame:
    """Grain: queue, all organizations together.

    Changes are added up, and not depths: an organization has no row for a minute in which its depth rests.
    """
    so_far = Window.partitionBy("queue").orderBy("minute_us")
    return (
        moves.withColumn("depth", F.sum("change").over(so_far))
        .groupBy("queue")
        .agg(
            F.sum("arrived").alias("arrived"),
            F.max("depth").alias("peak"),
            F.sum("change").alias("waiting"),
        )
    )


def _percentiles(counts: DataFrame, *keys: str) -> DataFrame:
    """Nearest ranks from counts of buckets: each is the upper end of the bucket that it lies in."""
    group = Window.partitionBy(*keys)
    so_far = F.sum("n").over(group.orderBy("le_us")).alias("so_far")
    ranked = counts.select(*keys, "le_us", so_far, F.sum("n").over(group).alias("whole"))
    picks = [
        F.min(F.when(F.col("so_far") * 100 >= F.col("whole") * percent, F.col("le_us"))).alias(
            f"p{percent}_us"
        )
        for percent in (50, 95, 99)
    ]
    return ranked.groupBy(*keys).agg(F.max("whole").alias("n"), *picks)


def _percentiles_of(row: Row) -> Percentiles:
    return Percentiles(row["n"], row["p50_us"], row["p95_us"], row["p99_us"])


def _goal(goal_id: str, rows: list[Row]) -> Goal:
    sums: dict[tuple[str, ...], int] = {}
    for row in rows:
        path = tuple((row["stack"] or UNKNOWN).split(";"))
        for stack, us in ((path, row["work_us"]), ((*path, WAITING), row["wait_us"])):
            if us:
                sums[stack] = sums.get(stack, 0) + us
    stacks: list[Stack] = sorted(sums.items())
    hours = [row["hour_us"] for row in rows if row["hour_us"] is not None]
    return Goal(
        goal_id,
        _first(rows, "org_id"),
        sum(row["messages"] for row in rows),
        min(hours, default=None),
        max(hours) + HOUR_US if hours else None,
        Profile(goal_id, stacks),
    )


def _first(rows: list[Row], column: str) -> Any:
    return next((row[column] for row in rows if row[column] is not None), "unnamed")
