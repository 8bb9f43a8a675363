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
from functools import partial
from math import ceil
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

import msgspec
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.core.redaction import Level
from postroom.errors import TableChanged, Unavailable
from postroom.pipeline import file_index, queries
from postroom.pipeline.gold.declaration import GoldTable
from postroom.pipeline.gold.refresh import Derived, Deriving
from postroom.pipeline.gold.tables import FORM, FORM_ID, GOLD
from postroom.pipeline.ingest import bronze, redaction
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
from postroom.pipeline.retention import departures
from postroom.pipeline.schedule import Needs, in_turn
from postroom.pipeline.session import AWAITED, in_pool
from postroom.pipeline.silver import tables as silver
from postroom.pipeline.silver.joins import sent
from postroom.pipeline.silver.span_tree import Placing
from postroom.pipeline.silver.tables import Lots
from postroom.pipeline.tables import REMADE, RENAMED, UNNAMED, DataFile, Staged, Tables, Txn, rows_of

HOURLY_EVENTS_MIN: Final = 50_000  # of a stream whose settled rows lie by the hour; of others by the day
REJECTS: Final = "bronze_rejects"
CHECKPOINTS: Final = "_checkpoints"
SOURCES: Final = {
    "silver_events": "bronze_events",
    "silver_messages": "silver_events",
    "silver_spans": "silver_messages",
    "silver_attempts": "silver_events",
}
"""What each silver table is made of."""
SILVER: Final[Needs] = {
    **{name: (source,) for name, source in SOURCES.items()},
    "silver_attempts": ("silver_events", "silver_messages"),  # which tell whose attempts they are
}
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
            self._bring_up({**SILVER, **self._gold_inputs()}, anew=True)
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
                    self._bring_up(SILVER)
            self._bring_up({**SILVER, **self._gold_inputs()})  # the last batch, and what a killed run left
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

    # ---- silver --------------------------------------------------------------------------------------

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
        anew = anew or self._is_remade(name)
        if name == "silver_events":
            self._fold_events(anew=anew)
        elif name == "silver_messages":
            seen = Observation()
            fold = Fold(partial(silver.messages, seen=seen), silver.message_keys, silver.message_lots(), seen)
            self._fold_messages(name, fold, anew=anew)
        elif name == "silver_attempts":
            fold = Fold(silver.attempts, silver.attempt_keys, silver.attempt_lots())
            self._fold_messages(name, fold, anew=anew or self._are_names_old(name))
        elif name == "silver_spans":
            self._fold_spans(anew=anew)
        else:
            self._derive(name, self._gold[name], anew=anew)

    def _is_remade(self, name: str) -> bool:
        """Whether rows were withdrawn from what a table is made of, since it has seen that."""
        sources = self._gold[name].inputs if name in self._gold else (SOURCES[name],)
        return any(
            self.tables.last_txn(source, REMADE) > self.tables.last_txn(name, source) >= 0
            for source in sources
        )

    def _fold_events(self, *, anew: bool, remade: bool = False) -> None:
        base = self.tables.version("silver_events")
        news = self._news("silver_events", anew=anew)
        if news is None:
            return
        removed = self.tables.files("silver_events") if anew else []
        read = self.tables.read(self.spark, "bronze_events", news.added).withColumn("row", row_number())
        rows = self._without_departed(bronze.widened(read), news.added)
        known = self._known_events(rows, news.added, anew=anew)
        masks = redaction.redacted(self.level)
        with ExitStack() as held:
            repeated, few = self._repeats(rows, known, masks, held)
            if repeated is not None and not repeated.where("is_beaten").isEmpty():
                self._tell("silver_events: two events have one number, and the later one counts")
                self._fold_events(anew=True, remade=True)
                return
            fresh = rows if repeated is None else silver.once(rows, repeated, few=few)
            seen = Observation()
            unnamed = F.count_if(silver.lacks_names()).alias("unnamed")
            result = silver.events(fresh, masks).observe(seen, unnamed)
            staged = self.tables.stage("silver_events", result, partition_by=silver.PARTITIONS)
            txns = [news.txn, *([Txn(UNNAMED, base + 1)] if seen.get["unnamed"] else [])]
            txns += [Txn(REMADE, base + 1)] if remade else []
            self.tables.commit("silver_events", staged, removed, txns=txns, base=base)

    def _repeats(
        self, rows: DataFrame, known: DataFrame, masks: Mapping[str, Column], held: ExitStack
    ) -> tuple[DataFrame | None, bool]:
        """Which events come more than once, and whether they are few; None when there are none."""
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

    def _without_departed(self, rows: DataFrame, added: list[DataFile]) -> DataFrame:
        """Events of new files but for those that left silver before: old segments may be delivered again."""
        newest_us = departures.newest_us(self.tables)
        oldest_us = (file_index.extent(added, "ts_us") or (-1, -1))[0]
        if newest_us < oldest_us:
            return rows
        old = rows.where(F.col("ts_us") <= newest_us)
        left = departures.among(old, self.tables.read(self.spark, departures.TABLE))
        if self.tables.exists("silver_events"):  # a pass that was killed has noted what is still there
            there = self.tables.read(self.spark, "silver_events").where(F.col("ts_us") <= newest_us)
            left = left.join(there.select("source", "seq"), ["source", "seq"], "left_anti")
        few = rows_of(added) <= file_index.BROADCAST_IDS_MAX
        return rows.join(sent(left, few=few), ["source", "seq"], "left_anti")

    def _known_events(self, rows: DataFrame, added: list[DataFile], *, anew: bool) -> DataFrame:
        """The events that are known and may come again: those of the same time."""
        old = [] if anew else self.tables.files("silver_events")
        near = [file for file in old if any(file_index.overlap(file, other, "ts_us") for other in added)]
        if not near:
            return rows.limit(0)
        known = bronze.widened(self.tables.read(self.spark, "silver_events", near))
        whole = file_index.extent(added, "ts_us")
        return known if whole is None else known.where(F.col("ts_us").between(*whole))

    def _fold_messages(self, name: str, fold: "Fold", *, anew: bool) -> None:
        base = self.tables.version(name)
        news = self._news(name, anew=anew)
        if news is None:
            return
        events = self.tables.read(self.spark, "silver_events", news.added)
        touched, before = self.tables.files(name), None
        if touched and not anew:
            ids = file_index.wanted_of(fold.keys(events), news.added, repeat=True)
            touched = file_index.holding(self.spark, self.tables, name, ids)
            before = self.tables.read(self.spark, name, touched) if touched else None
        result, txns = fold.fold(events, before), [news.txn]
        if name == "silver_attempts":
            txns.append(Txn("silver_messages", self.tables.version("silver_messages")))
            result = self._with_names(result, anew=anew)
        if self._is_remade(name):
            txns.append(Txn(REMADE, base + 1))
        self._settle(name, result, touched, fold.lots, txns, base, fold.seen)

    def _are_names_old(self, name: str) -> bool:
        """Whether a message got another type or organization after a table took these from it."""
        known = self.tables.last_txn(name, "silver_messages")
        return known < 0 or self.tables.last_txn("silver_messages", RENAMED) > known

    def _with_names(self, attempts: DataFrame, *, anew: bool) -> DataFrame:
        """Attempts with the type and the organization of their messages, where events do not tell these."""
        if self.tables.last_txn("silver_events", UNNAMED) < 0:
            return attempts
        known = -1 if anew else self.tables.last_txn("silver_attempts", "silver_messages")
        files, _ = self.tables.changed("silver_messages", known)  # of all messages with new events
        return silver.named(attempts, self.tables.read(self.spark, "silver_messages", files))

    def _fold_spans(self, *, anew: bool) -> None:
        base = self.tables.version("silver_spans")
        news = self._news("silver_spans", anew=anew)
        if news is None:
            return
        touched = self.tables.files("silver_spans")
        with ExitStack() as held:
            placing = Placing(self.spark, self.tables, news.added, news.removed, held)
            if anew or not touched:
                result = placing.anew()
            else:
                touched, result = placing.among_others()
            self._settle("silver_spans", result, touched, silver.span_lots(), [news.txn], base)

    # ---- what a fold needs to know ---------------------------------------------------------------------

    def _news(self, name: str, *, anew: bool) -> "News | None":
        """What its source has that the table has not seen; None when there is nothing."""
        source = SOURCES[name]
        known = -1 if anew else self.tables.last_txn(name, source)
        version = self.tables.version(source)
        if known == version:
            return None
        added, removed = self.tables.changed(source, known, version)
        if not added and self.tables.exists(name):
            self.tables.mark(name, [Txn(source, version)])
            return None
        self._tell(f"{name}: {rows_of(added):,} rows of {source}")
        return News(added, removed, Txn(source, version))

    def _is_dense(self) -> bool:
        """Whether an hour of the stream fills files of its own; otherwise they would be many, and tiny."""
        files = self.tables.files("silver_events")
        oldest_us = min((file.low.get("ts_us") or 0 for file in files), default=0)
        hours = 1 + (self._newest_us() - oldest_us) // silver.HOUR_US
        return rows_of(files) >= hours * HOURLY_EVENTS_MIN

    def _newest_us(self) -> int:
        return max((_high(file) for file in self.tables.files("silver_events")), default=0)

    def _settle(
        self,
        name: str,
        rows: DataFrame,
        removed: list[DataFile],
        lots: Lots,
        txns: list[Txn],
        base: int,
        seen: Observation | None = None,
    ) -> None:
        """Rows that nothing more is expected of get files of their own, most of which then stay."""
        rows = rows.withColumn(silver.SETTLED, self._settled(lots))
        staged = self.tables.stage(name, rows, partition_by=silver.PARTITIONS, split_by=silver.SETTLED)
        if seen is not None and seen.get["renamed"]:
            txns = [*txns, Txn(RENAMED, base + 1)]
        self.tables.commit(name, staged, removed, txns=txns, base=base)

    def _settled(self, lots: Lots) -> Column:
        return silver.settled(self._newest_us(), lots, hourly=self._is_dense())

    # ---- gold ----------------------------------------------------------------------------------------

    def _gold_inputs(self) -> Needs:
        return {name: table.inputs for name, table in self._gold.items()}

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
        if table.lots is not None:
            rows, split = rows.withColumn(silver.SETTLED, self._settled(table.lots())), silver.SETTLED
        self.tables.swap(
            name, rows, replaced, partition_by=table.partition_by, split_by=split, txns=txns, base=base
        )


class News(NamedTuple):
    """What a table has not seen of its source."""

    added: list[DataFile]
    removed: list[DataFile]
    txn: Txn


class Fold(NamedTuple):
    """How a table of one row a key is made, and which of its rows lie together."""

    fold: Callable[..., DataFrame]
    keys: Callable[[DataFrame], DataFrame]
    """Which rows events are about."""
    lots: Lots
    seen: Observation | None = None
    """Counts rows with other names than before."""


# ---- rows and files ---------------------------------------------------------------------------------


def row_number() -> Column:
    """A number of a row of a Parquet file, the same whenever it is read."""
    # The whole path: a task gives its files of several dates one name.
    return F.xxhash64("_metadata.file_path", "_metadata.row_index")


def _high(file: DataFile) -> int:
    return file.high.get("ts_us") or 0
