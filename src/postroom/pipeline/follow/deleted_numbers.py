"""The numbers of the events that `retain` has deleted.

`check` does not report them as missing, and events that are delivered again are not added again.

Rule 1: a row is a range of numbers of one source. Adjacent ranges are merged, so the table grows with the
        events that stay between them, and not with the deleted ones.
Rule 2: the table is a set. A number that is recorded twice, or whose event still exists, does no harm.
Rule 3: a message of which later events are possible is recorded too, by a 64-bit hash: its history is then
        incomplete.
"""

from typing import Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import LongType, StringType, StructField, StructType

from postroom.core.history.message_checker import LEASED
from postroom.pipeline.delta.tables import Tables

TABLE: Final = "silver_departed"
BLOCK: Final = 1 << 20  # numbers of a source that one task processes; no range crosses a block
SCHEMA: Final = StructType(
    [
        StructField("source", StringType()),
        StructField("first_seq", LongType()),
        StructField("last_seq", LongType()),
        StructField("newest_us", LongType()),
        StructField("message", LongType()),
    ]
)
_OVER: Final = ("delivered", "deleted")
"""Kinds after which a store records nothing more of a message, unless it is created again."""


def numbers_of(events: DataFrame) -> DataFrame:
    """Each event as a range of one number."""
    return events.select(
        "source",
        F.col("seq").alias("first_seq"),
        F.col("seq").alias("last_seq"),
        F.col("ts_us").alias("newest_us"),
        F.lit(None).cast("bigint").alias("message"),
    )


def newest_us(tables: Tables) -> int:
    """The time of the newest deleted event; -1 when there is none."""
    return max((newest for newest in tables.values(TABLE, "newest_us") if newest is not None), default=-1)


def deleted_among(events: DataFrame, runs: DataFrame) -> DataFrame:
    """Grain: source and seq of the events that were deleted before.

    Numbers and ranges are sorted together, within blocks. A number is in a range if an earlier range reaches
    it.
    """
    nothing = F.lit(None).cast("bigint")
    numbers = events.select("source", "seq", nothing.alias("reaches")).distinct()
    left = runs.where("message IS NULL").select(
        "source", F.col("first_seq").alias("seq"), F.col("last_seq").alias("reaches")
    )
    both = numbers.unionByName(left).withColumn("block", F.floor(F.col("seq") / F.lit(BLOCK)))
    in_order = Window.partitionBy("source", "block").orderBy("seq", F.col("reaches").desc_nulls_last())
    reached = F.max("reaches").over(in_order.rowsBetween(Window.unboundedPreceding, 0))
    found = both.withColumn("reached", reached).where("reaches IS NULL AND reached >= seq")
    return found.select("source", "seq")


def deleted_runs(events: DataFrame) -> DataFrame:
    """The rows to record for events that are deleted."""
    return numbers_of(events).unionByName(_unfinished(events))


def merged(runs: DataFrame) -> DataFrame:
    """The same numbers in as few rows as possible.

    No range crosses a block, so that no source has to fit into one task.
    """
    pieces = runs.withColumn("block", F.floor(F.col("first_seq") / F.lit(BLOCK)))
    in_order = Window.partitionBy("source", "block", "message").orderBy("first_seq")
    before = F.max("last_seq").over(in_order.rowsBetween(Window.unboundedPreceding, -1))
    begins = F.when(F.col("first_seq") <= before + 1, 0).otherwise(1)
    run = F.sum("begins").over(in_order.rowsBetween(Window.unboundedPreceding, 0))
    return (
        pieces.withColumn("begins", begins)
        .withColumn("run", run)
        .groupBy("source", "block", "message", "run")
        .agg(
            F.min("first_seq").alias("first_seq"),
            F.max("last_seq").alias("last_seq"),
            F.max("newest_us").alias("newest_us"),
        )
        .select(*SCHEMA.names)
    )


def _unfinished(events: DataFrame) -> DataFrame:
    """The messages of stores that may have later events: open ones, and those that may be replayed."""
    of_stores = events.where(F.col("contract").isin(*LEASED) & F.col("message_id").isNotNull())
    return (
        of_stores.groupBy("source", "message_id")
        .agg(
            F.max("seq").alias("seq"),
            F.max("ts_us").alias("ts_us"),
            F.max_by("kind", "seq").alias("kind"),
        )
        .where(~F.col("kind").isin(*_OVER))
        .select(
            "source",
            F.col("seq").alias("first_seq"),
            F.col("seq").alias("last_seq"),
            F.col("ts_us").alias("newest_us"),
            F.xxhash64("message_id").alias("message"),
        )
    )
