"""Who sends messages to whom."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.follow.merge import Sums
from postroom.pipeline.gold.columns import one


def _traffic(messages: DataFrame) -> DataFrame:
    """Without a sender, the contract counts as one; without a recipient, the service, agent or queue."""
    return messages.where("created_us IS NOT NULL").select(
        "day",
        "org_id",
        F.coalesce("sender", "contract").alias("sender"),
        F.coalesce("recipient", "service", "agent_id", "queue").alias("recipient"),
        "type",
        one().alias("messages"),
        F.coalesce("body_bytes", F.lit(0)).cast("bigint").alias("bytes"),
        one(F.col("outcome") == "dead_letter").alias("dead_letters"),
    )


_TRAFFIC: Final = Sums(
    ("day", "org_id", "sender", "recipient", "type"),
    ("messages", "bytes", "dead_letters"),
    each=_traffic,
)
TABLES: Final = {
    "gold_traffic": _TRAFFIC.table("silver_messages", grain="day, organization, sender, recipient, type")
}
