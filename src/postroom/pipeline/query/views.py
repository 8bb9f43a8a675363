"""Views with plain names, for people and BI tools that query the tables through Spark."""

from typing import Final

from pyspark.sql import SparkSession

from postroom.pipeline.delta.tables import Tables

LAYERS: Final = ("silver_", "gold_")


def plain_name(table: str) -> str | None:
    """The name of a view: that of the table without its layer. Bronze tables have no view."""
    return next((table.removeprefix(layer) for layer in LAYERS if table.startswith(layer)), None)


def create_views(spark: SparkSession, tables: Tables) -> list[str]:
    """Create a temporary view of each silver and gold table, such as `messages`; returns the names.

    A view shows the version of its table at this time. Call this again after a run.
    """
    names = {plain: table for table in tables.names() if (plain := plain_name(table)) is not None}
    for plain, table in names.items():
        tables.read(spark, table).createOrReplaceTempView(plain)
    return sorted(names)
