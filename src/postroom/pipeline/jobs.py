"""The jobs of the pipeline: ingest new segments into bronze, then refresh silver and gold.

Rule 1: the version of its inputs that a table has read stands in the table's own commit, as an application
        transaction. A job that was killed at any point is run again.
Rule 2: rows are computed from one version of each table. If another writer changes rows of the table to which
        they belong meanwhile, they are computed again.
Rule 3: a run keeps nothing in memory from one table to the next, so a run can resume at any table.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql import DataFrame, SparkSession

from postroom.core.redaction import Level
from postroom.errors import TableChanged, Unavailable
from postroom.pipeline import paths
from postroom.pipeline.delta.delta_log import Txn
from postroom.pipeline.delta.log_summaries import SummarizedTables
from postroom.pipeline.delta.storage import Storage
from postroom.pipeline.delta.tables import StagedFiles, Tables, require_rows
from postroom.pipeline.follow.refresh import FORM_ID, Refresh, Table
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.ingest import bronze, rejects
from postroom.pipeline.ingest.bronze_writer import (
    WrittenSegments,
    hashes_of,
    texts_of,
    write_carried,
    write_segments,
)
from postroom.pipeline.ingest.segments import (
    BATCH_BYTES_PER_CORE,
    TABLE,
    Gap,
    PendingSegments,
    Segment,
    SegmentStream,
    batches,
    ingest_txns,
    is_last_ingested,
    named_hashes,
)
from postroom.pipeline.micro_batches import MicroBatch, MicroBatches
from postroom.pipeline.schedule import Dependencies, run_in_order
from postroom.pipeline.silver.tables import SILVER
from postroom.pipeline.spark.session import AWAITED, in_pool, is_classic

if TYPE_CHECKING:
    from postroom.pipeline.lineage import JobRun

CHECKPOINTS: Final = "_checkpoints"
SILVER_INPUTS: Final[Dependencies] = {name: table.inputs for name, table in SILVER.items()}
TRIES_MAX: Final = 5  # of a table that another writer keeps changing
TABLES_AT_ONCE: Final = 4  # one is planned, one compiled and one committed while another computes

REMOTE_CORES: Final = 8  # that a Spark Connect server is assumed to have

Place = Path | str
"""A folder: a path of this machine, or an address such as `s3a://bucket/audit`."""
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
    taken_up: int = 0
    """Lines that an earlier version has rejected, and that are events now."""


def nothing_new(tables: Tables, streams: Sequence[SegmentStream]) -> RunSummary | None:
    """The summary of a run that finds nothing to do, without Spark; None if there may be something to do."""
    tables = SummarizedTables(tables.storage)
    if rejects.are_due(tables):
        return None
    pending = [stream.pending(tables, hashes=named_hashes) for stream in streams]
    if any(each.ready or each.gaps for each in pending):
        return None
    declared = SILVER | GOLD
    inputs = {name: table.inputs for name, table in GOLD.items()}
    inputs |= {name: (table.source,) for name, table in SILVER.items()}
    versions, rows, known = {}, {}, {}
    for name in tables.names():
        versions[name], rows[name] = tables.version(name), tables.row_count(name)
        apps = (FORM_ID, *inputs.get(name, ()))
        known[name] = {app_id: tables.last_txn(name, app_id) for app_id in apps}
        tables.forget(name)  # the files of one table at a time, if a log has no summary
    for name, sources in inputs.items():
        read = known.get(name, {})
        is_form = declared[name].form in (None, read.get(FORM_ID))
        if not is_form or any(read.get(source, -1) != versions.get(source) for source in sources):
            return None
    return RunSummary(0, 0, 0, rows)


class Pipeline:
    """The jobs on one folder of tables, in one Spark session."""

    def __init__(
        self,
        spark: SparkSession,
        tables: Tables,
        *,
        gold: Mapping[str, Table] | None = None,
        level: Level = "medium",
        progress: Progress = lambda _: None,
        lineage: "JobRun | None" = None,
    ) -> None:
        """`lineage` emits a run for each table that changes; its own run is the caller's."""
        self.spark = spark
        self.tables = tables
        self.level: Level = level
        self._gold = GOLD if gold is None else gold
        self._progress = progress
        self._lineage = lineage
        self._reset()
        self._pending: dict[str, PendingSegments] = {}
        """The new segments of each stream."""
        self._last_note = ""

    def _reset(self) -> None:
        self._segments = self._lines = self._rejects = self._taken_up = 0

    # ---- the jobs ------------------------------------------------------------------------------------

    def run(self, events: Place | Sequence[Place], *, skip_missing: bool = False) -> RunSummary:
        """Ingest every new segment before the first missing one, and refresh all tables.

        `events` names the folders of one or several audit streams, as paths or as addresses. With
        `skip_missing`, missing segments are reported and never ingested, even if they arrive later.
        """
        self._reset()
        self._run(self.streams(events), skip_missing=skip_missing)
        return self._summary()

    def backfill(self, events: Place | Sequence[Place] = ()) -> RunSummary:
        """Ingest the new segments, then rebuild the silver and gold tables from all of bronze."""
        self._reset()
        streams = self.streams(events)
        if not streams:
            self.tables.require_tables()
        self._find_new_segments(streams)
        with self.tables.profile(self._new_bytes()):
            self._take_up_rejects()
            for stream in streams:
                for _ in self._ingest(stream):
                    pass
            self._refresh_tables(self._inputs(), rebuild=True)
        return self._summary()

    def retry_rejects(self) -> RunSummary:
        """Take up the rejected lines that this version can read, and refresh all tables."""
        self._reset()
        self.tables.require_tables()
        with self.tables.profile(0):
            self._take_up_rejects(is_asked=True)
            self._refresh_tables(self._inputs())
        return self._summary()

    def streams(self, events: Place | Sequence[Place]) -> list[SegmentStream]:
        """The streams at some places, which are reached as the tables are."""
        places = [events] if isinstance(events, str | Path) else events
        return [SegmentStream(Storage(place, self.tables.storage.access)) for place in places]

    def stream(
        self,
        events: Place | Sequence[Place],
        *,
        every_s: float | None = None,
        skip_missing: bool = False,
    ) -> RunSummary:
        """Follow streams: ingest the present segments, and with `every_s` continue until stopped.

        Structured Streaming delivers the events of new segments in micro-batches; see `micro_batches`. Behind
        Spark Connect it would call this code in the server's process, so there a loop looks for segments.
        """
        self._reset()
        streams = self.streams(events)

        def catch_up() -> None:
            self._run(streams, skip_missing=skip_missing)

        if not is_classic(self.spark):
            self._repeat(catch_up, every_s)
            return self._summary()
        MicroBatches(
            self.spark,
            [(stream, stream.last_ingested(self.tables)) for stream in streams],
            self._checkpoint(streams),
            bytes_max=BATCH_BYTES_PER_CORE * self._cores(),
            ingest=lambda batch: self._ingest_carried(streams, batch, skip_missing=skip_missing),
            catch_up=catch_up,
            is_behind=lambda: any(self._pending_of(stream).ready for stream in streams),
            progress=self._progress,
        ).follow(every_s)
        return self._summary()

    def _repeat(self, step: Callable[[], None], every_s: float | None) -> None:
        """Do a step, and with `every_s` again and again, also after a failure that may pass."""
        while True:
            try:
                step()
            except Unavailable as error:
                if every_s is None:
                    raise
                self._progress(f"{error}; the next batch tries again")
            if every_s is None:
                return
            time.sleep(every_s)

    def _checkpoint(self, streams: Sequence[SegmentStream]) -> str:
        name = "+".join(stream.storage.place.strip("/").replace("/", "-") for stream in streams)
        return self.tables.storage.spark_path(f"{CHECKPOINTS}/lines-{name.replace(':', '')}")

    def _run(self, streams: Sequence[SegmentStream], *, skip_missing: bool) -> None:
        self._find_new_segments(streams, skip_missing=skip_missing)
        with self.tables.profile(self._new_bytes()):
            self._take_up_rejects()
            for stream in streams:
                for batch in self._ingest(stream):
                    if batch[-1] is not self._pending[str(stream)].ready[-1]:
                        self._refresh_tables(SILVER_INPUTS)
            self._refresh_tables(self._inputs())  # the last batch, and tables that a killed run left behind

    def _summary(self) -> RunSummary:
        pending = self._pending.values()
        return RunSummary(
            self._segments,
            self._lines,
            self._rejects,
            {name: self.tables.row_count(name) for name in self.tables.names()},
            sum(len(each.waiting) for each in pending),
            [gap for each in pending for gap in each.gaps],
            self._last_note,
            self._taken_up,
        )

    # ---- bronze --------------------------------------------------------------------------------------

    def _find_new_segments(self, streams: Sequence[SegmentStream], *, skip_missing: bool = False) -> None:
        """Find the segments that can be ingested now."""
        self._pending = {
            str(stream): self._pending_of(stream, skip_missing=skip_missing) for stream in streams
        }
        notes = {place: note for place, each in self._pending.items() if (note := each.sentence())}
        many = len(streams) > 1
        note = "; ".join(f"{place}: {note}" if many else note for place, note in notes.items())
        if note not in ("", self._last_note):
            self._progress(note)
        self._last_note = note

    def _pending_of(self, stream: SegmentStream, *, skip_missing: bool = False) -> PendingSegments:
        """The new segments of a stream. Executors hash those that no chain lists, unless they are small."""

        def hashes(segments: Sequence[Segment]) -> dict[str, str]:
            if sum(segment.size for segment in segments) <= paths.SMALL_BYTES:
                return stream.hashes(segments)
            return hashes_of(self.spark, stream, segments)

        return stream.pending(self.tables, skip_missing=skip_missing, hashes=hashes)

    def _new_bytes(self) -> int:
        return sum(each.bytes for each in self._pending.values())

    def _take_up_rejects(self, *, is_asked: bool = False) -> None:
        """Take up lines that an earlier version has rejected, or if it `is_asked` for, all readable ones."""
        if not (is_asked or rejects.are_due(self.tables)):
            return
        with self._emitting(TABLE, (rejects.TABLE,)), self._emitting(rejects.TABLE, (rejects.TABLE,)):
            for left in reversed(range(TRIES_MAX)):
                try:
                    self._taken_up += rejects.take_up(self.spark, self.tables)
                except TableChanged:
                    if not left:
                        raise
                else:
                    break
        self._progress(f"{rejects.TABLE}: {self._taken_up:,} lines can be read now")

    def _ingest(self, stream: SegmentStream) -> Iterator[list[Segment]]:
        """Ingest the new segments of a stream in batches, each in one commit."""
        pending = self._pending[str(stream)]
        last = self.tables.last_txn(TABLE, stream.ingest_id)
        for batch in batches(pending.ready, BATCH_BYTES_PER_CORE * self._cores()):
            numbers = f"segment {batch[0].number}" + (f" to {batch[-1].number}" if len(batch) > 1 else "")
            self._progress(f"bronze: {numbers}, {sum(segment.size for segment in batch) / 1e6:,.0f} MB")
            with self._emitting_bronze(stream):
                is_mine = self._ingest_batch(stream, batch, last)
            if not is_mine:
                return
            last = batch[-1].number
            yield batch

    def _ingest_carried(
        self, streams: Sequence[SegmentStream], batch: MicroBatch, *, skip_missing: bool
    ) -> None:
        """Commit the events of a micro-batch, unless an earlier process has, and refresh all tables."""
        self._find_new_segments(streams, skip_missing=skip_missing)
        with self.tables.profile(self._new_bytes()):
            for stream in streams:
                ready, txn = self._pending[str(stream)].ready, batch.txn(stream)
                if ready and self.tables.last_txn(TABLE, txn.app_id) < txn.version:
                    self._progress(f"bronze: micro-batch {txn.version} of {stream}")
                    last = self.tables.last_txn(TABLE, stream.ingest_id)
                    with self._emitting_bronze(stream):
                        self._ingest_batch(stream, ready, last, batch.events(stream), [txn])
            self._refresh_tables(self._inputs())

    def _cores(self) -> int:
        """The tasks that run at once. A Spark Connect client does not know how many, and assumes few."""
        return int(self.spark.sparkContext.defaultParallelism) if is_classic(self.spark) else REMOTE_CORES

    def _ingest_batch(
        self,
        stream: SegmentStream,
        batch: list[Segment],
        last: int,
        carried: DataFrame | None = None,
        txns: Iterable[Txn] = (),
    ) -> bool:
        """Commit a batch that follows number `last`; false if another writer has ingested segments.

        With the events that a micro-batch has `carried`, only its segments are committed. `txns` are
        recorded by the same commit.

        The rejects are committed first: an interrupted job reads the segments again, and skips known rejects.
        """
        app_id, tables = stream.ingest_id, self.tables.pinned()
        base = tables.version(TABLE)
        if tables.last_txn(TABLE, app_id) != last:
            return self._left_to_another(stream)
        if carried is None:
            written = write_segments(self.spark, tables, stream, batch)
        else:
            written = write_carried(self.spark, tables, stream, batch, carried)
        batch = written.segments
        if not batch:
            return False
        try:
            self._write_rejects(tables, stream, written)
            progress = [*ingest_txns(app_id, batch[-1]), *txns]
            tables.commit(TABLE, written.staged, txns=progress, base=base)
        except TableChanged:
            tables.discard(TABLE, written.staged.adds)
            if self.tables.last_txn(TABLE, app_id) == last:
                raise
            return self._left_to_another(stream)
        self._segments += len(batch)
        self._lines += written.lines
        self._rejects += written.rejects
        return True

    def _left_to_another(self, stream: SegmentStream) -> bool:
        self._progress(f"another job ingests the segments of {stream}, which are left to it")
        return False

    def _write_rejects(self, tables: Tables, stream: SegmentStream, written: WrittenSegments) -> None:
        """Append the bad lines of a batch. The table is created even without any."""
        name, app_id = rejects.TABLE, stream.ingest_id
        base = tables.version(name)
        batch = written.segments
        known = [segment.number for segment in batch if is_last_ingested(tables, name, app_id, segment)]
        bad = [seg for seg in batch if bronze.may_have_rejects(seg.file_name, written.bad_segments)]
        new = [segment for segment in bad if segment.number > max(known, default=-1)]
        if new:
            rows = bronze.rejects(texts_of(self.spark, stream, new), written.is_plain)
            staged = tables.stage(name, rows, partition_by=bronze.PARTITIONS)
            if not known:
                require_rows(name, staged, written.rejects)
            txns = [*ingest_txns(app_id, new[-1]), *([rejects.reader()] if base < 0 else [])]
            tables.commit(name, staged, txns=txns, base=base)
        elif base < 0:
            with suppress(TableChanged):  # another job has created it
                empty = StagedFiles(bronze.REJECTS, bronze.PARTITIONS, [])
                tables.commit(name, empty, txns=[rejects.reader()], base=base)

    # ---- lineage -------------------------------------------------------------------------------------

    def _emitting(
        self, name: str, sources: Iterable[str], streams: Iterable[Storage] = ()
    ) -> AbstractContextManager[None]:
        """The block changes a table: emit its run, if the job has one."""
        if self._lineage is None:
            return nullcontext()
        return self._lineage.table(self.tables, name, sources, streams)

    @contextmanager
    def _emitting_bronze(self, stream: SegmentStream) -> Iterator[None]:
        read = [stream.storage]
        with self._emitting(TABLE, (), read), self._emitting(rejects.TABLE, (), read):
            yield

    # ---- silver and gold -----------------------------------------------------------------------------

    def _refresh_tables(self, tables: Dependencies, *, rebuild: bool = False) -> None:
        """Refresh tables after their inputs. Inputs of other tables have priority in Spark's scheduler."""
        awaited = {source for sources in tables.values() for source in sources}

        def refresh_one(name: str) -> None:
            in_pool(self.spark, AWAITED if name in awaited else None)
            with self._emitting(name, self._inputs()[name]):
                self._refresh_with_retries(name, rebuild=rebuild)

        run_in_order(tables, refresh_one, TABLES_AT_ONCE)

    def _refresh_with_retries(self, name: str, *, rebuild: bool) -> None:
        """Refresh one table, again from its start when another writer has changed it meanwhile."""
        for _ in range(TRIES_MAX - 1):
            try:
                self._refresh_table(self.tables.pinned(), name, rebuild=rebuild)
            except TableChanged as error:
                self._progress(f"{error}; computing it again")
            else:
                return
        self._refresh_table(self.tables.pinned(), name, rebuild=rebuild)

    def _refresh_table(self, tables: Tables, name: str, *, rebuild: bool) -> None:
        table = SILVER.get(name) or self._gold[name]
        Refresh(self.spark, tables, name, table, level=self.level, progress=self._progress).run(
            rebuild=rebuild
        )

    def _inputs(self) -> Dependencies:
        return {**SILVER_INPUTS, **{name: table.inputs for name, table in self._gold.items()}}
