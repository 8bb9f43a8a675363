"""The numbers of what `retain` let leave: `check` does not miss them, and what left does not come back.

Rule 1: a row is a run of numbers of one source, without anything that was said under them. Runs that touch
        become one, so the table grows with what stays between them, and not with what has left.
Rule 2: it is a set: a number that was noted twice, or is still there, does no harm.
Rule 3: a message that may be told of again is named too, by a number of 64 bits: what is then told of it is
        not all that there was.
"""

from typing import Final

import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import LongType, StringType, StructField, StructType

from postroom.core.message_checker import LEASED
from postroom.pipeline.tables import Tables

TABLE: Final = "silver_departed"
BLOCK: Final = 1 << 20  # numbers of a source that are looked at in one place; runs on disk end with theirs
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
"""Kinds after which a store says nothing more of a message, unless it accepts it anew."""


def numbers_of(events: DataFrame) -> DataFrame:
    """Each event as a run of one number, about no message."""
    return events.select(
        "source",
        F.col("seq").alias("first_seq"),
        F.col("seq").alias("last_seq"),
        F.col("ts_us").alias("newest_us"),
        F.lit(None).cast("bigint").alias("message"),
    )


def newest_us(tables: Tables) -> int:
    """The time of the newest event that left; -1 when none did."""
    folder = tables.folder / TABLE
    read = [pq.read_table(folder / file.path, columns=["newest_us"]) for file in tables.files(TABLE)]
    return max((pc.max(rows.column("newest_us")).as_py() for rows in read if rows.num_rows), default=-1)


def among(events: DataFrame, runs: DataFrame) -> DataFrame:
    """Grain: source and seq of events whose number has left.

    Numbers and runs are sorted together, within blocks: a number has left if a run before it reaches it.
    """
    nothing = F.lit(None).cast("bigint")
    asked = events.select("source", "seq", nothing.alias("reaches")).distinct()
    left = runs.where("message IS NULL").select(
        "source", F.col("first_seq").alias("seq"), F.col("last_seq").alias("reaches")
    )
    both = asked.unionByName(left).withColumn("block", F.floor(F.col("seq") / F.lit(BLOCK)))
    in_order = Window.partitionBy("source", "block").orderBy("seq", F.col("reaches").desc_nulls_last())
    reached = F.max("reaches").over(in_order.rowsBetween(Window.unboundedPreceding, 0))
    found = both.withColumn("reached", reached).where("reaches IS NULL AND reached >= seq")
    return found.select("source", "seq")


def deleted_runs(events: DataFrame) -> DataFrame:
    """What is noted of events that leave."""
    return numbers_of(events).unionByName(_unfinished(events))


def merged(runs: DataFrame) -> DataFrame:
    """The same numbers in as few rows as there can be.

    None leaves its block, so that no source has to fit into one task.
    """
    pieces = runs.withColumn("block", _block())
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


def holes_between(runs: DataFrame) -> DataFrame:
    """One row for each hole of a source: the last number before it, and the first behind.

    Numbers are sorted within blocks, so that no source has to fit into one task; between blocks only their
    ends are compared.
    """
    pieces = runs.select("source", "first_seq", "last_seq", _block().alias("block"))
    # Runs may overlap, so the one that ends last need not be the one just before.
    in_block = Window.partitionBy("source", "block").orderBy("first_seq")
    inside = pieces.withColumn(
        "before", F.max("last_seq").over(in_block.rowsBetween(Window.unboundedPreceding, -1))
    )
    ends = pieces.groupBy("source", "block").agg(
        F.min("first_seq").alias("first_seq"), F.max("last_seq").alias("last_seq")
    )
    by_block = Window.partitionBy("source").orderBy("block")
    between = ends.withColumn("before", F.lag("last_seq").over(by_block))
    return (
        inside.select("source", "before", "first_seq")
        .unionByName(between.select("source", "before", "first_seq"))
        .where(F.col("first_seq") - F.col("before") > 1)
        .select("source", "before", F.col("first_seq").alias("behind"))
    )


def returned(departed: DataFrame) -> DataFrame:
    """Grain: source and message of those whose first events are gone."""
    return departed.where("message IS NOT NULL").select("source", "message").distinct()


def _unfinished(events: DataFrame) -> DataFrame:
    """The messages of stores that may be told of again: open ones, and those that somebody may send again."""
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


def _block() -> Column:
    return F.floor(F.col("first_seq") / F.lit(BLOCK))
