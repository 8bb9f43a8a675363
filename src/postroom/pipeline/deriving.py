"""Gold tables that follow a change of what they are made of, without looking at all of it again.

Rule 1: what is added up takes what came, and less what went; it never reads the rest of the history.
Rule 2: what cannot be added up is made anew for the parts that changed, from all of their rows.
Rule 3: where neither can be, because rows went from a minimum or their files are no longer there, the days
        that changed are made anew. All three give the same rows.
"""

from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline import finding
from postroom.pipeline.tables import DataFile, Tables
from postroom.pipeline.transforms.goldtable import GoldTable, Parts, Sums
from postroom.pipeline.transforms.joining import sent

Derived = tuple[DataFrame, list[DataFile]]
"""Rows, and the files that they replace."""


class Change(NamedTuple):
    """What came into the input of a table, and what went."""

    source: str
    added: list[DataFile]
    removed: list[DataFile]

    @property
    def days(self) -> set[str | None]:
        return {file.partition["day"] for file in (*self.added, *self.removed)}


class Deriving:
    """One gold table, and what it follows with."""

    def __init__(self, spark: SparkSession, tables: Tables, name: str, table: GoldTable) -> None:
        self._spark = spark
        self._tables = tables
        self._name = name
        self._table = table

    def anew(self) -> Derived:
        inputs = [self._tables.read(self._spark, source) for source in self._table.inputs]
        return self._table.build(*inputs), self._tables.files(self._name)

    def since(self, version: int, held: ExitStack) -> Derived:
        """What has to be written to follow the only input from a version on."""
        [source] = self._table.inputs
        change = Change(source, *self._tables.changed(source, version))
        way = self._table.change
        is_there = all(self._tables.lies(source, file) for file in change.removed)
        if isinstance(way, Sums) and is_there and (way.is_reversible or not change.removed):
            return self._added_up(change, way)
        if isinstance(way, Parts) and is_there:
            return self._parts(change, way, held)
        return self._days(change)

    def _days(self, change: Change) -> Derived:
        rows = self._read(change.source, self._of(change.source, change.days))
        return self._table.build(rows), self._of(self._name, change.days)

    # ---- sums ----------------------------------------------------------------------------------------

    def _added_up(self, change: Change, way: Sums) -> Derived:
        build = self._table.build
        came, went = self._read(change.source, change.added), None
        if change.removed:
            went = self._read(change.source, change.removed)
        if way.whole is not None:
            others = self._others(change, came if went is None else came.unionByName(went), way.whole)
            # If some of them are of others, they cancel out.
            came, went = came.unionByName(others), others if went is None else went.unionByName(others)
        replaced = self._of(self._name, change.days)
        rows = self._read(self._name, replaced).unionByName(build(came))
        if went is not None:
            rows = rows.unionByName(way.taken_off(build(went)))
        return way.added_up(rows), replaced

    def _others(self, change: Change, moved: DataFrame, column: str) -> DataFrame:
        """The rows that neither came nor went, of what did."""
        ids = moved.where(F.col(column).isNotNull()).select(column)
        wanted = finding.wanted_of(ids, [*change.added, *change.removed], repeat=True)
        known = {file.path for file in change.added}
        files = [file for file in self._of(change.source, change.days) if file.path not in known]
        return wanted.among(self._read(change.source, [file for file in files if wanted.may_be_in(file)]))

    # ---- parts ---------------------------------------------------------------------------------------

    def _parts(self, change: Change, way: Parts, held: ExitStack) -> Derived:
        came, went = self._read(change.source, change.added), self._read(change.source, change.removed)
        parts = _differing(came, went, way).distinct().persist()
        held.callback(parts.unpersist)
        few = parts.count() <= finding.BROADCAST_IDS_MAX

        def among(rows: DataFrame, part: list[Column], how: str = "left_semi") -> DataFrame:
            return rows.join(sent(parts, few=few), F.xxhash64(*part) == F.col("changed"), how)

        own = [F.col(name) for name in way.names]
        replaced = finding.with_chosen(
            self._spark, self._tables, self._name, self._of(self._name, change.days), partial(among, part=own)
        )
        rows = among(self._read(change.source, self._of(change.source, change.days)), way.of())
        stay = among(self._read(self._name, replaced), own, "left_anti")
        built = self._table.build(rows)
        return built.unionByName(stay.select(built.columns)), replaced

    # ---- files ---------------------------------------------------------------------------------------

    def _read(self, name: str, files: list[DataFile]) -> DataFrame:
        return self._tables.read(self._spark, name, files)

    def _of(self, name: str, days: set[str | None]) -> list[DataFile]:
        return [file for file in self._tables.files(name) if file.partition["day"] in days]


def _differing(came: DataFrame, went: DataFrame, way: Parts) -> DataFrame:
    """The parts of rows that only one side has. Most of what is written anew says what it said before.

    A part goes by a number: if two have the same, both are made anew. A row is compared by two numbers of 64
    bits, which are the same by chance in no history.
    """
    part = F.xxhash64(*way.of()).alias("changed")
    marks = [F.xxhash64(*way.told).alias("mark"), F.xxhash64(*reversed(way.told)).alias("other_mark")]
    signed = came.select(part, *marks, F.lit(1).alias("sign")).unionByName(
        went.select(part, *marks, F.lit(-1).alias("sign"))
    )
    summed = signed.groupBy("changed", "mark", "other_mark").agg(F.sum("sign").alias("sign"))
    return summed.where("sign <> 0").select("changed")
