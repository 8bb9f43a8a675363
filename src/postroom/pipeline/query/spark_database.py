"""The tables of a folder as views of a Spark session, for queries that DuckDB answers unless Spark is asked.

Rule 1: a view has the files of one version of its table.
Rule 2: the views are in a session of their own. Behind Spark Connect they are in the client's.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from postroom.pipeline.spark.session import is_classic, table_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from postroom.pipeline.delta.tables import Tables

_ESCAPES: Final = str.maketrans({"\\": "\\\\", "'": "\\'"})


class SparkDatabase:
    """Runs SQL over the tables that it was opened with. It is a `database.Queries`."""

    unnest = "explode"

    def __init__(self, spark: "SparkSession", tables: "Tables", names: Iterable[str]) -> None:
        self._session = spark.newSession() if is_classic(spark) else spark
        with tables.queried():
            for name in names:
                with table_errors(name):
                    tables.read(self._session, name).createOrReplaceTempView(name)

    def rows(self, query: str) -> list[dict[str, Any]]:
        """The rows of a query, each as a dictionary from column name to value."""
        return [row.asDict(recursive=True) for row in self._session.sql(query).collect()]

    def define(self, name: str, query: str) -> None:
        """Let later queries read the rows of this one, each time anew, by a name."""
        self._session.sql(query).createOrReplaceTempView(name)

    def name(self, name: str) -> str:
        return "`" + name.replace("`", "``") + "`"

    def text(self, text: str) -> str:
        return f"'{text.translate(_ESCAPES)}'"
