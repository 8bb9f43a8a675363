"""Updates gold tables after a change of their inputs, without reading all of the inputs again.

Rule 1: sums add the rows that were added to the input, and subtract those that were removed.
Rule 2: tables that are not sums rebuild the hours that changed, from all of their input rows.
Rule 3: running totals are rebuilt from the first day that changed.
Rule 4: where none of these is possible, the days that changed are rebuilt: rows were removed from a minimum,
        removed files no longer exist, or too many hours changed. All ways give the same rows.
Rule 5: a store records the type and organization of a message once, when it is created. Tables that group by
        these read them from `silver_messages`, and are rebuilt if a known message gets others.
Rule 6: gold keeps rows whose events `retain` has deleted from silver. Days up to the newest deleted event are
        closed: they are not rebuilt, because silver is incomplete there. Sums are still added to.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import cached_property
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline import file_index
from postroom.pipeline.delta_log import RENAMED, UNNAMED, DataFile, rows_of
from postroom.pipeline.gold.declaration import GoldTable, Hours, Running, Sums
from postroom.pipeline.ingest.bronze import with_all_columns
from postroom.pipeline.retention import deleted_numbers
from postroom.pipeline.silver.joins import with_join_hint
from postroom.pipeline.silver.tables import SILVER, day_of, hour_us, named
from postroom.pipeline.tables import Tables
from postroom.pipeline.times import HOUR_US, MICROS_PER_S

HOURS_MAX: Final = (
    1_000  # that are rebuilt one by one; if more changed, as after wrong clocks, whole days are
)
NAMES_BROADCAST_MAX: Final = 500_000  # messages whose names are broadcast; more of them are shuffled
EVENTS: Final = "silver_events"
MESSAGES: Final = "silver_messages"
Replacement = tuple[DataFrame, list[DataFile]]
"""New rows, and the files that they replace."""
Versions = Mapping[str, int]
"""A version of each input."""
Each = Callable[[DataFrame], DataFrame]
"""The addends of input rows."""


class InputChange(NamedTuple):
    """The files that were added to an input, and those that were removed."""

    source: str
    added: list[DataFile]
    removed: list[DataFile]

    @property
    def days(self) -> set[str | None]:
        return {file.partition["day"] for file in (*self.added, *self.removed)}

    def hours(self, moment: str | None) -> tuple[int | None, int | None]:
        """The first and the last hour of the changed rows, by a column of the input."""
        whole = None if moment is None else file_index.extent([*self.added, *self.removed], moment)
        return (None, None) if whole is None else (whole[0] - whole[0] % HOUR_US, whole[1])


class GoldRefresh:
    """Computes the update of one gold table."""

    def __init__(self, spark: SparkSession, tables: Tables, name: str, table: GoldTable) -> None:
        self._spark = spark
        self._tables = tables
        self._name = name
        self._table = table
        self._messages: list[DataFile] = []
        """The files of messages whose events lack names."""

    def rebuild(self, *, whole: bool = False) -> Replacement:
        """All rows, except those of closed days that the table already has, unless `whole`."""
        are_named = self._takes_names and not self._unnamed_since(-1)
        sources = self._table.inputs[:1] if are_named else self._table.inputs
        inputs = [self._read(source, self._tables.files(source)) for source in sources]
        rows, replaced = self._table.build(*inputs), self._tables.files(self._name)
        if whole or not self._closed_day or not replaced:
            return rows, replaced
        return rows.where(F.col("day") > self._closed_day), [file for file in replaced if self._is_open(file)]

    @cached_property
    def _closed_day(self) -> str:
        """The last day of which `retain` may have deleted events; empty when there is none."""
        if "day" not in self._table.partition_by or self._table.inputs[0] not in SILVER:
            return ""
        newest_us = deleted_numbers.newest_us(self._tables)
        return "" if newest_us < 0 else f"{datetime.fromtimestamp(newest_us // MICROS_PER_S, UTC):%Y-%m-%d}"

    def _is_open(self, file: DataFile) -> bool:
        return _day(file) > self._closed_day

    def update(self, known: Versions, until: Versions, held: ExitStack) -> Replacement | None:
        """The update from one version of the inputs to another; None when no row has changed."""
        changes = [
            InputChange(source, *self._tables.changed(source, known[source], until[source]))
            for source in self._table.inputs
        ]
        if not any(change.added or change.removed for change in changes):
            return None
        if self._table.change is None or self._are_names_old(known):
            return self.rebuild()
        if self._unnamed_since(known[self._table.inputs[0]]):
            self._messages = self._tables.files(MESSAGES) if changes[0].removed else changes[1].added
        return self._follow(changes[0], self._table.change, held) if changes[0].days else None

    # ---- the names of messages -----------------------------------------------------------------------

    def _are_names_old(self, known: Versions) -> bool:
        """Whether a known message has got another type or organization since."""
        return self._takes_names and self._tables.last_txn(MESSAGES, RENAMED) > known[MESSAGES]

    def _unnamed_since(self, version: int) -> bool:
        """Whether events without the type or organization of their message were added after a version."""
        return self._takes_names and self._tables.last_txn(EVENTS, UNNAMED) > version

    @property
    def _takes_names(self) -> bool:
        return self._table.inputs == (EVENTS, MESSAGES)

    def _named(self, rows: DataFrame) -> DataFrame:
        """Input rows with the type and organization of their message."""
        if not self._takes_names or not self._messages:
            return rows
        messages = self._read(MESSAGES, self._messages)
        return named(rows, messages, few=rows_of(self._messages) <= NAMES_BROADCAST_MAX)

    def _follow(
        self, change: InputChange, way: Sums | Hours | Running, held: ExitStack
    ) -> Replacement | None:
        is_there = all(self._tables.file_exists(change.source, file) for file in change.removed)
        if isinstance(way, Sums) and is_there and (way.is_reversible or not change.removed):
            each = way.each or self._table.build
            if way.scattered:
                return self._scattered_sums(change, way, each)
            return self._sums(change, way, each, held)
        if isinstance(way, Hours) and is_there:
            return self._changed_hours(change, way)
        if isinstance(way, Running):
            return self._running_total(change, way)
        return self._changed_days(change)

    def _changed_days(self, change: InputChange) -> Replacement:
        days = {day for day in change.days if (day or "") > self._closed_day}
        rows = self._named(self._read(change.source, self._of(change.source, days)))
        return self._table.build(rows), self._of(self._name, days)

    def _running_total(self, change: InputChange, way: Running) -> Replacement:
        """Rebuild the first day that changed, and all later days."""
        first = min(day or "" for day in change.days)
        source = self._tables.files(change.source)
        earlier = self._read(change.source, [file for file in source if _day(file) < first])
        before = earlier.groupBy(*way.keys).agg(*[F.sum(name).alias(name) for name in way.sums])
        rows = self._read(change.source, [file for file in source if _day(file) >= first])
        replaced = [file for file in self._tables.files(self._name) if _day(file) >= first]
        return self._table.build(rows, before), replaced

    # ---- sums ----------------------------------------------------------------------------------------

    def _sums(self, change: InputChange, way: Sums, each: Each, held: ExitStack) -> Replacement:
        added, removed = self._named(self._read(change.source, change.added)), None
        if change.removed:
            removed = self._named(self._read(change.source, change.removed))
        if way.whole:
            moved = added if removed is None else added.unionByName(removed)
            others = self._others(change, moved, way.whole).persist()
            held.callback(others.unpersist)
            added, removed = added.select(*way.whole), None if removed is None else removed.select(*way.whole)
            # Rows of other groups, after a hash collision, cancel out.
            added, removed = (
                added.unionByName(others),
                others if removed is None else removed.unionByName(others),
            )
        first_us, last_us = change.hours(way.moment)
        own = self._of(self._name, change.days)
        replaced = [file for file in own if file_index.overlaps(file, "hour_us", first_us, last_us)]
        news = each(added)
        rows = self._own(replaced, news).unionByName(news)
        if removed is not None:
            rows = rows.unionByName(way.negated(each(removed)))
        return way.summed(rows), replaced

    def _scattered_sums(self, change: InputChange, way: Sums, each: Each) -> Replacement:
        """Sums of a large table of which few rows in many files change."""
        added, removed = (self._read(change.source, files) for files in (change.added, change.removed))
        news = each(added).unionByName(way.negated(each(removed)))
        key = F.xxhash64(*way.keys)
        sums = news.groupBy(key.alias("changed")).agg(*[F.sum(name).alias(name) for name in way.sums])
        few = rows_of([*change.added, *change.removed]) <= file_index.BROADCAST_IDS_MAX
        # By a hash: on a collision, which is very rare, a file too many is rewritten.
        hashes = with_join_hint(sums.where(way.is_nonzero()).select("changed"), few=few)

        def among(rows: DataFrame) -> DataFrame:
            return rows.join(hashes, key == F.col("changed"), "left_semi")

        own = self._of(self._name, change.days)
        replaced = file_index.files_with_matches(self._spark, self._tables, self._name, own, among)
        return way.summed(self._own(replaced, news).unionByName(news)), replaced

    def _others(self, change: InputChange, moved: DataFrame, columns: tuple[str, ...]) -> DataFrame:
        """The unchanged rows of the groups that changed."""
        column = columns[0]
        ids = moved.where(F.col(column).isNotNull()).select(column)
        lookup = file_index.lookup_of(ids, [*change.added, *change.removed], repeat=True)
        known = {file.path for file in change.added}
        files = [file for file in self._of(change.source, change.days) if file.path not in known]
        rows = self._read(change.source, [file for file in files if lookup.may_be_in(file)])
        return lookup.among(rows.select(*columns))

    # ---- hours ---------------------------------------------------------------------------------------

    def _changed_hours(self, change: InputChange, way: Hours) -> Replacement | None:
        added, removed = self._read(change.source, change.added), self._read(change.source, change.removed)
        differing = _differing(added, removed, way)
        if self._closed_day:
            differing = differing.where(day_of(F.col("hour_us")) > self._closed_day)
        hours = [row["hour_us"] for row in differing.limit(HOURS_MAX + 1).collect()]
        if not hours:
            return None
        if len(hours) > HOURS_MAX:
            return self._changed_days(change)
        source = [file for file in self._of(change.source, change.days) if _may_be_of(file, hours)]
        rows = self._read(change.source, source).where(hour_us(way.moment()).isin(hours))
        replaced = self._of(self._name, change.days)
        stay = self._read(self._name, replaced).where(~F.col("hour_us").isin(hours))
        built = self._table.build(rows)
        return built.unionByName(stay.select(built.columns)), replaced

    # ---- files ---------------------------------------------------------------------------------------

    def _read(self, name: str, files: list[DataFile]) -> DataFrame:
        rows = self._tables.read(self._spark, name, files)
        return with_all_columns(rows) if name == EVENTS else rows

    def _own(self, files: list[DataFile], like: DataFrame) -> DataFrame:
        """Rows of the table itself, without columns that another program has added."""
        return self._read(self._name, files).select(*like.columns)

    def _of(self, name: str, days: set[str | None]) -> list[DataFile]:
        return self._tables.listing(name).in_partitions("day", days)


def _day(file: DataFile) -> str:
    return file.partition["day"] or ""


def _may_be_of(file: DataFile, hours: list[int]) -> bool:
    """Whether a file can hold a row of one of the hours."""
    first_us, last_us = file.low.get("first_us"), file.high.get("last_us")
    return any(file_index.ranges_overlap(first_us, last_us, hour, hour + HOUR_US) for hour in hours)


def _differing(added: DataFrame, removed: DataFrame, way: Hours) -> DataFrame:
    """The hours with a row on one side only. Most rows of a rewritten file have not changed.

    The rows of a side are distinct, so rows of both sides cancel out in the XOR of their hashes. Two hashes
    of 64 bits make a collision practically impossible.
    """
    columns = [hour_us(way.moment()).alias("hour_us"), *map(F.col, way.compared)]
    rows = added.select(*columns).unionByName(removed.select(*columns))
    hashes = [F.bit_xor(F.xxhash64(*names)) for names in (way.compared, way.compared[::-1])]
    combined = rows.groupBy("hour_us").agg(*(one.alias(f"hash{n}") for n, one in enumerate(hashes)))
    return combined.where("hash0 <> 0 OR hash1 <> 0").select("hour_us")
