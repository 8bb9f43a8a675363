"""Updates gold tables after a change of their inputs, without reading all of the inputs again.

Rule 1: sums add the rows that were added to the input, and subtract those that were removed. Only the files
        of hours with a changed sum are rewritten.
Rule 2: tables that are not sums rebuild the hours that changed, from all of their input rows.
Rule 3: running totals are rebuilt from the first changed hour until they equal the stored ones. A day of the
        table begins with the totals of the day before, so no earlier day is read.
Rule 4: where none of these is possible, the days that changed are rebuilt: rows were removed from a minimum,
        removed files no longer exist, or too many hours changed. All ways give the same rows.
Rule 5: a store records the type and organization of a message once, when it is created. Tables that group by
        these read them from `silver_messages`, and are rebuilt if a known message gets others.
Rule 6: gold keeps rows whose events `retain` has deleted from silver. Days up to the newest deleted event are
        closed: they are not rebuilt, because silver is incomplete there. Sums are still added to.
"""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from datetime import UTC, date, datetime
from functools import cached_property
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.delta import file_index
from postroom.pipeline.delta.delta_log import RENAMED, UNNAMED, DataFile, FileList, rows_of
from postroom.pipeline.delta.file_groups import hours_of
from postroom.pipeline.delta.joins import with_join_hint
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.gold.declaration import GoldTable, Hours, Running, Sums
from postroom.pipeline.ingest.bronze import with_all_columns
from postroom.pipeline.silver import deleted_numbers
from postroom.pipeline.silver.tables import SILVER, day_of, hour_us, named
from postroom.pipeline.times import DAY_US, HOUR_US, MICROS_PER_S

HOURS_MAX: Final = (
    1_000  # hours rebuilt one by one; when more changed, as after wrong clocks, days are rebuilt
)
FOREVER: Final = 2**63 - 1  # the last moment
NAMES_BROADCAST_MAX: Final = 500_000  # messages whose names are broadcast; more of them are shuffled
EVENTS: Final = "silver_events"
MESSAGES: Final = "silver_messages"
Replacement = tuple[DataFrame, list[DataFile]]
"""New rows, and the files that they replace."""
Versions = Mapping[str, int]
"""A version of each input."""


class InputChange(NamedTuple):
    """The files that were added to an input, and those that were removed."""

    source: str
    added: list[DataFile]
    removed: list[DataFile]

    @property
    def days(self) -> set[str | None]:
        return {file.partition["day"] for file in (*self.added, *self.removed)}

    @property
    def rows(self) -> int:
        return rows_of([*self.added, *self.removed])


