"""Finds the files of a table that hold given ids.

Rule: first the log rules out files by the lowest and highest id of each; then the ids of the remaining files
are compared.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.delta.delta_log import DataFile, path_below, rows_of
from postroom.pipeline.delta.joins import with_join_hint
from postroom.pipeline.delta.tables import Tables

BROADCAST_IDS_MAX: Final = 2_000_000  # ids that are broadcast instead of shuffled

COLLECTED_IDS_MAX: Final = 200_000  # ids of a batch that this process compares with the ranges of files
FILES_UNCOUNTED: Final = 16  # candidates up to which reading them all costs less than collecting the ids


class IdLookup(NamedTuple):
    """Ids to look for, and their range. The first column decides on files."""

    rows: DataFrame
    n: int
    """At most `n` ids."""
    low: Any
    high: Any
    repeat: bool = False
    """Whether many of the ids are equal."""

    def may_be_in(self, file: DataFile) -> bool:
        return self.n > 0 and overlaps(file, self.rows.columns[0], self.low, self.high)

    def among(self, rows: DataFrame) -> DataFrame:
        """The rows with one of the ids. Ids are compared by a 64-bit hash, which is much faster.

        On a hash collision, which is very rare, a row without any of the ids is included.
        """
        names = self.rows.columns
        hashes = self.rows.select(F.xxhash64(*names).alias("id_hash"))
        hashes = with_join_hint(hashes.distinct() if self.repeat else hashes, few=self.n <= BROADCAST_IDS_MAX)
        return rows.join(hashes, F.xxhash64(*names) == F.col("id_hash"), "left_semi")


def lookup(ids: DataFrame, held: ExitStack) -> IdLookup:
    """A lookup of ids that stay cached until `held` is closed."""
    ids = ids.persist()
    held.callback(ids.unpersist)
    first = F.col(ids.columns[0])
    [row] = ids.agg(F.count(first), F.min(first), F.max(first)).collect()
    return IdLookup(ids, *row)


def lookup_of(ids: DataFrame, sources: list[DataFile], *, repeat: bool = False) -> IdLookup:
    """A lookup of ids that come from the rows of files, whose range is in the log."""
    low, high = extent(sources, ids.columns[0]) or (None, None)
    return IdLookup(ids, rows_of(sources), low, high, repeat)


def extent(files: list[DataFile], column: str) -> tuple[Any, Any] | None:
    """The lowest and the highest value of a column in files; None when the log does not know."""
    lows: list[Any] = [file.low.get(column) for file in files]
    highs: list[Any] = [file.high.get(column) for file in files]
    return None if not files or None in (*lows, *highs) else (min(lows), max(highs))


def candidate_files(tables: Tables, name: str, ids: IdLookup) -> list[DataFile]:
    """The files of a table that can hold one of the ids, according to the log."""
    if ids.n == 0 or not tables.exists(name):
        return []
    files = tables.listing(name).overlapping(ids.rows.columns[0], ids.low, ids.high)
    return narrowed(files, ids)


def narrowed(files: list[DataFile], ids: IdLookup) -> list[DataFile]:
    """Those of the files whose range has one of the ids.

    One old id among new ones makes the range of all ids as wide as the history.
    """
    if len(files) <= FILES_UNCOUNTED or ids.n > COLLECTED_IDS_MAX:
        return files
    column = ids.rows.columns[0]
    known = ids.rows.select(column).where(F.col(column).isNotNull()).distinct().toArrow()[column].to_pylist()
    known.sort()

    def has_one(file: DataFile) -> bool:
        low, high = file.low.get(column), file.high.get(column)
        return low is None or high is None or bisect_left(known, low) < bisect_right(known, high)

    return [file for file in files if has_one(file)]


def files_with_ids(spark: SparkSession, tables: Tables, name: str, ids: IdLookup) -> list[DataFile]:
    """The files of a table that hold a row with one of the ids. The columns have the same names."""
    return files_with_matches(spark, tables, name, candidate_files(tables, name, ids), ids.among)


def files_with_matches(
    spark: SparkSession,
    tables: Tables,
    name: str,
    files: list[DataFile],
    choose: Callable[[DataFrame], DataFrame],
) -> list[DataFile]:
    """The files of which `choose` keeps a row."""
    if not files:
        return []
    chosen = choose(tables.read_with_file(spark, name, files)).select("file").distinct().collect()
    paths = {path_below(name, row["file"]) for row in chosen}
    return [file for file in files if file.path in paths]


def overlap(one: DataFile, other: DataFile, column: str) -> bool:
    return overlaps(one, column, other.low.get(column), other.high.get(column))


def overlaps(file: DataFile, column: str, low: Any, high: Any) -> bool:
    """Whether a file can hold a value between `low` and `high`. An unknown limit counts as yes."""
    return ranges_overlap(file.low.get(column), file.high.get(column), low, high)


def ranges_overlap(lowest: Any, highest: Any, low: Any, high: Any) -> bool:
    """Whether two ranges can have a value in common. An unknown limit counts as yes."""
    if lowest is None or highest is None or low is None or high is None:
        return True
    return bool(lowest <= high and low <= highest)
