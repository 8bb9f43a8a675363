"""Messages that wait: how many began and stopped, and the depth of each queue."""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.follow.merge import Sums
from postroom.pipeline.follow.recompute import Running
from postroom.pipeline.follow.refresh import Table
from postroom.pipeline.gold.columns import DAY
from postroom.pipeline.times import DAY_US, MINUTE_US

WAITING: Final = "QUEUED"
_ARRIVALS: Final = ("created", "enqueued", "released", "replayed")
_ENDS: Final = ("delivered", "expired", "cancelled", "quarantined", "deleted")


_FLOW_INPUT: Final = (
    *("message_id", "source", "seq", "day", "ts_us", "org_id", "queue"),
    *("state", "prior", "kind", "contract", "duration_us", "lease"),
)


def flow(events: DataFrame) -> DataFrame:
    """One row for each minute and queue in which a message began or stopped waiting.

    An event is compared with the previous state of its message. For the first event of a message in a day,
    that state is its `prior`, or its kind implies it.

    An end that an earlier version wrote has no `prior`. If its previous event was on an earlier day, it
    counts as the end of a waiting message, unless it has a lease or is the `delivered` of a task.
    """
    # The id first: Spark sorts by the first bytes of the first column, and there are few sources.
    before = Window.partitionBy("message_id", "source", "day").orderBy("seq")
    waited = F.coalesce(F.lag("waits").over(before), F.col("must_have_waited"))
    minute_us = F.col("ts_us") - F.pmod(F.col("ts_us"), F.lit(MINUTE_US))
    states = events.where("message_id IS NOT NULL AND state IS NOT NULL AND queue IS NOT NULL").select(
        "message_id",
        "source",
        "seq",
        "day",
        minute_us.alias("minute_us"),
        "org_id",
        "queue",
        (F.col("state") == WAITING).cast("int").alias("waits"),
        _must_have_waited().cast("int").alias("must_have_waited"),
    )
    return (
        states.select("day", "minute_us", "org_id", "queue", (F.col("waits") - waited).alias("change"))
        .where("change <> 0")
        .groupBy("day", "minute_us", "org_id", "queue")
        .agg(
            F.count_if(F.col("change") > 0).alias("arrived"),
            F.count_if(F.col("change") < 0).alias("left"),
        )
    )


def _must_have_waited() -> Column:
    """Whether a message has been waiting since an earlier day, by its first event of this day."""
    kind = F.col("kind")
    day_us = F.col("ts_us") - F.pmod(F.col("ts_us"), F.lit(DAY_US))
    return (
        F.when(F.col("prior").isNotNull(), F.col("prior") == WAITING)
        .when(kind.isin(*_ARRIVALS), F.lit(0) == 1)
        .when(
            kind == "dequeued",
            F.col("duration_us").isNull() | (F.col("ts_us") - F.col("duration_us") < day_us),
        )
        .when((kind == "delivered") & (F.col("contract") == "tasks"), F.lit(0) == 1)
        .when(kind.isin(*_ENDS), F.col("lease").isNull())
        .otherwise(F.col("state") == WAITING)
    )


def depth(flows: DataFrame, before: DataFrame | None = None, days: DataFrame | None = None) -> DataFrame:
    """One row for each minute and queue whose depth changed: the number waiting at the end of that minute.

    Each day begins with a row for every queue in which messages wait, even if none arrives or leaves in that
    minute. `before` has the depths before the first of these minutes, `days` the days of the table; without
    it these are the days of the flows.
    """
    keys = ["day", "minute_us", "org_id", "queue"]
    moves = flows.select(*keys, "arrived", "left")
    if before is not None:
        known = before.select("org_id", "queue", F.col("depth").alias("arrived"), _none().alias("left"))
        moves = moves.unionByName(known, allowMissingColumns=True)
    own_days = flows.agg(F.collect_set("day").alias("days")).select(F.explode("days").alias("day"))
    every = (own_days if days is None else days).select(F.col("day").cast("date"))
    midnights = moves.select("org_id", "queue").distinct().crossJoin(F.broadcast(every))
    midnight_us = F.unix_date("day").cast("bigint") * DAY_US
    empty = midnights.withColumns({"minute_us": midnight_us, "arrived": _none(), "left": _none()})
    so_far = Window.partitionBy("org_id", "queue").orderBy(F.col("minute_us").asc_nulls_first())
    return (
        moves.unionByName(empty)
        .groupBy(*keys)
        .agg(F.sum("arrived").alias("arrived"), F.sum("left").alias("left"))
        .withColumn("depth", F.sum(F.col("arrived") - F.col("left")).over(so_far))
        .where("minute_us IS NOT NULL AND (arrived <> 0 OR left <> 0 OR depth <> 0)")
    )


def _none() -> Column:
    return F.lit(0).cast("bigint")


_FLOW: Final = Sums(
    ("day", "minute_us", "org_id", "queue"), ("arrived", "left"), whole=_FLOW_INPUT, moment="minute_us"
)
_DEPTH: Final = Running(("org_id", "queue"), ("arrived", "left"), "depth", "minute_us")
TABLES: Final = {
    "gold_flow": Table(
        flow,
        ("silver_events",),
        DAY,
        _FLOW,
        "minute_us",
        grain="minute, organization, queue: the number that began and stopped waiting",
    ),
    "gold_depth": Table(
        depth,
        ("gold_flow",),
        DAY,
        _DEPTH,
        "minute_us",
        grain="minute, organization, queue: the number waiting at its end; each day begins with a row for"
        " every queue in which messages wait",
    ),
}
