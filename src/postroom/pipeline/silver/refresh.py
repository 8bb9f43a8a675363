"""Silver tables that follow their input: append events, fold messages and attempts, place spans.

Rule 1: a fold reads the events that are new and the rows that these change. All other rows stay in their
        files.
Rule 2: the version of the input that a table has read stands in the table's own commit, as an application
        transaction.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.core.redaction import Level
from postroom.pipeline.delta import file_index
from postroom.pipeline.delta.delta_log import RENAMED, ROWS_WITHDRAWN, UNNAMED, DataFile, Txn, rows_of
from postroom.pipeline.delta.file_groups import file_group, hours_of
from postroom.pipeline.delta.joins import with_join_hint
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.ingest import bronze, redaction
from postroom.pipeline.silver import deleted_numbers
from postroom.pipeline.silver import tables as silver
from postroom.pipeline.silver.declaration import Append, Fold, SilverTable, Tree
from postroom.pipeline.silver.span_tree import SpanPlacement

EVENTS: Final = "silver_events"
MESSAGES: Final = "silver_messages"


class NewInput(NamedTuple):
    """The part of its input that a table has not read yet."""

    added: list[DataFile]
    removed: list[DataFile]
    txn: Txn


class SilverRefresh:
    """Brings one silver table up to date with its input."""

    def __init__(
        self,
        spark: SparkSession,
        tables: Tables,
        name: str,
        table: SilverTable,
        *,
        level: Level,
        progress: Callable[[str], None],
    ) -> None:
        self._spark = spark
        self._tables = tables
        self._name = name
        self._table = table
        self._level: Level = level
        self._progress = progress

    def run(self, *, rebuild: bool) -> None:
        """Read the new part of the input, or with `rebuild` all of it, and commit the rows that change."""
        if self._table.takes_names:  # a message may have been renamed since
            known = self._tables.last_txn(self._name, MESSAGES)
            rebuild = rebuild or known < 0 or self._tables.last_txn(MESSAGES, RENAMED) > known
        base = self._tables.version(self._name)
        new = self._new_input(rebuild=rebuild)
        if new is None:
            return
        match self._table.update:
            case Append():
                self._append(new, base, rebuild=rebuild)
            case Fold() as fold:
                self._fold(fold, new, base, rebuild=rebuild)
            case Tree():
                self._place(new, base, rebuild=rebuild)

    def _new_input(self, *, rebuild: bool) -> NewInput | None:
        """The input since the version that the table has read; None when no rows were added."""
        source = self._table.source
        known = -1 if rebuild else self._tables.last_txn(self._name, source)
        version = self._tables.version(source)
        if known == version:
            return None
        added, removed = self._tables.changed(source, known, version)
        if not added and self._tables.exists(self._name):
            self._tables.mark(self._name, [Txn(source, version)], base=self._tables.version(self._name))
            return None
        self._progress(f"{self._name}: {rows_of(added):,} rows of {source}")
        return NewInput(added, removed, Txn(source, version))

    # ---- append --------------------------------------------------------------------------------------

    def _append(self, new: NewInput, base: int, *, rebuild: bool, withdrawn: bool = False) -> None:
        removed = self._tables.files(self._name) if rebuild else []
        convert = redaction.redacted_rows(self._level)
        read = self._tables.read_with_row(self._spark, self._table.source, new.added, convert)
        rows = self._without_deleted(bronze.with_mark(bronze.with_all_columns(read)), new.added)
        known = self._known_events(rows, new.added, rebuild=rebuild)
        done = redaction.is_done(self._level)
        masks = {} if self._tables.is_small else redaction.redacted(self._level, done)
        with ExitStack() as held:
            repeated, few = self._repeats(rows, known, masks, held)
            if repeated is not None and not repeated.where("is_beaten").isEmpty():
                self._progress(f"{self._name}: two events have one number, and the later one counts")
                everything = self._new_input(rebuild=True)
                if everything is not None:
                    self._append(everything, base, rebuild=True, withdrawn=True)
                return
            fresh = rows if repeated is None else silver.once(rows, repeated, few=few)
            seen = Observation()
            unnamed = F.count_if(silver.lacks_names()).alias("unnamed")
            result = self._table.build(fresh, masks, done).observe(seen, unnamed)
            staged = self._tables.stage(self._name, result, partition_by=self._table.partition_by)
            txns = [new.txn, *([Txn(UNNAMED, base + 1)] if seen.get["unnamed"] else [])]
            txns += [Txn(ROWS_WITHDRAWN, base + 1)] if withdrawn else []
            self._tables.commit(self._name, staged, removed, txns=txns, base=base)

    def _repeats(
        self, rows: DataFrame, known: DataFrame, masks: Mapping[str, Column], held: ExitStack
    ) -> tuple[DataFrame | None, bool]:
        """The events that occur more than once, and whether they are few; None when there are none."""
        suspects = silver.suspects(rows, known).persist()
        held.callback(suspects.unpersist)
        n = suspects.count()
        if not n:
            return None, True
        few = n <= file_index.BROADCAST_IDS_MAX
        new = silver.ranked(rows, suspects, masks, few=few)
        old = silver.ranked(known, suspects, {}, few=few)
        repeated = silver.repeats(new, old).persist()
        held.callback(repeated.unpersist)
        return repeated, few

    def _without_deleted(self, rows: DataFrame, added: list[DataFile]) -> DataFrame:
        """New events without those that `retain` deleted before: old segments may be delivered again."""
        newest_us = deleted_numbers.newest_us(self._tables)
        oldest_us = (file_index.extent(added, "ts_us") or (-1, -1))[0]
        if newest_us < oldest_us:
            return rows
        old = rows.where(F.col("ts_us") <= newest_us)
        left = deleted_numbers.deleted_among(old, self._tables.read(self._spark, deleted_numbers.TABLE))
        if self._tables.exists(self._name):  # a killed `retain` has recorded events that are still there
            there = self._tables.read(self._spark, self._name).where(F.col("ts_us") <= newest_us)
            left = left.join(there.select("source", "seq"), ["source", "seq"], "left_anti")
        few = rows_of(added) <= file_index.BROADCAST_IDS_MAX
        return rows.join(with_join_hint(left, few=few), ["source", "seq"], "left_anti")

    def _known_events(self, rows: DataFrame, added: list[DataFile], *, rebuild: bool) -> DataFrame:
        """The events of the table that new ones may repeat: those of the same period."""
        if rebuild or not self._tables.exists(self._name):
            return rows.limit(0)
        period = file_index.extent(added, "ts_us")
        old = self._tables.listing(self._name).overlapping("ts_us", *(period or (None, None)))
        near = [file for file in old if any(file_index.overlap(file, other, "ts_us") for other in added)]
        if not near:
            return rows.limit(0)
        known = bronze.with_all_columns(self._tables.read(self._spark, self._name, near))
        return known if period is None else known.where(F.col("ts_us").between(*period))

    # ---- fold ----------------------------------------------------------------------------------------

    def _fold(self, fold: Fold, new: NewInput, base: int, *, rebuild: bool) -> None:
        events = self._tables.read(self._spark, self._table.source, new.added)
        before = None
        if rebuild:
            touched = self._tables.files(self._name)
        else:
            ids = file_index.lookup_of(fold.keys(events), new.added, repeat=True)
            touched = file_index.files_with_ids(self._spark, self._tables, self._name, ids)
            before = self._tables.read(self._spark, self._name, touched) if touched else None
        seen = Observation() if fold.observes_renames else None
        build = self._table.build if seen is None else partial(self._table.build, seen=seen)
        rows, txns = build(events, before), [new.txn]
        if self._table.takes_names:
            txns.append(Txn(MESSAGES, self._tables.version(MESSAGES)))
            rows = self._with_names(rows, rebuild=rebuild)
        if self._tables.is_withdrawn(self._table.source, self._name):
            txns.append(Txn(ROWS_WITHDRAWN, base + 1))
        self._commit(rows, touched, new.added, txns, base, seen)

    def _with_names(self, rows: DataFrame, *, rebuild: bool) -> DataFrame:
        """The rows with the type and organization of their message, where the events lack them."""
        if self._tables.last_txn(EVENTS, UNNAMED) < 0:
            return rows
        known = -1 if rebuild else self._tables.last_txn(self._name, MESSAGES)
        files, _ = self._tables.changed(MESSAGES, known)  # every message with new events is in one of them
        return silver.named(rows, self._tables.read(self._spark, MESSAGES, files))

    # ---- tree ----------------------------------------------------------------------------------------

    def _place(self, new: NewInput, base: int, *, rebuild: bool) -> None:
        with ExitStack() as held:
            placement = SpanPlacement(self._spark, self._tables, new.added, new.removed, held)
            if rebuild or not self._tables.row_count(self._name):
                touched, rows = self._tables.files(self._name), placement.rebuilt_rows()
            else:
                touched, rows = placement.updated_rows()
            self._commit(rows, touched, new.added, [new.txn], base)

    def _commit(
        self,
        rows: DataFrame,
        removed: list[DataFile],
        new: list[DataFile],
        txns: list[Txn],
        base: int,
        seen: Observation | None = None,
    ) -> None:
        """Commit rows that replace those of some files, after `new` files were added to the input."""
        groups = self._table.file_groups
        hours = hours_of(new, "ts_us" if self._table.source == EVENTS else "last_us")
        split = None if groups is None else file_group(self._tables, groups(), hours, rows_of(new))
        staged = self._tables.stage(self._name, rows, partition_by=self._table.partition_by, split=split)
        if seen is not None and seen.get["renamed"]:
            txns = [*txns, Txn(RENAMED, base + 1)]
        self._tables.commit(self._name, staged, removed, txns=txns, base=base)
