"""Where the messages of a goal spent their time: the folded stacks of flame graphs."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.delta.file_groups import FileGroups
from postroom.pipeline.follow.columns import hour_us
from postroom.pipeline.follow.merge import Sums
from postroom.pipeline.silver.tables import REVIVED
from postroom.pipeline.times import HOUR_US


def _flames(spans: DataFrame) -> DataFrame:
    """The addends of a message, whose stack has the types from the root of its tree downwards.

    A message counts in the hour of its creation; the hour is NULL if that is not known. `work_us` is the time
    of the messages themselves, `wait_us` the time until their delivery. Their children have stacks of their
    own, so the sum over a stack and all stacks that begin with it is the whole branch. A message that has not
    ended is `open`, and has no time yet. `dead_letters` are dead or quarantined.
    """
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


_FLAMES: Final = Sums(
    ("day", "hour_us", "goal_id", "org_id", "stack"),
    ("messages", "work_us", "wait_us", "dead_letters", "open"),
    each=_flames,
    scattered=True,
)


def _flame_file_groups() -> FileGroups:
    ended_us = F.when(F.col("open") == 0, F.col("hour_us") + (HOUR_US - 1))
    return FileGroups(ended_us, "hour_us", F.col("dead_letters") > 0)


TABLES: Final = {
    "gold_flames": _FLAMES.table(
        "silver_spans",
        file_groups=_flame_file_groups,
        grain="hour, goal, stack: time at work and waiting, dead letters, those still open",
    )
}
