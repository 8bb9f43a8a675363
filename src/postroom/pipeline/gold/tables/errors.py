"""Errors by their class."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.follow.columns import hour_us
from postroom.pipeline.follow.merge import Sums
from postroom.pipeline.gold.columns import ERROR_KINDS, NAMED_EVENTS, one

_ERROR_KEYS: Final = ("day", "hour_us", "org_id", "type", "kind", "error_type")


def _errors(events: DataFrame) -> DataFrame:
    return (
        events.where(F.col("kind").isin(*ERROR_KINDS))
        .withColumn("hour_us", hour_us(F.col("ts_us")))
        .select(
            *_ERROR_KEYS,
            one().alias("n"),
            F.col("ts_us").alias("first_us"),
            F.col("ts_us").alias("last_us"),
        )
    )


_ERRORS: Final = Sums(
    _ERROR_KEYS,
    ("n",),
    smallest=("first_us",),
    largest=("last_us",),
    moment="hour_us",
    each=_errors,
)
TABLES: Final = {
    "gold_errors": _ERRORS.table(*NAMED_EVENTS, grain="hour, organization, type, kind, class of error")
}
