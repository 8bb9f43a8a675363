"""Which files of a table hold what is looked for.

Rule: the log first, which knows the lowest and the highest id of every file; then the ids of those files that
it could not rule out.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.silver.joins import with_join_hint
from postroom.pipeline.tables import DataFile, Tables, path_below, rows_of

BROADCAST_IDS_MAX: Final = 2_000_000  # ids that are sent to every executor instead of being shuffled


class IdLookup(NamedTuple):
    """Ids that are looked for, and what is known of them. The first column decides on files."""

    rows: DataFrame
    n: int
    """No more than so many."""
    low: Any
    high: Any
    repeat: bool = False
    """Whether many of them are the same."""

    def may_be_in(self, file: DataFile) -> bool:
        return self.n > 0 and overlaps(file, self.rows.columns[0], self.low, self.high)

    def among(self, rows: DataFrame) -> DataFrame:
        """The rows that have one of the ids, and by chance, hardly ever, one that has not.

        It goes by one number of each id, because that is sent and looked up in a fraction of the time.
        """
        names = self.rows.columns
        numbers = self.rows.select(F.xxhash64(*names).alias("wanted"))
        numbers = with_join_hint(
            numbers.distinct() if self.repeat else numbers, few=self.n <= BROADCAST_IDS_MAX
        )
        return rows.join(numbers, F.xxhash64(*names) == F.col("wanted"), "left_semi")


def lookup(ids: DataFrame, held: ExitStack) -> IdLookup:
    """Look at ids once, for all that is asked of them until `held` is closed."""
    ids = ids.persist()
    held.callback(ids.unpersist)
    first = F.col(ids.columns[0])
    [told] = ids.agg(F.count(first), F.min(first), F.max(first)).collect()
    return IdLookup(ids, *told)


def lookup_of(ids: DataFrame, sources: list[DataFile], *, repeat: bool = False) -> IdLookup:
    """Ids that come from the rows of files: the log tells what there is to know."""
    low, high = extent(sources, ids.columns[0]) or (None, None)
    return IdLookup(ids, rows_of(sources), low, high, repeat)


def extent(files: list[DataFile], column: str) -> tuple[Any, Any] | None:
    """The lowest and the highest value of a column in files; None when the log does not tell."""
    lows: list[Any] = [file.low.get(column) for file in files]
    highs: list[Any] = [file.high.get(column) for file in files]
    return None if not files or None in (*lows, *highs) else (min(lows), max(highs))


def candidate_files(tables: Tables, name: str, ids: IdLookup) -> list[DataFile]:
    """The files of a table that can hold one of the ids, by the log alone."""
    return [file for file in tables.files(name) if ids.may_be_in(file)]


def files_with_ids(spark: SparkSession, tables: Tables, name: str, ids: IdLookup) -> list[DataFile]:
    """The files of a table that hold a row with one of the ids, which are named by their columns."""
    return files_with_matches(spark, tables, name, candidate_files(tables, name, ids), ids.among)


def files_with_matches(
    spark: SparkSession,
    tables: Tables,
    name: str,
    files: list[DataFile],
    choose: Callable[[DataFrame], DataFrame],
) -> list[DataFile]:
    """Those of the files of a table of which a row is chosen."""
    if not files:
        return []
    chosen = choose(with_file_column(spark, tables, name, files)).select("file").distinct().collect()
    return files_by_url(name, files, {row["file"] for row in chosen})


def with_file_column(spark: SparkSession, tables: Tables, name: str, files: list[DataFile]) -> DataFrame:
    """The rows of files, each with what Spark calls its `file`."""
    # The whole path: a task gives its files of several days one name.
    file = F.col("_metadata.file_path") if files else F.lit(None).cast("string")
    return tables.read(spark, name, files).withColumn("file", file)


def files_by_url(name: str, files: list[DataFile], urls: set[str]) -> list[DataFile]:
    """Those of the files of a table that Spark calls so."""
    paths = {path_below(name, url) for url in urls}
    return [file for file in files if file.path in paths]


def overlap(one: DataFile, other: DataFile, column: str) -> bool:
    return overlaps(one, column, other.low.get(column), other.high.get(column))


def overlaps(file: DataFile, column: str, low: Any, high: Any) -> bool:
    """Whether a file can hold a value between two. Who does not know says yes."""
    return ranges_overlap(file.low.get(column), file.high.get(column), low, high)


def ranges_overlap(lowest: Any, highest: Any, low: Any, high: Any) -> bool:
    """Whether two ranges can have a value in common."""
    if lowest is None or highest is None or low is None or high is None:
        return True
    return bool(lowest <= high and low <= highest)
