"""Brings one table up to date with its inputs, in one commit. Silver and gold do it in the same way.

Rule 1: the files that were added to the first input, and those that were removed, say which keys have
        changed. The way that a table declares computes the new rows of these keys, and names the files that
        they replace. All other files stay. All ways give the rows of a rebuild.
Rule 2: the versions of the inputs that a table has read stand in the table's own commit, as application
        transactions.
Rule 3: a table is rebuilt if it has read nothing yet, if its form is another one, if rows of an input were
        withdrawn, or if a known message got another type or organization and the table groups by them.
Rule 4: gold keeps rows whose events `retain` has deleted from silver. Days up to the newest deleted event are
        closed: they are not rebuilt, because silver is incomplete there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import cached_property
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.core.redaction import Level
from postroom.pipeline.delta.delta_log import RENAMED, ROWS_WITHDRAWN, UNNAMED, DataFile, Txn, rows_of
from postroom.pipeline.delta.file_groups import FileGroups, file_group, hours_of
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.follow import deleted_numbers
from postroom.pipeline.follow.columns import hour_us, named
from postroom.pipeline.ingest.bronze import with_all_columns
from postroom.pipeline.times import HOUR_US, MICROS_PER_S

NAMES_BROADCAST_MAX: Final = 500_000  # messages whose names are broadcast; more of them are shuffled
EVENTS: Final = "silver_events"
MESSAGES: Final = "silver_messages"
FORM_ID: Final = "form"  # the application id under which a table remembers its form
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


class Replacement(NamedTuple):
    """New rows, and the files that they replace."""

    rows: DataFrame
    files: list[DataFile]


class Way(ABC):
    """How a table follows a change of its first input."""

    @abstractmethod
    def follow(self, refresh: "Refresh") -> Replacement | None:
        """The rows of the keys that have changed; None when no row has."""

    def rebuild(self, refresh: "Refresh") -> Replacement:
        """All rows."""
        return refresh.built()


class Table(NamedTuple):
    """A table that is computed from others."""

    build: Callable[..., DataFrame]
    """Pure. It gets one DataFrame for each input, in that order."""
    inputs: tuple[str, ...]
    """A second input can only be `silver_messages`: it supplies the type and organization of a message."""
    partition_by: tuple[str, ...] = ()
    change: Way | None = None
    """Only for tables that are partitioned by the day of their input. None: the table is rebuilt."""
    by_hour: str = ""
    """A column of time: rows of an hour share files. Empty: the rows of a day do, or see `file_groups`."""
    file_groups: Callable[[], FileGroups] | None = None
    grain: str = ""
    """What a row stands for, on the page of the contract."""
    form: int | None = None
    """The version of its columns, partitions and meaning. A table of another form is rebuilt."""
    outlives_events: bool = True
    """Whether rows stay when `retain` deletes their events: aggregates do."""

    @property
    def source(self) -> str:
        return self.inputs[0]

    @property
    def groups(self) -> FileGroups | None:
        """Which rows share files; None when those of a day do."""
        if self.by_hour:
            return FileGroups(hour_us(F.col(self.by_hour)) + (HOUR_US - 1), self.by_hour, by_hour_only=True)
        return None if self.file_groups is None else self.file_groups()

    @property
    def takes_names(self) -> bool:
        return self.inputs[1:] == (MESSAGES,)


class Refresh:
    """One update of one table. Ways read what they need from it, and note what the commit has to record."""

    def __init__(
        self,
        spark: SparkSession,
        tables: Tables,
        name: str,
        table: Table,
        *,
        level: Level = "medium",
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.spark = spark
        self.tables = tables
        self.name = name
        self.table = table
        self.level: Level = level
        self.progress = progress
        self.held = ExitStack()
        """Closed after the commit; it releases cached rows."""
        self.change = InputChange(table.source, [], [])
        self.hours: Collection[int] | None = None
        """The hours that the update has changed; None when they are not known, or all."""
        self.rows = 0
        """About the number of its rows; 0 when they are few."""
        self.seen: Observation | None = None
        """Counts rows for which the commit records its version, under the name of the count."""
        self.withdraws = not table.outlives_events and tables.is_withdrawn(table.source, name)
        """Whether rows of earlier versions were wrong, so that downstream tables are rebuilt."""
        self._messages: list[DataFile] = []
        """The files of messages whose events lack names."""

    def run(self, *, rebuild: bool) -> None:
        """Update the table, or with `rebuild` compute all of its rows again."""
        tables, name, table = self.tables, self.name, self.table
        base = tables.version(name)
        is_other_form = base >= 0 and table.form is not None and tables.last_txn(name, FORM_ID) != table.form
        is_withdrawn = any(tables.is_withdrawn(source, name) for source in table.inputs)
        is_new = rebuild or is_other_form or is_withdrawn
        until = {source: tables.version(source) for source in table.inputs}
        known = {source: -1 if is_new else tables.last_txn(name, source) for source in table.inputs}
        # Silver has nothing to do for the names of messages without new events.
        followed = table.inputs if table.outlives_events else table.inputs[:1]
        if all(until[source] == known[source] for source in followed) or -1 in until.values():
            return
        if is_other_form:
            self.progress(f"{name} is of another version, and is rebuilt")
        txns = [Txn(source, version) for source, version in until.items()]
        txns += [] if table.form is None else [Txn(FORM_ID, table.form)]
        with self.held:
            # An input that was dropped and rebuilt has a lower version.
            if -1 in known.values() or any(known[source] > until[source] for source in known):
                replacement: Replacement | None = self.rebuild(whole=is_other_form)
            else:
                replacement = self.update(known, until)
            if replacement is None:
                tables.mark(name, txns, base=base)
            else:
                self._commit(replacement, txns, base, is_overwrite=is_other_form)

    def _commit(self, replacement: Replacement, txns: list[Txn], base: int, *, is_overwrite: bool) -> None:
        groups = self.table.groups
        staged = self.tables.stage(
            self.name,
            replacement.rows,
            partition_by=self.table.partition_by,
            split=None if groups is None else file_group(self.tables, groups, self.hours, self.rows),
        )
        marks = [] if self.seen is None else [mark for mark, n in self.seen.get.items() if n]
        marks += [ROWS_WITHDRAWN] if self.withdraws else []
        self.tables.commit(
            self.name,
            staged,
            () if is_overwrite else replacement.files,
            txns=[*txns, *(Txn(mark, base + 1) for mark in marks)],
            base=base,
            mode="overwrite" if is_overwrite else "append",
        )

    def rebuild(self, *, whole: bool = False) -> Replacement:
        """All rows, except those of closed days that the table already has, unless `whole`."""
        self.change = InputChange(self.table.source, self.tables.files(self.table.source), [])
        self._announce()
        way = self.table.change
        rows, replaced = self.built() if way is None else way.rebuild(self)
        if whole or not self.closed_day or not replaced:
            return Replacement(rows, replaced)
        open_files = [file for file in replaced if (file.partition["day"] or "") > self.closed_day]
        return Replacement(rows.where(F.col("day") > self.closed_day), open_files)

    def update(self, known: Versions, until: Versions) -> Replacement | None:
        """The update from one version of the inputs to another; None when no row has changed."""
        changes = [
            InputChange(source, *self.tables.changed(source, known[source], until[source]))
            for source in self.table.inputs
        ]
        if not any(change.added or change.removed for change in changes):
            return None
        are_names_old = self.table.takes_names and self.tables.last_txn(MESSAGES, RENAMED) > known[MESSAGES]
        if self.table.change is None or are_names_old:
            return self.rebuild()
        self.change = changes[0]
        if self._has_unnamed_since(known[self.table.source]):
            self._messages = self.tables.files(MESSAGES) if changes[0].removed else changes[1].added
        if not (self.change.added or self.change.removed):
            return None
        self._announce()
        return self.table.change.follow(self)

    def _announce(self) -> None:
        self.progress(f"{self.name}: {rows_of(self.change.added):,} rows of {self.change.source}")

    # ---- what ways use ---------------------------------------------------------------------------------

    @cached_property
    def closed_day(self) -> str:
        """The last day of which `retain` may have deleted events; empty when there is none."""
        table = self.table
        if not (table.outlives_events and "day" in table.partition_by and table.source.startswith("silver_")):
            return ""
        newest_us = deleted_numbers.newest_us(self.tables)
        return "" if newest_us < 0 else day_at(newest_us)

    def built(self) -> Replacement:
        """All rows, from all of the inputs."""
        are_named = self.table.takes_names and not self._has_unnamed_since(-1)
        sources = self.table.inputs[:1] if are_named else self.table.inputs
        self.expect(self.change.added)
        rows = self.table.build(*[self.read(source, self.tables.files(source)) for source in sources])
        return Replacement(rows, self.tables.files(self.name))

    def built_days(self) -> Replacement:
        """The rows of the days that changed, from all of their input rows."""
        days = {day for day in self.change.days if (day or "") > self.closed_day}
        source = self.change.source
        rows = self.named(self.read(source, self.in_days(source, days)))
        return Replacement(self.table.build(rows), self.in_days(self.name, days))

    def read(self, name: str, files: list[DataFile]) -> DataFrame:
        rows = self.tables.read(self.spark, name, files)
        return with_all_columns(rows) if name == EVENTS else rows

    def in_days(self, name: str, days: set[str | None]) -> list[DataFile]:
        return self.tables.listing(name).in_partitions("day", days)

    def named(self, rows: DataFrame) -> DataFrame:
        """Rows with the type and organization of their message."""
        if not self._messages:
            return rows
        messages = self.read(MESSAGES, self._messages)
        return named(rows, messages, few=rows_of(self._messages) <= NAMES_BROADCAST_MAX)

    def kept(self, rows: DataFrame) -> DataFrame:
        """Rows that stay cached until the commit."""
        rows = rows.persist()
        self.held.callback(rows.unpersist)
        return rows

    def has_removed_files(self) -> bool:
        """Whether the removed files still exist, so that their rows can be read."""
        return all(self.tables.file_exists(self.change.source, file) for file in self.change.removed)

    def expect(self, files: list[DataFile]) -> None:
        """Expect a row of silver for each row of these files, with the hours of their times."""
        if not self.table.outlives_events:
            self.hours = hours_of(files, "ts_us" if self.change.source == EVENTS else "last_us")
            self.rows = rows_of(files)

    def _has_unnamed_since(self, version: int) -> bool:
        """Whether events without the type or organization of their message were added after a version."""
        return self.table.takes_names and self.tables.last_txn(EVENTS, UNNAMED) > version


def day_at(moment_us: int) -> str:
    return f"{datetime.fromtimestamp(moment_us // MICROS_PER_S, UTC):%Y-%m-%d}"