class GoldRefresh:
    """Computes the update of one gold table."""

    def __init__(self, spark: SparkSession, tables: Tables, name: str, table: GoldTable) -> None:
        self._spark = spark
        self._tables = tables
        self._name = name
        self._table = table
        self._messages: list[DataFile] = []
        """The files of messages whose events lack names."""
        self.hours: Collection[int] | None = None
        """The hours that an update has changed; None when they are not known, or all."""

    def rebuild(self, *, whole: bool = False) -> Replacement:
        """All rows, except those of closed days that the table already has, unless `whole`."""
        are_named = self._takes_names and not self._unnamed_since(-1)
        sources = self._table.inputs[:1] if are_named else self._table.inputs
        inputs = [self._read(source, self._tables.files(source)) for source in sources]
        rows, replaced = self._table.build(*inputs), self._tables.files(self._name)
        if whole or not self._closed_day or not replaced:
            return rows, replaced
        return rows.where(F.col("day") > self._closed_day), [
            file for file in replaced if (file.partition["day"] or "") > self._closed_day
        ]

    @cached_property
    def _closed_day(self) -> str:
        """The last day of which `retain` may have deleted events; empty when there is none."""
        if "day" not in self._table.partition_by or self._table.inputs[0] not in SILVER:
            return ""
        newest_us = deleted_numbers.newest_us(self._tables)
        return "" if newest_us < 0 else _day_at(newest_us)

    def update(self, known: Versions, until: Versions, held: ExitStack) -> Replacement | None:
        """The update from one version of the inputs to another; None when no row has changed."""
        changes = [
            InputChange(source, *self._tables.changed(source, known[source], until[source]))
            for source in self._table.inputs
        ]
        if not any(change.added or change.removed for change in changes):
            return None
        are_names_old = self._takes_names and self._tables.last_txn(MESSAGES, RENAMED) > known[MESSAGES]
        if self._table.change is None or are_names_old:
            return self.rebuild()
        if self._unnamed_since(known[self._table.inputs[0]]):
            self._messages = self._tables.files(MESSAGES) if changes[0].removed else changes[1].added
        return self._follow(changes[0], self._table.change, held) if changes[0].days else None

    # ---- the names of messages -----------------------------------------------------------------------

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
        if isinstance(way, Running):
            return self._running_total(change, way, is_there=is_there)
        if isinstance(way, Sums) and is_there and (way.is_reversible or not change.removed):
            return self._sums(change, way, held)
        if isinstance(way, Hours) and is_there:
            return self._changed_hours(change, way)
        return self._changed_days(change)

    def _changed_days(self, change: InputChange) -> Replacement:
        days = {day for day in change.days if (day or "") > self._closed_day}
        rows = self._named(self._read(change.source, self._of(change.source, days)))
        return self._table.build(rows), self._of(self._name, days)

    # ---- running totals ------------------------------------------------------------------------------

    def _running_total(self, change: InputChange, way: Running, *, is_there: bool) -> Replacement | None:
        """Rebuild the totals from the first changed hour until they equal the stored ones."""
        changed = self._changed_period(change, way) if is_there else (_first_us(change.days), FOREVER)
        if changed is None:
            return None
        own, flows = self._tables.listing(self._name), self._tables.listing(change.source)
        if own.extent(way.moment) is None or flows.extent(way.moment) is None:
            return self.rebuild()  # another program has written files without statistics
        first_us, last_us = self._whole_files(own, way, *changed)
        files = flows.overlapping(way.moment, first_us, last_us)
        self.hours = hours_of(files, way.moment)
        rows = self._read(change.source, files)
        days = [day for day in flows.partition_values("day") if first_us <= _first_us({day}) <= last_us]
        built = self._table.build(
            rows.where(F.col(way.moment).between(first_us, last_us)),
            self._totals_before(first_us, own, flows, change.source, way),
            self._spark.createDataFrame([(day,) for day in days], "day string"),
        )
        return built, own.overlapping(way.moment, first_us, last_us)

    def _changed_period(self, change: InputChange, way: Running) -> tuple[int, int] | None:
        """The first hour and the last moment of changed totals; None when no row of the input differs."""
        added, removed = (
            self._read(change.source, files).select(*way.keys, way.moment, *way.sums)
            for files in (change.added, change.removed)
        )
        plus, minus = way.sums
        rows = added.unionByName(removed.withColumns({name: -F.col(name) for name in way.sums}))
        moments = rows.groupBy(*way.keys, way.moment).agg(*[F.sum(name).alias(name) for name in way.sums])
        moved = moments.where(f"{plus} <> 0 OR {minus} <> 0").groupBy(*way.keys)
        keys = moved.agg(
            F.min(way.moment).alias("first_us"),
            F.max(way.moment).alias("last_us"),
            F.sum(F.col(plus) - F.col(minus)).alias("rest"),
        )
        [found] = keys.agg(F.min("first_us"), F.max("last_us"), F.count_if(F.col("rest") != 0)).collect()
        first_us, last_us, lasting = found
        return None if first_us is None else (first_us - first_us % HOUR_US, FOREVER if lasting else last_us)

    def _whole_files(self, own: FileList, way: Running, first_us: int, last_us: int) -> tuple[int, int]:
        """A period, extended to all moments of the files that it touches. A new day begins at midnight."""
        if not own.in_partitions("day", {_day_at(first_us)}):
            first_us = _first_us({_day_at(first_us)})
        while True:
            extent = file_index.extent(own.overlapping(way.moment, first_us, last_us), way.moment)
            low, high = extent or (first_us, last_us)
            if first_us <= low and high <= last_us:
                return first_us, last_us
            first_us, last_us = min(first_us, low), max(last_us, high)

    def _totals_before(
        self, first_us: int, own: FileList, flows: FileList, source: str, way: Running
    ) -> DataFrame:
        """The totals at a moment, by the last day before it; by all of the input without that day."""
        known, earlier = (files.within(way.moment, 0, first_us - 1) for files in (own, flows))
        last_day = _last(known.partition_values("day"))
        if last_day == _last(earlier.partition_values("day")):
            rows = self._read(self._name, known.in_partitions("day", {last_day}))
            total = F.max_by(way.total, way.moment)
        else:  # `retain` has deleted days of the table
            rows = self._read(source, earlier.all())
            total = F.sum(F.col(way.sums[0]) - F.col(way.sums[1]))
        before = rows.where(F.col(way.moment) < first_us)
        return before.groupBy(*way.keys).agg(total.alias(way.total))

    # ---- sums ----------------------------------------------------------------------------------------

    def _sums(self, change: InputChange, way: Sums, held: ExitStack) -> Replacement | None:
        each = way.each or self._table.build
        added, removed = self._changed_rows(change, way, held)
        news = each(added)
        if removed is not None:
            news = news.unionByName(way.negated(each(removed)))
        replaced = self._of(self._name, change.days)
        if way.is_narrow and len(replaced) > len(change.days):
            news = way.summed(news).persist()
            held.callback(news.unpersist)
            found = self._files_of_sums(news, replaced, way, few=change.rows <= file_index.BROADCAST_IDS_MAX)
            if found is None:
                return None
            replaced = found
        own = self._read(self._name, replaced).select(*news.columns)  # another program may have added columns
        return way.summed(own.unionByName(news)), replaced

    def _changed_rows(
        self, change: InputChange, way: Sums, held: ExitStack
    ) -> tuple[DataFrame, DataFrame | None]:
        """The added and the removed rows of the input; None when no row was removed."""
        added, removed = self._named(self._read(change.source, change.added)), None
        if change.removed:
            removed = self._named(self._read(change.source, change.removed))
        if not way.whole:
            return added, removed
        moved = added if removed is None else added.unionByName(removed)
        others = self._others(change, moved, way.whole).persist()
        held.callback(others.unpersist)
        # Rows of other groups, after a hash collision, cancel out.
        added = added.select(*way.whole).unionByName(others)
        return added, others if removed is None else removed.select(*way.whole).unionByName(others)

    def _files_of_sums(
        self, news: DataFrame, own: list[DataFile], way: Sums, *, few: bool
    ) -> list[DataFile] | None:
        """The files that can hold the rows of changed sums; None when no sum has changed."""
        if way.scattered:
            key = F.xxhash64(*way.keys)
            # By a hash: on a collision, which is very rare, a file too many is rewritten.
            hashes = with_join_hint(news.select(key.alias("changed")), few=few)

            def among(rows: DataFrame) -> DataFrame:
                return rows.join(hashes, key == F.col("changed"), "left_semi")

            return file_index.files_with_matches(self._spark, self._tables, self._name, own, among)
        hours = _hours_of(news.select(hour_us(F.col(way.moment)).alias("hour_us")).distinct())
        if not hours:
            return None
        if len(hours) > HOURS_MAX:
            return own
        self.hours = hours
        return _files_of_hours(own, way.moment, hours)

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
        hours = _hours_of(differing)
        if not hours:
            return None
        if len(hours) > HOURS_MAX:
            return self._changed_days(change)
        self.hours = hours
        source = [file for file in self._of(change.source, change.days) if _may_be_of(file, hours)]
        rows = self._read(change.source, source).where(hour_us(way.moment()).isin(hours))
        replaced = _files_of_hours(self._of(self._name, change.days), "hour_us", hours)
        stay = self._read(self._name, replaced).where(~F.col("hour_us").isin(hours))
        built = self._table.build(rows)
        return built.unionByName(stay.select(built.columns)), replaced

    # ---- files ---------------------------------------------------------------------------------------

    def _read(self, name: str, files: list[DataFile]) -> DataFrame:
        rows = self._tables.read(self._spark, name, files)
        return with_all_columns(rows) if name == EVENTS else rows

    def _of(self, name: str, days: set[str | None]) -> list[DataFile]:
        return self._tables.listing(name).in_partitions("day", days)


