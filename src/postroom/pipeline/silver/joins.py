"""How the smaller side of a join comes to the larger one.

Left to itself, Spark goes by the size of files, and Parquet with zstd has a tenth of what the rows take in
memory: it would send to everybody what nobody can hold.
"""

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def with_join_hint(rows: "DataFrame", *, few: bool) -> "DataFrame":
    """To every executor if they are few, else sorted and merged."""
    return F.broadcast(rows) if few else rows.hint("merge")
