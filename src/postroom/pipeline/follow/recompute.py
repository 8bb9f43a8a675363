"""Tables whose changed hours are computed again: exact percentiles, and running totals."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.delta import file_index
from postroom.pipeline.delta.delta_log import DataFile, FileList
from postroom.pipeline.delta.file_groups import hours_of
from postroom.pipeline.follow.columns import day_of, hour_us
from postroom.pipeline.follow.refresh import Refresh, Replacement, Way, day_at
from postroom.pipeline.times import DAY_US, HOUR_US

HOURS_MAX: Final = (
    1_000  # hours rebuilt one by one; when more changed, as after wrong clocks, days are rebuilt
)
FOREVER: Final = 2**63 - 1  # the last moment


@dataclass(frozen=True)
class Hours(Way):
    """Changed hours are rebuilt from all of their input rows."""

    moment: Callable[[], Column]
    """The time of an input row, between its `first_us` and `last_us`. Its hour is `hour_us` of the table."""
    compared: tuple[str, ...]
    """The columns of the input that matter, including a key. A row with the same values has not changed."""

    def follow(self, refresh: Refresh) -> Replacement | None:
        change = refresh.change
        if not refresh.has_removed_files():
            return refresh.built_days()
        differing = self._differing(*(refresh.read(change.source, files) for files in change[1:]))
        if refresh.closed_day:
            differing = differing.where(day_of(F.col("hour_us")) > refresh.closed_day)
        hours = hours_in(differing)
        if not hours:
            return None
        if len(hours) > HOURS_MAX:
            return refresh.built_days()
        refresh.hours = hours
        source = [file for file in refresh.in_days(change.source, change.days) if _may_be_of(file, hours)]
        rows = refresh.read(change.source, source).where(hour_us(self.moment()).isin(hours))
        replaced = files_of_hours(refresh.in_days(refresh.name, change.days), "hour_us", hours)
        stay = refresh.read(refresh.name, replaced).where(~F.col("hour_us").isin(hours))
        built = refresh.table.build(rows)
        return Replacement(built.unionByName(stay.select(built.columns)), replaced)

    def _differing(self, added: DataFrame, removed: DataFrame) -> DataFrame:
        """The hours with a row on one side only. Most rows of a rewritten file have not changed.

        The rows of a side are distinct, so rows of both sides cancel out in the XOR of their hashes. Two
        hashes of 64 bits make a collision practically impossible.
        """
        columns = [hour_us(self.moment()).alias("hour_us"), *map(F.col, self.compared)]
        rows = added.select(*columns).unionByName(removed.select(*columns))
        hashes = [F.bit_xor(F.xxhash64(*names)) for names in (self.compared, self.compared[::-1])]
        combined = rows.groupBy("hour_us").agg(*(one.alias(f"hash{n}") for n, one in enumerate(hashes)))
        return combined.where("hash0 <> 0 OR hash1 <> 0").select("hour_us")


@dataclass(frozen=True)
class Running(Way):
    """A running total. A change affects its hour and all later hours, until later changes cancel it out.

    It is rebuilt from the first changed hour until it equals the stored one. `build` gets the totals before
    its first row, and the days of the table. On each day it begins with a row for every key whose total is
    not 0, so that no earlier day has to be read.
    """

    keys: tuple[str, ...]
    sums: tuple[str, str]
    """The columns of the input that are added to the total and subtracted from it."""
    total: str
    moment: str
    """The time of a row, in the input and in the table."""

    def follow(self, refresh: Refresh) -> Replacement | None:
        change, tables = refresh.change, refresh.tables
        period: tuple[int, int] | None = (_first_us(change.days), FOREVER)
        if refresh.has_removed_files():
            period = self._changed_period(*(refresh.read(change.source, files) for files in change[1:]))
        if period is None:
            return None
        own, flows = tables.listing(refresh.name), tables.listing(change.source)
        if own.extent(self.moment) is None or flows.extent(self.moment) is None:
            return refresh.rebuild()  # another program has written files without statistics
        first_us, last_us = self._whole_files(own, *period)
        files = flows.overlapping(self.moment, first_us, last_us)
        refresh.hours = hours_of(files, self.moment)
        rows = refresh.read(change.source, files)
        days = [day for day in flows.partition_values("day") if first_us <= _first_us({day}) <= last_us]
        built = refresh.table.build(
            rows.where(F.col(self.moment).between(first_us, last_us)),
            self._totals_before(refresh, first_us, own, flows),
            refresh.spark.createDataFrame([(day,) for day in days], "day string"),
        )
        return Replacement(built, own.overlapping(self.moment, first_us, last_us))

    def _changed_period(self, added: DataFrame, removed: DataFrame) -> tuple[int, int] | None:
        """The first hour and the last moment of changed totals; None when no row of the input differs."""
        plus, minus = self.sums
        columns = (*self.keys, self.moment, *self.sums)
        negated = removed.select(*columns).withColumns({name: -F.col(name) for name in self.sums})
        rows = added.select(*columns).unionByName(negated)
        moments = rows.groupBy(*self.keys, self.moment).agg(*[F.sum(name).alias(name) for name in self.sums])
        keys = moments.where(f"{plus} <> 0 OR {minus} <> 0").groupBy(*self.keys)
        moved = keys.agg(
            F.min(self.moment).alias("first_us"),
            F.max(self.moment).alias("last_us"),
            F.sum(F.col(plus) - F.col(minus)).alias("rest"),
        )
        [found] = moved.agg(F.min("first_us"), F.max("last_us"), F.count_if(F.col("rest") != 0)).collect()
        first_us, last_us, lasting = found
        return None if first_us is None else (first_us - first_us % HOUR_US, FOREVER if lasting else last_us)

    def _whole_files(self, own: FileList, first_us: int, last_us: int) -> tuple[int, int]:
        """A period, extended to all moments of the files that it touches. A new day begins at midnight."""
        if not own.in_partitions("day", {day_at(first_us)}):
            first_us = _first_us({day_at(first_us)})
        while True:
            extent = file_index.extent(own.overlapping(self.moment, first_us, last_us), self.moment)
            low, high = extent or (first_us, last_us)
            if first_us <= low and high <= last_us:
                return first_us, last_us
            first_us, last_us = min(first_us, low), max(last_us, high)

    def _totals_before(self, refresh: Refresh, first_us: int, own: FileList, flows: FileList) -> DataFrame:
        """The totals at a moment, by the last day before it; by all of the input without that day."""
        known, earlier = (files.within(self.moment, 0, first_us - 1) for files in (own, flows))
        last_day = _last(known.partition_values("day"))
        if last_day == _last(earlier.partition_values("day")):
            rows = refresh.read(refresh.name, known.in_partitions("day", {last_day}))
            total = F.max_by(self.total, self.moment)
        else:  # `retain` has deleted days of the table
            rows = refresh.read(refresh.change.source, earlier.all())
            total = F.sum(F.col(self.sums[0]) - F.col(self.sums[1]))
        before = rows.where(F.col(self.moment) < first_us)
        return before.groupBy(*self.keys).agg(total.alias(self.total))


def _last(days: set[str | None]) -> str:
    return max((day or "" for day in days), default="")


def _first_us(days: set[str | None]) -> int:
    """The start of the first of some days."""
    first = min(day or "" for day in days)
    return (date.fromisoformat(first) - date(1970, 1, 1)).days * DAY_US


def _may_be_of(file: DataFile, hours: list[int]) -> bool:
    """Whether a file can hold a row of one of the hours."""
    first_us, last_us = file.low.get("first_us"), file.high.get("last_us")
    return any(file_index.ranges_overlap(first_us, last_us, hour, hour + HOUR_US) for hour in hours)


def files_of_hours(files: list[DataFile], column: str, hours: list[int]) -> list[DataFile]:
    """The files that can hold a row of one of the hours, by a column of the table."""
    return [
        file
        for file in files
        if any(file_index.overlaps(file, column, hour, hour + HOUR_US - 1) for hour in hours)
    ]


def hours_in(rows: DataFrame) -> list[int]:
    """The hours (`hour_us`) of rows, at most one more than `HOURS_MAX`."""
    return [row["hour_us"] for row in rows.limit(HOURS_MAX + 1).collect()]
