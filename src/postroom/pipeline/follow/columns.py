"""Columns that silver and gold compute in the same way: days, hours, and the names of messages."""

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.delta.joins import with_join_hint
from postroom.pipeline.times import DAY_US, HOUR_US

_MESSAGE_NAMES: Final = ("type", "org_id", "goal_id", "agent_id")


def day_of(micros: Column) -> Column:
    """The UTC day, whatever the time zone of the session."""
    return F.date_from_unix_date(F.call_function("div", micros, F.lit(DAY_US)).cast("int"))


def hour_us(micros: Column) -> Column:
    """The start of the UTC hour."""
    return micros - F.pmod(micros, F.lit(HOUR_US))


def lacks_names() -> Column:
    """Whether an event lacks the type or the organization of its message. Stores record them once."""
    return F.col("message_id").isNotNull() & (F.col("type").isNull() | F.col("org_id").isNull())


def named(rows: DataFrame, messages: DataFrame, *, few: bool = False) -> DataFrame:
    """Events or attempts with the names of their message, such as its type, where they lack them."""
    names = messages.select("message_id", *(F.col(name).alias(f"message_{name}") for name in _MESSAGE_NAMES))
    unnamed = rows.where(lacks_names()).join(with_join_hint(names, few=few), "message_id", "left")
    filled = {name: F.coalesce(name, f"message_{name}") for name in _MESSAGE_NAMES}
    taken = ", ".join(f"message_{name}" for name in _MESSAGE_NAMES)
    complete = rows.where(~lacks_names())
    # Not `drop`, which asks a Connect server for the columns: a declared table has none yet.
    return complete.unionByName(unnamed.withColumns(filled).selectExpr(f"* EXCEPT ({taken})"))
