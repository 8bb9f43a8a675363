"""The number of events of each kind."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.follow.columns import hour_us
from postroom.pipeline.follow.merge import Sums
from postroom.pipeline.gold.columns import NAMED_EVENTS, one

_KINDS: Final = {
    "created": "created",
    "delivered": "delivered",
    "dequeued": "dequeued",
    "completed": "execution_completed",
    "failed": "execution_failed",
    "retried": "retry_scheduled",
    "dead_letters": "dead_letter",
    "expired": "expired",
    "cancelled": "cancelled",
    "quarantined": "quarantined",
    "rejected": "rejected",
    "duplicates": "duplicate",
    "replayed": "replayed",
}
"""Which column counts which events."""


def _throughput(events: DataFrame) -> DataFrame:
    kind = F.col("kind")
    bytes_in = F.when(kind == "created", F.coalesce("body_bytes", F.lit(0))).otherwise(0)
    return events.where("message_id IS NOT NULL").select(
        "day",
        hour_us(F.col("ts_us")).alias("hour_us"),
        "org_id",
        "type",
        one().alias("events"),
        *(one(kind == counted).alias(name) for name, counted in _KINDS.items()),
        bytes_in.cast("bigint").alias("bytes"),
    )


_THROUGHPUT: Final = Sums(
    ("day", "hour_us", "org_id", "type"),
    ("events", *_KINDS, "bytes"),
    moment="hour_us",
    each=_throughput,
)
TABLES: Final = {
    "gold_throughput": _THROUGHPUT.table(
        *NAMED_EVENTS, grain="hour, organization, type: the number of events of each kind"
    )
}
