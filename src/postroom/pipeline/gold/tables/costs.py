"""Tokens of models and of budgets, and their cost. Money is decimal from end to end."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.follow.columns import hour_us
from postroom.pipeline.follow.merge import Sums
from postroom.pipeline.gold.columns import NAMED_EVENTS, one

_DOLLARS: Final = "decimal(28,9)"
_SPENDERS: Final = ("day", "hour_us", "org_id", "goal_id", "agent_id", "model")
_BUDGETS: Final = ("tokens_reserved", "tokens_borrowed", "tokens_returned", "tokens_refused")
"""Events of token budgets. Each has a column of its name: the sum of the `tokens` in its detail."""


def _tokens(events: DataFrame) -> DataFrame:
    kind = F.col("kind")
    is_call = F.col("tokens_in").isNotNull() | F.col("tokens_out").isNotNull()
    stated = F.get_json_object("detail", "$.tokens").try_cast("bigint")
    return (
        events.where(is_call | kind.isin(*_BUDGETS))
        .withColumn("hour_us", hour_us(F.col("ts_us")))
        .select(
            *_SPENDERS,
            one(is_call).alias("calls"),
            F.coalesce("tokens_in", F.lit(0)).cast("bigint").alias("tokens_in"),
            F.coalesce("tokens_out", F.lit(0)).cast("bigint").alias("tokens_out"),
            *(F.coalesce(F.when(kind == name, stated), F.lit(0)).alias(name) for name in _BUDGETS),
        )
    )


def _cost(events: DataFrame) -> DataFrame:
    return (
        events.where("cost_usd IS NOT NULL")
        .withColumn("hour_us", hour_us(F.col("ts_us")))
        .select(*_SPENDERS, one().alias("calls"), F.col("cost_usd").cast(_DOLLARS))
    )


_TOKENS: Final = Sums(
    _SPENDERS, ("calls", "tokens_in", "tokens_out", *_BUDGETS), moment="hour_us", each=_tokens
)
_COST: Final = Sums(
    _SPENDERS,
    ("calls", "cost_usd"),
    decimals=(("cost_usd", _DOLLARS),),
    moment="hour_us",
    each=_cost,
)
TABLES: Final = {
    "gold_tokens": _TOKENS.table(
        *NAMED_EVENTS,
        grain="hour, organization, goal, agent, model: `tokens_in` and `tokens_out` of `calls`, and the"
        " tokens of [budgets](tokens.md#in-the-pipeline)",
    ),
    "gold_cost": _COST.table(
        "silver_events", grain="hour, organization, goal, agent, model: dollars of `calls`"
    ),
}
