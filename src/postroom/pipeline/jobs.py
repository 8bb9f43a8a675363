"""From segments to tables: take what is new, fold what changed, derive what depends on it.

Rule 1: how far a table has come with its source stands in the table's own commit, as an application
        transaction. A job that was killed anywhere is simply run again.
Rule 2: a fold reads the events that are new and the rows of the messages that they are about. Rows that did
        not change stay in their files.
Rule 3: a step is computed from one version of its table, and is done again if another writer has committed
        to that table meanwhile.
Rule 4: nothing of a run is kept in memory between two tables, so every step can be the first one.
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
from postroom.pipeline.gold.refresh import Derived, Deriving
from postroom.pipeline.gold.tables import FORM, FORM_ID, GOLD
from postroom.pipeline.ingest import bronze
from postroom.pipeline.ingest.bronze_writer import take
from postroom.pipeline.ingest.segments import (
    Gap,
    Segment,
    Turn,
    batches,
    ingest_id,
    is_noted,
    last_taken,
    notes,
    turn_of,
)
from postroom.pipeline.schedule import Needs, in_turn
from postroom.pipeline.session import AWAITED, in_pool
from postroom.pipeline.silver.declaration import SilverTable
from postroom.pipeline.silver.refresh import SilverRefresh
from postroom.pipeline.silver.tables import SILVER
from postroom.pipeline.tables import Staged, Tables, Txn, rows_of

REJECTS: Final = "bronze_rejects"
CHECKPOINTS: Final = "_checkpoints"
SILVER_INPUTS: Final[Needs] = {name: table.inputs for name, table in SILVER.items()}
TRIES_MAX: Final = 5  # of a step whose table another writer keeps changing
TABLES_AT_ONCE: Final = 4  # one is planned, one compiled, one committed while another one computes

Progress = Callable[[str], None]
"""Told in a few words what is done at present."""


class Summary(msgspec.Struct, frozen=True):
    """What a run did."""

    segments: int
    lines: int
    rejects: int
    rows: dict[str, int]
    """Of every table, now."""
    waiting: int = 0
    """Segments that wait for one that is missing."""
    missing: list[Gap] = []
    """Numbers of segments that are not there while later ones are."""
    note: str = ""
    """What is missing, in a sentence."""


class Pipeline:
    """One folder of tables, the session that works on it, and who is told about it."""

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
        self._tell = progress
        self._lines = 0
        self._rejects = 0
        self._turn = Turn([], [], [])
        self._said = ""

    # ---- the jobs ------------------------------------------------------------------------------------

    def run(self, events: Path, *, skip_missing: bool = False) -> Summary:
        """Take every new segment up to the first that is missing, and bring all tables up to it.

        With `skip_missing` those that are missing are given up: they are named, and never taken.
        """
        self._lines = self._rejects = 0
        return self._summary(self._run(events, skip_missing=skip_missing))

    def backfill(self, events: Path | None = None) -> Summary:
        """Make the silver and gold tables anew from all of bronze, after the segments that are new."""
        if events is None:
            self.tables.need_some()
        with self.tables.lock():
            taken = 0 if events is None else sum(map(len, self._ingest(events, self._look(events))))
            self._bring_up(self._inputs(), anew=True)
        return self._summary(taken)

    def stream(self, events: Path, *, every_s: float | None = None, skip_missing: bool = False) -> None:
        """Let Spark watch for segments: once for all that there are, or again and again.

        The file source notices them and its checkpoint remembers it. What is taken is decided by the table
        itself, so `run` and `stream` can take turns. The source notices a file once, so what was cut short
        then, or could not be taken because somebody else was at work, is looked for between the batches.
        """
        failures: list[Exception] = []
        one_at_a_time = Lock()
        is_behind = True  # whoever did this before may have been killed half way

        def take() -> None:
            nonlocal is_behind
            try:
                with one_at_a_time:
                    is_behind = True
                    self._run(events, skip_missing=skip_missing)
                    is_behind = False
            except Unavailable as error:
                if every_s is None:
                    raise
                self._tell(f"{error}; the next batch tries again")

        def arrived(_: DataFrame, __: int) -> None:
            # Not what has arrived: some of it may have to wait, and some may have waited for it.
            try:
                take()
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
                if is_behind or turn_of(events, last_taken(self.tables, events)).ready:
                    take()
            started.awaitTermination()
        except StreamingQueryException as wrapped:
            # Around ours, with its trace as text.
            raise (failures or [wrapped])[0] from None
        take()

    def answers(self, query: str) -> Iterator[str]:
        """The rows of an SQL query over the tables, each as JSON. `asking` says which queries there are."""
        self.tables.need_some()
        session = queries.read_only(self.spark)
        question = queries.checked(session, query, self.tables.names())
        for name in sorted(question.tables):
            self.tables.read(session, name).createOrReplaceTempView(name)
        found = queries.execute(session, question)
        rows = found.select(F.to_json(F.struct("*"), {"ignoreNullFields": "false"}))
        for row in rows.toLocalIterator():
            yield row[0]

    def _checkpoint(self, events: Path) -> Path:
        return self.tables.folder / CHECKPOINTS / events.absolute().as_posix().strip("/").replace("/", "-")

    def _run(self, events: Path, *, skip_missing: bool) -> int:
        with self.tables.lock():
            new = self._look(events, skip_missing=skip_missing)
            for batch in self._ingest(events, new):
                if batch[-1] is not new[-1]:
                    self._bring_up(SILVER_INPUTS)
            self._bring_up(self._inputs())  # the last batch, and what a killed run left
        return len(new)

    def _summary(self, taken: int) -> Summary:
        rows = {name: rows_of(self.tables.files(name)) for name in self.tables.names()}
        turn = self._turn
        note = turn.sentence()
        return Summary(taken, self._lines, self._rejects, rows, len(turn.waiting), turn.gaps, note)

    # ---- bronze --------------------------------------------------------------------------------------

    def _look(self, events: Path, *, skip_missing: bool = False) -> list[Segment]:
        """The segments that can be taken."""
        self._turn = turn_of(events, last_taken(self.tables, events), skip_missing=skip_missing)
        if self._turn.sentence() not in ("", self._said):
            self._tell(self._turn.sentence())
        self._said = self._turn.sentence()
        return self._turn.ready

    def _ingest(self, events: Path, segments: list[Segment]) -> Iterator[list[Segment]]:
        """Take segments in batches, each in one commit."""
        folder = str(events.absolute())
        app_id = ingest_id(events)
        for batch in batches(segments):
            numbers = f"segment {batch[0].number}" + (f" to {batch[-1].number}" if len(batch) > 1 else "")
            self._tell(f"bronze: {numbers}, {sum(segment.size for segment in batch) / 1e6:,.0f} MB")
            self._take(folder, batch, app_id)
            yield batch

    def _take(self, folder: str, batch: list[Segment], app_id: str) -> None:
        """The rejects first: whoever is interrupted reads the segments again, and knows their rejects."""
        taken = take(self.spark, self.tables, folder, batch)
        self._reject(folder, batch, taken.marks, app_id)
        self.tables.commit("bronze_events", taken.staged, txns=notes(app_id, batch[-1]))
        self._lines += taken.lines
        self._rejects += taken.lines - taken.staged.rows

    def _reject(self, folder: str, batch: list[Segment], marks: int | None, app_id: str) -> None:
        """Keep the bad lines of a batch. The table is there also when there are none."""
        known = [segment.number for segment in batch if is_noted(self.tables, REJECTS, app_id, segment)]
        bad = [segment for segment in batch if bronze.may_be_bad(segment.path.name, marks)]
        new = [segment for segment in bad if segment.number > max(known, default=-1)]
        if new:
            texts = bronze.texts(self.spark, folder, [str(segment.path) for segment in new])
            rows = bronze.rejects(texts)
            self.tables.append(REJECTS, rows, partition_by=bronze.PARTITIONS, txns=notes(app_id, new[-1]))
        elif not self.tables.exists(REJECTS):
            self.tables.commit(REJECTS, Staged(bronze.REJECTS, bronze.PARTITIONS, []))

    # ---- silver and gold -----------------------------------------------------------------------------

    def _bring_up(self, tables: Needs, *, anew: bool = False) -> None:
        """Bring tables up to what they are made of. Those that others wait for go first."""
        awaited = {source for sources in tables.values() for source in sources}

        def bring_up(name: str) -> None:
            in_pool(self.spark, AWAITED if name in awaited else None)
            self._tried(name, anew=anew)

        in_turn(tables, bring_up, TABLES_AT_ONCE)

    def _tried(self, name: str, *, anew: bool) -> None:
        """Bring up one table, from the start again when another writer has changed it meanwhile."""
        for _ in range(TRIES_MAX - 1):
            try:
                self._bring_up_one(name, anew=anew)
            except TableChanged as error:
                self._tell(f"{error}; it is computed again")
            else:
                return
        self._bring_up_one(name, anew=anew)

    def _bring_up_one(self, name: str, *, anew: bool) -> None:
        inputs = self._inputs()[name]
        sources = inputs[:1] if name in SILVER else inputs
        anew = anew or any(self.tables.is_withdrawn(source, name) for source in sources)
        if name in SILVER:
            self._refresh_silver(name, SILVER[name], anew=anew)
        else:
            self._derive(name, self._gold[name], anew=anew)

    def _refresh_silver(self, name: str, table: SilverTable, *, anew: bool) -> None:
        refresh = SilverRefresh(self.spark, self.tables, name, table, level=self.level, progress=self._tell)
        refresh.run(rebuild=anew)

    # ---- gold ----------------------------------------------------------------------------------------

    def _inputs(self) -> Needs:
        return {**SILVER_INPUTS, **{name: table.inputs for name, table in self._gold.items()}}

    def _derive(self, name: str, table: GoldTable, *, anew: bool) -> None:
        self._drop_other_form(name)
        base = self.tables.version(name)
        versions = {source: self.tables.version(source) for source in table.inputs}
        known = {source: -1 if anew else self.tables.last_txn(name, source) for source in table.inputs}
        if versions == known or -1 in versions.values():
            return
        self._tell(name)
        txns = [*(Txn(source, version) for source, version in versions.items()), Txn(FORM_ID, FORM)]
        deriving = Deriving(self.spark, self.tables, name, table)
        with ExitStack() as held:
            is_older = any(known[source] > versions[source] for source in table.inputs)  # it was made anew
            if is_older or -1 in known.values():
                derived: Derived | None = deriving.anew()
            else:
                derived = deriving.since(known, versions, held)
            if derived is None:
                self.tables.mark(name, txns)
            else:
                self._replace(name, table, derived, txns, base)

    def _drop_other_form(self, name: str) -> None:
        if self.tables.exists(name) and self.tables.last_txn(name, FORM_ID) != FORM:
            self._tell(f"{name} is of another version, and made anew")
            self.tables.drop(name)

    def _replace(self, name: str, table: GoldTable, derived: Derived, txns: list[Txn], base: int) -> None:
        rows, replaced = derived
        split = None
        if table.file_groups is not None:
            rows = rows.withColumn(FILE_GROUP, file_group(self.tables, table.file_groups()))
            split = FILE_GROUP
        self.tables.swap(
            name, rows, replaced, partition_by=table.partition_by, split_by=split, txns=txns, base=base
        )
