"""Flame graphs: where each goal spent its time, as folded stacks."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.gold.declaration import Sums
from postroom.pipeline.silver.tables import REVIVED, hour_us


def _flame_of(spans: DataFrame) -> DataFrame:
    """The addends of each message."""
    waited_us = F.coalesce("queue_us", F.lit(0))
    worked_us = F.greatest(F.coalesce("duration_us", F.lit(0)) - waited_us, F.lit(0))
    return spans.where("goal_id IS NOT NULL").select(
        "day",
        hour_us(F.col("start_us")).alias("hour_us"),
        "goal_id",
        "org_id",
        "stack",
        F.lit(1).cast("bigint").alias("messages"),
        worked_us.alias("work_us"),
        waited_us.alias("wait_us"),
        F.when(F.col("outcome").isin(*REVIVED), 1).otherwise(0).cast("bigint").alias("dead_letters"),
        F.when(F.col("end_us").isNull(), 1).otherwise(0).cast("bigint").alias("open"),
    )


FLAMES: Final = Sums(
    ("day", "hour_us", "goal_id", "org_id", "stack"),
    ("messages", "work_us", "wait_us", "dead_letters", "open"),
    each=_flame_of,
    scattered=True,
)


def flames(spans: DataFrame) -> DataFrame:
    """One row for each hour, goal and stack, which has the types from the root of a message tree downwards.

    A message counts in the hour of its creation; the hour is NULL if that is not known. `work_us` is the time
    of the messages themselves, `wait_us` the time until their delivery. Their children have stacks of their
    own, so the sum over a stack and all stacks that begin with it is the whole branch. A message that has not
    ended is `open`, and has no time yet. `dead_letters` are dead or quarantined.
    """
    return FLAMES.summed(_flame_of(spans))
