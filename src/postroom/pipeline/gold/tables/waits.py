"""How long messages waited for their first delivery, and whether that was within the target."""

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.follow.columns import hour_us
from postroom.pipeline.follow.merge import Sums
from postroom.pipeline.follow.recompute import Hours
from postroom.pipeline.follow.refresh import Table
from postroom.pipeline.gold.columns import DAY, one

SLA_US: Final = {0: 10_000, 1: 50_000, 2: 100_000, 3: 500_000}
"""How long a message of each priority may wait for its first delivery."""
BUCKET_BITS: Final = 4  # a bucket is at most a sixteenth as wide as the values in it


def _born_us() -> Column:
    return F.coalesce("created_us", "first_us")


def latency(messages: DataFrame) -> DataFrame:
    """One row for each hour, organization, type and priority: how long its messages waited (`queue_us`).

    Two aggregations take one shuffle: rows are partitioned by the outer keys, so the buckets need no other.
    A group is one type of message of one organization in an hour, so its list is small.
    """
    keys = ["day", "hour_us", "org_id", "type", "priority"]
    waits = messages.where("queue_us IS NOT NULL").select(
        "day", hour_us(_born_us()).alias("hour_us"), "org_id", "type", "priority", "queue_us"
    )
    return (
        waits.withColumn("le_us", bucket_us(F.greatest("queue_us", F.lit(0))))
        .repartition(*keys)
        .groupBy(*keys, "le_us")
        .agg(F.collect_list("queue_us").alias("waits"))
        .groupBy(*keys)
        .agg(
            F.sort_array(F.flatten(F.collect_list("waits"))).alias("waits"),
            F.sort_array(F.collect_list(F.struct("le_us", F.size("waits").cast("bigint").alias("n")))).alias(
                "histogram"
            ),
        )
        .select(
            *keys,
            F.size("waits").cast("bigint").alias("n"),
            *(nearest_rank(F.col("waits"), percent).alias(f"p{percent}_us") for percent in (50, 95, 99)),
            F.element_at("waits", -1).alias("max_us"),
            "histogram",
        )
    )


def nearest_rank(values: Column, percent: int) -> Column:
    """The smallest of the sorted values that `percent` of them do not exceed. In whole numbers, unrounded."""
    rank = F.floor((F.size(values) * percent + 99) / F.lit(100)).cast("int")
    return F.element_at(values, rank)


def bucket_us(value: Column) -> Column:
    """The upper limit of the bucket of a value: exact below 32, then sixteen buckets an octave."""
    bits = F.length(F.bin(value)) - (BUCKET_BITS + 1)
    shift = F.greatest(bits, F.lit(0))
    cut = F.call_function("shiftright", value, shift)
    return F.call_function("shiftleft", cut + 1, shift) - 1


def _sla(messages: DataFrame) -> DataFrame:
    targets = F.create_map(*(F.lit(part) for pair in SLA_US.items() for part in pair))
    target_us = targets[F.col("priority")].cast("bigint")
    return messages.where(F.col("queue_us").isNotNull() & target_us.isNotNull()).select(
        "day",
        hour_us(_born_us()).alias("hour_us"),
        "org_id",
        "type",
        "priority",
        target_us.alias("target_us"),
        one().alias("n"),
        one(F.col("queue_us") <= target_us).alias("within"),
        F.lit(None).cast("double").alias("attainment"),
    )


_LATENCY: Final = Hours(_born_us, ("message_id", "org_id", "type", "priority", "queue_us"))
_SLA: Final = Sums(
    ("day", "hour_us", "org_id", "type", "priority", "target_us"),
    ("n", "within"),
    shares=(("attainment", "within", "n"),),
    moment="hour_us",
    each=_sla,
)
TABLES: Final = {
    "gold_latency": Table(
        latency,
        ("silver_messages",),
        DAY,
        _LATENCY,
        "hour_us",
        grain="hour, organization, type, priority: percentiles of `queue_us`, histogram",
    ),
    "gold_sla": _SLA.table(
        "silver_messages", grain="hour, organization, type, priority: share within 10, 50, 100, 500 ms"
    ),
}
