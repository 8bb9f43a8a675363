"""Registers the tables in a catalog of Spark: Hive, Glue, Unity, or whatever a session is configured with.

Rule 1: the catalog gets names and places. The logs of the tables stay the only truth about their rows, so a
        table is registered once, and never again after a run.
Rule 2: a registered table is read by Delta's own connector, whose jar has to be in the session. Files listed
        without the log would show rows that were replaced.
Rule 3: a table whose name the catalog has already is left as it is, and reported as not new.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from postroom.errors import InvalidSetting
from postroom.pipeline.query.views import plain_name
from postroom.pipeline.spark.session import causes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from postroom.pipeline.delta.tables import Tables

SOURCE: Final = "delta"  # the data source of Delta's connector
NO_CONNECTOR: Final = ("cannot find the plugin class", f"Failed to find the data source: {SOURCE}")
"""What Spark says in a session without the connector."""


class Registered(NamedTuple):
    """A name in the catalog."""

    name: str
    kind: str
    """`table` or `view`."""
    of: str
    """The place of a table, or the table of a view."""
    is_new: bool


def register(
    spark: "SparkSession", tables: "Tables", database: str, catalog: str | None = None
) -> list[Registered]:
    """Create each table in a database, and a view with a plain name of each silver and gold table."""
    tables.require_tables()
    with _needing_connector(spark):
        return _register(spark, tables, database, catalog)


@contextmanager
def _needing_connector(spark: "SparkSession") -> Iterator[None]:
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        said = " ".join(causes(error))
        if not any(text in said for text in NO_CONNECTOR):
            raise
        raise InvalidSetting(
            "registered tables need Delta's connector, which this Spark session does not have:"
            f" add its jar for Spark {spark.version} by --conf spark.jars"
        ) from None


def _register(
    spark: "SparkSession", tables: "Tables", database: str, catalog: str | None
) -> list[Registered]:
    place = [catalog, database] if catalog else [database]
    spark.sql(f"CREATE DATABASE IF NOT EXISTS {_quoted(*place)}")
    made = [_table(spark, tables, name, place) for name in tables.names()]
    views = [_view(spark, name, plain, place) for name in tables.names() if (plain := plain_name(name))]
    return [*made, *views]


def _table(spark: "SparkSession", tables: "Tables", name: str, place: list[str]) -> Registered:
    location, quoted = tables.storage.spark_path(name), _quoted(*place, name)
    is_new = not spark.catalog.tableExists(quoted)
    if is_new:
        spark.catalog.createTable(quoted, path=location, source=SOURCE)
    return Registered(".".join([*place, name]), "table", location, is_new)


def _view(spark: "SparkSession", table: str, plain: str, place: list[str]) -> Registered:
    quoted = _quoted(*place, plain)
    is_new = not spark.catalog.tableExists(quoted)
    spark.sql(f"CREATE OR REPLACE VIEW {quoted} AS SELECT * FROM {_quoted(*place, table)}")  # noqa: S608 - quoted names
    return Registered(".".join([*place, plain]), "view", ".".join([*place, table]), is_new)


def _quoted(*names: str) -> str:
    return ".".join(f"`{name.replace('`', '``')}`" for name in names)