def _last(days: set[str | None]) -> str:
    return max((day or "" for day in days), default="")


def _day_at(moment_us: int) -> str:
    return f"{datetime.fromtimestamp(moment_us // MICROS_PER_S, UTC):%Y-%m-%d}"


def _first_us(days: set[str | None]) -> int:
    """The start of the first of some days."""
    first = min(day or "" for day in days)
    return (date.fromisoformat(first) - date(1970, 1, 1)).days * DAY_US


def _may_be_of(file: DataFile, hours: list[int]) -> bool:
    """Whether a file can hold a row of one of the hours."""
    first_us, last_us = file.low.get("first_us"), file.high.get("last_us")
    return any(file_index.ranges_overlap(first_us, last_us, hour, hour + HOUR_US) for hour in hours)


def _files_of_hours(files: list[DataFile], column: str, hours: list[int]) -> list[DataFile]:
    """The files that can hold a row of one of the hours, by a column of the table."""
    return [
        file
        for file in files
        if any(file_index.overlaps(file, column, hour, hour + HOUR_US - 1) for hour in hours)
    ]


def _hours_of(rows: DataFrame) -> list[int]:
    """The hours (`hour_us`) of rows, at most one more than `HOURS_MAX`."""
    return [row["hour_us"] for row in rows.limit(HOURS_MAX + 1).collect()]


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
