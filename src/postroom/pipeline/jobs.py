"""The jobs of the pipeline: ingest new segments into bronze, then refresh silver and gold.

Rule 1: the version of its inputs that a table has read stands in the table's own commit, as an application
        transaction. A job that was killed at any point is run again.
Rule 2: rows are computed from one version of their table. If another writer commits to that table meanwhile,
        they are computed again.
Rule 3: a run keeps nothing in memory from one table to the next, so a run can resume at any table.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from math import ceil
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.core.redaction import Level
from postroom.errors import TableChanged, Unavailable
from postroom.pipeline import queries
from postroom.pipeline.file_groups import FILE_GROUP, file_group
from postroom.pipeline.gold.declaration import GoldTable
from postroom.pipeline.gold.refresh import GoldRefresh, Replacement
from postroom.pipeline.gold.tables import FORM, FORM_ID, GOLD
from postroom.pipeline.ingest import bronze
from postroom.pipeline.ingest.bronze_writer import write_segments
from postroom.pipeline.ingest.segments import (
    Gap,
    PendingSegments,
    Segment,
    batches,
    ingest_id,
    ingest_txns,
    is_last_ingested,
    last_ingested,
    pending_segments,
)
from postroom.pipeline.paths import local_path
from postroom.pipeline.schedule import Dependencies, run_in_order
from postroom.pipeline.session import AWAITED, in_pool
from postroom.pipeline.silver.declaration import SilverTable
from postroom.pipeline.silver.refresh import SilverRefresh
from postroom.pipeline.silver.tables import SILVER
from postroom.pipeline.tables import Staged, Tables, Txn, rows_of

REJECTS: Final = "bronze_rejects"
CHECKPOINTS: Final = "_checkpoints"
SILVER_INPUTS: Final[Dependencies] = {name: table.inputs for name, table in SILVER.items()}
TRIES_MAX: Final = 5  # of a table that another writer keeps changing
TABLES_AT_ONCE: Final = 4  # one is planned, one compiled and one committed while another computes

Progress = Callable[[str], None]
"""Called with a short text about the current step."""


class RunSummary(msgspec.Struct, frozen=True):
    """The result of a run."""

    segments: int
    lines: int
    rejects: int
    rows: dict[str, int]
    """The number of rows of every table."""
    waiting: int = 0
    """Segments that are held back because an earlier one is missing."""
    missing: list[Gap] = []
    note: str = ""
    """The missing segments as a sentence."""


class Pipeline:
    """The jobs on one folder of tables, in one Spark session."""

    def __init__(
        self,
        spark: SparkSession,
        tables: Tables,
        *,
        gold: Mapping[str, GoldTable] | None = None,
        level: Level = "medium",
        progress: Progress = lambda _: None,
    ) -> None:
        self.spark = spark
        self.tables = tables
        self.level: Level = level
        self._gold = GOLD if gold is None else gold
        self._progress = progress
        self._lines = 0
        self._rejects = 0
        self._pending = PendingSegments([], [], [])
        self._last_note = ""

    # ---- the jobs ------------------------------------------------------------------------------------

    def run(self, events: Path | str, *, skip_missing: bool = False) -> RunSummary:
        """Ingest every new segment before the first missing one, and refresh all tables.

        `events` is the folder of the audit stream, as a path or as a `file:` URI. With `skip_missing`,
        missing segments are reported and never ingested, even if they arrive later.
        """
        self._lines = self._rejects = 0
        return self._summary(self._run(local_path(events), skip_missing=skip_missing))

    def backfill(self, events: Path | None = None) -> RunSummary:
        """Ingest the new segments, then rebuild the silver and gold tables from all of bronze."""
        if events is None:
            self.tables.require_tables()
        with self.tables.lock(), self.tables.profile(events):
            new = [] if events is None else self._find_new_segments(events)
            ingested = 0 if events is None else sum(map(len, self._ingest(events, new)))
            self._refresh_tables(self._inputs(), rebuild=True)
        return self._summary(ingested)

    def stream(self, events: Path, *, every_s: float | None = None, skip_missing: bool = False) -> None:
        """Let Spark's file source watch for segments: once, or every `every_s` seconds.

        The source only triggers a run. Which segments are ingested depends on the table, so `run` and
        `stream` can alternate. The source reports a file once, so segments that were incomplete at that time,
        or that another writer kept us from ingesting, are looked for between the batches.
        """
        failures: list[Exception] = []
        one_at_a_time = Lock()
        is_behind = True  # an earlier process may have been killed half way

        def run_once() -> None:
            nonlocal is_behind
            try:
                with one_at_a_time:
                    is_behind = True
                    self._run(events, skip_missing=skip_missing)
                    is_behind = False
            except Unavailable as error:
                if every_s is None:
                    raise
                self._progress(f"{error}; the next batch tries again")

        def arrived(_: DataFrame, __: int) -> None:
            # The arrived files are ignored: some may have to wait, and older ones may have waited for them.
            try:
                run_once()
            except Exception as error:
                failures.append(error)
                raise

        watched = bronze.arrivals(self.spark, str(events.absolute()))
        query = watched.writeStream.foreachBatch(arrived)
        query = query.option("checkpointLocation", str(self._checkpoint(events)))
        if every_s is None:
            query = query.trigger(availableNow=True)
        else:
            query = query.trigger(processingTime=f"{every_s} seconds")
        try:
            started = query.start()
            while every_s is not None and not started.awaitTermination(ceil(every_s)):
                if is_behind or pending_segments(events, last_ingested(self.tables, events)).ready:
                    run_once()
            started.awaitTermination()
        except StreamingQueryException as wrapped:
            # Spark wraps our exception, and has its trace as text.
            raise (failures or [wrapped])[0] from None
        run_once()

    def answers(self, query: str) -> Iterator[str]:
        """The rows of an SQL query over the tables, each as JSON. `queries` says what a query may contain."""
        self.tables.require_tables()
        session = queries.read_only(self.spark)
        checked = queries.checked(session, query, self.tables.names())
        for name in sorted(checked.tables):
            self.tables.read(session, name).createOrReplaceTempView(name)
        found = queries.execute(session, checked)
        rows = found.select(F.to_json(F.struct("*"), {"ignoreNullFields": "false"}))
        for row in rows.toLocalIterator():
            yield row[0]

    def _checkpoint(self, events: Path) -> Path:
        return self.tables.folder / CHECKPOINTS / events.absolute().as_posix().strip("/").replace("/", "-")

    def _run(self, events: Path, *, skip_missing: bool) -> int:
        with self.tables.lock(), self.tables.profile(events):
            new = self._find_new_segments(events, skip_missing=skip_missing)
            for batch in self._ingest(events, new):
                if batch[-1] is not new[-1]:
                    self._refresh_tables(SILVER_INPUTS)
            self._refresh_tables(self._inputs())  # the last batch, and tables that a killed run left behind
        return len(new)

    def _summary(self, ingested: int) -> RunSummary:
        rows = {name: rows_of(self.tables.files(name)) for name in self.tables.names()}
        pending = self._pending
        return RunSummary(
            ingested,
            self._lines,
            self._rejects,
            rows,
            len(pending.waiting),
            pending.gaps,
            pending.sentence(),
        )

    # ---- bronze --------------------------------------------------------------------------------------

    def _find_new_segments(self, events: Path, *, skip_missing: bool = False) -> list[Segment]:
        """The segments that can be ingested now."""
        self._pending = pending_segments(
            events, last_ingested(self.tables, events), skip_missing=skip_missing
        )
        if self._pending.sentence() not in ("", self._last_note):
            self._progress(self._pending.sentence())
        self._last_note = self._pending.sentence()
        return self._pending.ready

    def _ingest(self, events: Path, segments: list[Segment]) -> Iterator[list[Segment]]:
        """Ingest segments in batches, each in one commit."""
        folder = str(events.absolute())
        app_id = ingest_id(events)
        for batch in batches(segments):
            numbers = f"segment {batch[0].number}" + (f" to {batch[-1].number}" if len(batch) > 1 else "")
            self._progress(f"bronze: {numbers}, {sum(segment.size for segment in batch) / 1e6:,.0f} MB")
            self._ingest_batch(folder, batch, app_id)
            yield batch

    def _ingest_batch(self, folder: str, batch: list[Segment], app_id: str) -> None:
        """Commit the rejects first: an interrupted job reads the segments again, and skips known rejects."""
        written = write_segments(self.spark, self.tables, folder, batch)
        self._write_rejects(folder, batch, written.bad_segments, app_id)
        self.tables.commit("bronze_events", written.staged, txns=ingest_txns(app_id, batch[-1]))
        self._lines += written.lines
        self._rejects += written.lines - written.staged.rows

    def _write_rejects(
        self, folder: str, batch: list[Segment], bad_segments: int | None, app_id: str
    ) -> None:
        """Append the bad lines of a batch. The table is created even without any."""
        known = [
            segment.number for segment in batch if is_last_ingested(self.tables, REJECTS, app_id, segment)
        ]
        bad = [segment for segment in batch if bronze.may_have_rejects(segment.path.name, bad_segments)]
        new = [segment for segment in bad if segment.number > max(known, default=-1)]
        if new:
            texts = bronze.texts(self.spark, folder, [str(segment.path) for segment in new])
            rows = bronze.rejects(texts)
            self.tables.append(
                REJECTS, rows, partition_by=bronze.PARTITIONS, txns=ingest_txns(app_id, new[-1])
            )
        elif not self.tables.exists(REJECTS):
            self.tables.commit(REJECTS, Staged(bronze.REJECTS, bronze.PARTITIONS, []))

    # ---- silver and gold -----------------------------------------------------------------------------

    def _refresh_tables(self, tables: Dependencies, *, rebuild: bool = False) -> None:
        """Refresh tables after their inputs. Inputs of other tables have priority in Spark's scheduler."""
        awaited = {source for sources in tables.values() for source in sources}

        def refresh_one(name: str) -> None:
            in_pool(self.spark, AWAITED if name in awaited else None)
            self._refresh_with_retries(name, rebuild=rebuild)

        run_in_order(tables, refresh_one, TABLES_AT_ONCE)

    def _refresh_with_retries(self, name: str, *, rebuild: bool) -> None:
        """Refresh one table, again from its start when another writer has changed it meanwhile."""
        for _ in range(TRIES_MAX - 1):
            try:
                self._refresh_table(name, rebuild=rebuild)
            except TableChanged as error:
                self._progress(f"{error}; computing it again")
            else:
                return
        self._refresh_table(name, rebuild=rebuild)

    def _refresh_table(self, name: str, *, rebuild: bool) -> None:
        inputs = self._inputs()[name]
        sources = inputs[:1] if name in SILVER else inputs
        rebuild = rebuild or any(self.tables.is_withdrawn(source, name) for source in sources)
        if name in SILVER:
            self._refresh_silver(name, SILVER[name], rebuild=rebuild)
        else:
            self._refresh_gold(name, self._gold[name], rebuild=rebuild)

    def _refresh_silver(self, name: str, table: SilverTable, *, rebuild: bool) -> None:
        refresh = SilverRefresh(
            self.spark, self.tables, name, table, level=self.level, progress=self._progress
        )
        refresh.run(rebuild=rebuild)

    # ---- gold ----------------------------------------------------------------------------------------

    def _inputs(self) -> Dependencies:
        return {**SILVER_INPUTS, **{name: table.inputs for name, table in self._gold.items()}}

    def _refresh_gold(self, name: str, table: GoldTable, *, rebuild: bool) -> None:
        self._drop_other_version(name)
        base = self.tables.version(name)
        versions = {source: self.tables.version(source) for source in table.inputs}
        known = {source: -1 if rebuild else self.tables.last_txn(name, source) for source in table.inputs}
        if versions == known or -1 in versions.values():
            return
        self._progress(name)
        txns = [*(Txn(source, version) for source, version in versions.items()), Txn(FORM_ID, FORM)]
        refresh = GoldRefresh(self.spark, self.tables, name, table)
        with ExitStack() as held:
            # An input that was dropped and rebuilt has a lower version.
            is_older = any(known[source] > versions[source] for source in table.inputs)
            if is_older or -1 in known.values():
                replacement: Replacement | None = refresh.rebuild()
            else:
                replacement = refresh.update(known, versions, held)
            if replacement is None:
                self.tables.mark(name, txns)
            else:
                self._replace(name, table, replacement, txns, base)

    def _drop_other_version(self, name: str) -> None:
        if self.tables.exists(name) and self.tables.last_txn(name, FORM_ID) != FORM:
            self._progress(f"{name} is of another version, and is rebuilt")
            self.tables.drop(name)

    def _replace(
        self, name: str, table: GoldTable, replacement: Replacement, txns: list[Txn], base: int
    ) -> None:
        rows, replaced = replacement
        split = None
        if table.file_groups is not None:
            rows = rows.withColumn(FILE_GROUP, file_group(self.tables, table.file_groups()))
            split = FILE_GROUP
        self.tables.swap(
            name, rows, replaced, partition_by=table.partition_by, split_by=split, txns=txns, base=base
        )
