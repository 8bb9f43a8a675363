"""What several gold tables have in common: inputs, kinds of errors, and counts."""

from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

DAY: Final = ("day",)
NAMED_EVENTS: Final = ("silver_events", "silver_messages")
"""Events, and the messages that supply their type and organization."""
ERROR_KINDS: Final = (
    "execution_failed",
    "lease_lapsed",
    "dead_letter",
    "rejected",
    "quarantined",
    "conflict_resolution_failed",
)


def one(condition: Column | None = None) -> Column:
    """The addend of a row to a count: 1, or 0 if the condition does not hold."""
    addend = F.lit(1) if condition is None else F.when(condition, 1).otherwise(0)
    return addend.cast("bigint")
