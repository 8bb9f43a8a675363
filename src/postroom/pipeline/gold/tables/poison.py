"""Messages that crash their workers. Suspects span days, so they are computed from a small table by day."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.follow.columns import named
from postroom.pipeline.follow.merge import Sums
from postroom.pipeline.follow.refresh import Table
from postroom.pipeline.gold.columns import DAY, NAMED_EVENTS

LAPSES_SUSPECT: Final = 2  # a message with at least this many lapsed leases is suspected


def crashes(events: DataFrame, messages: DataFrame | None = None) -> DataFrame:
    """One row per message and day with a lapsed lease or a quarantine of that message."""
    return (
        (events if messages is None else named(events, messages))
        .where(F.col("kind").isin("lease_lapsed", "quarantined") & F.col("message_id").isNotNull())
        .groupBy("day", "message_id")
        .agg(
            F.count_if(F.col("kind") == "lease_lapsed").alias("lapses"),
            F.count_if(F.col("kind") == "quarantined").alias("quarantines"),
            F.min(F.struct("ts_us", "org_id", "type", "agent_id", "goal_id", "queue")).alias("first"),
            F.max("ts_us").alias("last_us"),
            F.sort_array(F.collect_set(F.when(F.col("kind") == "lease_lapsed", F.col("worker_id")))).alias(
                "workers"
            ),
        )
    )


def poison_suspects(crashed: DataFrame) -> DataFrame:
    """One row for each message that crashes its workers: two lapsed leases, or quarantined."""
    return (
        crashed.groupBy("message_id")
        .agg(
            F.min("first").alias("first"),
            F.sum("lapses").alias("lapses"),
            F.size(F.array_distinct(F.flatten(F.collect_list("workers")))).alias("workers"),
            (F.sum("quarantines") > 0).alias("quarantined"),
            F.max("last_us").alias("last_us"),
        )
        .where((F.col("lapses") >= LAPSES_SUSPECT) | F.col("quarantined"))
        .select(
            "message_id",
            *(
                F.col(f"first.{name}").alias(name)
                for name in ("org_id", "type", "agent_id", "goal_id", "queue")
            ),
            "lapses",
            "workers",
            "quarantined",
            F.col("first.ts_us").alias("first_us"),
            "last_us",
        )
    )


_CRASHES: Final = Sums(
    ("day", "message_id"),
    ("lapses", "quarantines"),
    smallest=("first",),
    largest=("last_us",),
    sets=("workers",),
)
TABLES: Final = {
    "gold_crashes": Table(crashes, NAMED_EVENTS, DAY, _CRASHES, grain="day, message whose lease lapsed"),
    "gold_poison_suspects": Table(
        poison_suspects, ("gold_crashes",), grain="message with two lapsed leases, or quarantined"
    ),
}
