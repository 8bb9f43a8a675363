"""Chooses the join strategy.

Spark decides by the size of files, but Parquet with zstd takes a tenth of the memory that its rows take.
Spark would broadcast rows that do not fit into memory.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it


def with_join_hint(rows: DataFrame, *, few: bool) -> DataFrame:
    """The smaller side of a join: broadcast if it is `few` rows, otherwise sorted and merged."""
    return F.broadcast(rows) if few else rows.hint("merge")
