"""Flame graphs: what each goal spent its time with, as folded stacks."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.transforms.silver import REVIVED


def flames(spans: DataFrame) -> DataFrame:
    """One row for each day, goal and stack: the types from the root of a tree of messages down to one.

    `work_us` is what they took themselves, `wait_us` how long they waited to be taken. What came of a message
    has rows of its own below it, so the sum over a stack and all that begin with it is the whole of a branch.
    A message that has not ended is `open`, and has no time so far; `dead_letters` were given up or put aside.
    """
    waited_us = F.coalesce("queue_us", F.lit(0))
    worked_us = F.greatest(F.coalesce("duration_us", F.lit(0)) - waited_us, F.lit(0))
    return (
        spans.where("goal_id IS NOT NULL")
        .groupBy("day", "goal_id", "org_id", "stack")
        .agg(
            F.count("*").alias("messages"),
            F.sum(worked_us).alias("work_us"),
            F.sum(waited_us).alias("wait_us"),
            F.count(F.when(F.col("outcome").isin(*REVIVED), 1)).alias("dead_letters"),
            F.count(F.when(F.col("end_us").isNull(), 1)).alias("open"),
            F.min("start_us").alias("first_us"),
            F.max("end_us").alias("last_us"),
        )
    )
