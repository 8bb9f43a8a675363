"""Retention: deletes old messages and events from the tables.

Rule 1: a message is deleted as a whole: its row, its attempts, its span and all its events, when its last
        event is older than the retention period of its organization. Failures may be kept longer. An event
        without a message is deleted by its own time.
Rule 2: a legal hold on an organization or a goal keeps all of its rows, whatever their age.
Rule 3: rows are counted before any is deleted: the rows that stay and the rows that go (as read back from the
        archive, if there is one) have to be all rows. Otherwise the table is not changed.
Rule 4: each table changes in one commit, and `silver_messages`, which decides, is the last. A killed job is
        run again: rows that are gone are not missed, and an archive of the same commit is overwritten.
Rule 5: the numbers of deleted events are recorded before the first deletion. Otherwise `check` would report
        them as missing, and a segment that is delivered again would bring them back.
Rule 6: gold keeps its aggregates. Its days are deleted by an age of their own (`gold_days`), as whole files.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.errors import InvalidSetting, Unavailable
from postroom.pipeline.delta.arrow_files import FILE
from postroom.pipeline.delta.delta_log import MAINTENANCE, DataFile, Txn, path_below, rows_of
from postroom.pipeline.delta.file_groups import file_group
from postroom.pipeline.delta.tables import StagedFiles, Tables
from postroom.pipeline.follow import deleted_numbers
from postroom.pipeline.follow.refresh import FORM_ID
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.silver.tables import SILVER
from postroom.pipeline.times import DAY_US, MICROS_PER_S

if TYPE_CHECKING:
    from postroom.pipeline.lineage import JobRun

DAYS_MAX: Final = 36_500
FAILURES: Final = ("dead_letter", "quarantined")
DECIDES: Final = "silver_messages"
ORDER: Final = ("bronze_rejects", "bronze_events", *(name for name in SILVER if name != DECIDES), DECIDES)
"""The order in which rows are deleted from the tables."""
KEPT_GOLD: Final = ("gold_flow",)
"""Gold tables that keep all days: queue depths are computed from the first."""

Progress = Callable[[str], None]


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How long rows are kept."""

    keep_days: int
    org_days: Mapping[str, int] = {}
    """Organizations with a retention period of their own."""
    failures_days: int = 0
    """The minimum for dead letters and quarantined messages."""
    gold_days: int = 0
    """For the days of gold tables; 0 keeps them without limit."""
    held_orgs: frozenset[str] = frozenset()
    held_goals: frozenset[str] = frozenset()


class Retained(msgspec.Struct, frozen=True):
    """The result for one table, or with a dry run what it would be."""

    table: str
    before: int
    deleted: int
    archived: int | None
    """None when nothing was archived."""


# ---- policy files ---------- -----------------------------------------------------------------------------


def read_org_days(path: Path) -> dict[str, int]:
    """Read lines of an organization and a number of days."""
    found: dict[str, int] = {}
    for number, (org_id, days) in _lines(path, "an organization and a number of days"):
        if not days.isdecimal() or not 1 <= int(days) <= DAYS_MAX or org_id in found:
            raise InvalidSetting(
                f"line {number} of {path} is not an organization and 1 to {DAYS_MAX} days, once"
            )
        found[org_id] = int(days)
    return found


def read_holds(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Read lines of `org ID` and `goal ID`; returns the organizations and the goals."""
    held: dict[str, set[str]] = {"org": set(), "goal": set()}
    for number, (kind, name) in _lines(path, "org ID or goal ID"):
        if kind not in held:
            raise InvalidSetting(f"line {number} of {path} is not a hold: it is org ID or goal ID")
        held[kind].add(name)
    return frozenset(held["org"]), frozenset(held["goal"])


def _lines(path: Path, wanted: str) -> list[tuple[int, tuple[str, str]]]:
    try:
        texts = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise InvalidSetting(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidSetting(f"cannot read {path}: it is not UTF-8") from None
    found = []
    for number, text in enumerate(texts, start=1):
        words = text.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:  # noqa: PLR2004 - a name and a value
            raise InvalidSetting(f"line {number} of {path} is not {wanted}")
        found.append((number, (words[0], words[1])))
    return found


# ---- conditions ------------------------------------------------------------------------------------------


def kept_us(policy: RetentionPolicy) -> Column:
    """The retention period of a row, by its organization."""
    tier = F.lit(policy.keep_days)
    if policy.org_days:
        days = F.create_map(*[F.lit(part) for pair in sorted(policy.org_days.items()) for part in pair])
        tier = F.coalesce(days[F.col("org_id")], tier)
    return tier.cast("long") * DAY_US


def held(policy: RetentionPolicy) -> Column:
    """Whether a legal hold keeps a row."""
    org = F.col("org_id").isin(*policy.held_orgs)
    goal = F.col("goal_id").isin(*policy.held_goals)
    return F.coalesce(org, F.lit(False)) | F.coalesce(goal, F.lit(False))  # noqa: FBT003 - SQL's


def expired_messages(messages: DataFrame, policy: RetentionPolicy, now_us: int) -> DataFrame:
    """Grain: message_id of the messages to delete."""
    kept = kept_us(policy)
    longer = F.greatest(kept, F.lit(policy.failures_days * DAY_US))
    kept = F.when(F.col("outcome").isin(*FAILURES), longer).otherwise(kept)
    return messages.where((F.col("last_us") < now_us - kept) & ~held(policy)).select("message_id")


def is_expired_event(policy: RetentionPolicy, now_us: int) -> Column:
    """Whether an event without a message is deleted."""
    is_alone = F.coalesce("message_id", F.lit("")) == ""
    return is_alone & (F.col("ts_us") < now_us - kept_us(policy)) & ~held(policy)


def is_expired_reject(policy: RetentionPolicy, now_us: int) -> Column:
    """Whether a reject is deleted: after the longest period, unless its text has a name that is held."""
    days = max([policy.keep_days, policy.failures_days, *policy.org_days.values()])
    sealed_us = F.unix_date("date") * F.lit(DAY_US)
    names = [F.col("line").contains(name) for name in sorted(policy.held_orgs | policy.held_goals)]
    return (sealed_us + DAY_US < now_us - days * DAY_US) & ~reduce(or_, names, F.lit(False))  # noqa: FBT003 - SQL's


# ---- the job ---------------------------------------------------------------------------------------------


class Deletion(NamedTuple):
    """The rows to delete from a table."""

    files: list[DataFile]
    """The files with a row to delete."""
    rows: int


class RetentionJob:
    """One retention pass over the tables of a folder."""

    def __init__(
        self,
        spark: SparkSession,
        tables: Tables,
        policy: RetentionPolicy,
        *,
        now_us: int,
        archive: str | None = None,
        progress: Progress = lambda _: None,
        lineage: "JobRun | None" = None,
    ) -> None:
        if 0 < policy.gold_days < policy.keep_days:
            raise InvalidSetting(
                f"gold is kept at least as long as the rest: {policy.gold_days} days are less than "
                f"{policy.keep_days}"
            )
        self._spark = spark
        self._tables = tables
        self._policy = policy
        self._now_us = now_us
        self._archive = archive
        self._progress = progress
        self._lineage = lineage

    def run(self, *, dry_run: bool = False) -> list[Retained]:
        """Delete expired rows from every table; returns the result for each."""
        self._require_up_to_date()
        with self._tables.profile(0):
            return self._run(dry_run=dry_run)

    def _run(self, *, dry_run: bool) -> list[Retained]:
        there = [name for name in ORDER if self._tables.exists(name)]
        if DECIDES not in there:
            raise InvalidSetting(
                f"there is no table {DECIDES} in {self._tables.storage}: run the pipeline first"
            )
        expired = expired_messages(
            self._tables.read(self._spark, DECIDES), self._policy, self._now_us
        ).persist()
        try:
            if not dry_run:
                with self._emitting(deleted_numbers.TABLE, "silver_events"):
                    self._record_numbers(expired)
            left = [self._retain(name, expired, dry_run=dry_run) for name in there]
        finally:
            expired.unpersist()
        return left + [self._retain_gold(name, dry_run=dry_run) for name in self._gold()]

    def _emitting(self, name: str, *sources: str) -> AbstractContextManager[None]:
        return nullcontext() if self._lineage is None else self._lineage.table(self._tables, name, sources)

    def _require_up_to_date(self) -> None:
        """Raise if a table is behind its inputs: new events may belong to a message that would be deleted."""
        for name in self._gold():
            if self._tables.last_txn(name, FORM_ID) != GOLD[name].form:
                raise Unavailable(f"{name} is of another version: run the pipeline first")
        sources: dict[str, tuple[str, ...]] = {name: (table.source,) for name, table in SILVER.items()}
        sources |= {name: GOLD[name].inputs for name in self._gold()}
        for name, inputs in sources.items():
            for source in inputs:
                if self._is_behind(name, source):
                    raise Unavailable(f"{name} has not seen all of {source}: run the pipeline first")

    def _gold(self) -> list[str]:
        return [name for name in GOLD if self._tables.exists(name)]

    def _is_behind(self, name: str, source: str) -> bool:
        """Whether a table has not read all rows of a source. Deletions of a killed pass do not count."""
        known = self._tables.last_txn(name, source)
        if known == self._tables.version(source):
            return False
        return known < 0 or any(self._tables.changed(source, known))

    def _record_numbers(self, expired: DataFrame) -> None:
        """Record the numbers of the events to delete, before anything is deleted."""
        deletion = self._find("silver_events", expired)
        if not deletion.rows:
            return
        base = self._tables.version(deleted_numbers.TABLE)
        self._progress(f"{deleted_numbers.TABLE}: the numbers of {deletion.rows:,} events")
        events, _ = self._split("silver_events", expired, deletion.files)
        runs = deleted_numbers.deleted_runs(events)
        if self._tables.exists(deleted_numbers.TABLE):
            runs = runs.unionByName(self._tables.read(self._spark, deleted_numbers.TABLE))
        all_runs = deleted_numbers.merged(runs).persist()
        try:
            staged = self._tables.stage(deleted_numbers.TABLE, all_runs)
            if staged.rows != all_runs.count():
                raise Unavailable(f"not all of {deleted_numbers.TABLE} was written: nothing was deleted")
        finally:
            all_runs.unpersist()
        self._tables.commit(
            deleted_numbers.TABLE, staged, self._tables.files(deleted_numbers.TABLE), base=base
        )
        self._tables.vacuum(deleted_numbers.TABLE)

    def _retain(self, name: str, expired: DataFrame, *, dry_run: bool) -> Retained:
        base = self._tables.version(name)
        before = rows_of(self._tables.files(name))
        deletion = self._find(name, expired)
        self._progress(f"{name}: {deletion.rows:,} of {before:,} rows leave")
        archived = None
        if not dry_run:
            if deletion.rows:
                with self._emitting(name, name, *(() if name == DECIDES else (DECIDES,))):
                    archived = self._delete(name, expired, deletion, base)
            self._catch_up(name)
            self._tables.vacuum(name)
        return Retained(name, before, deletion.rows, archived)

    def _retain_gold(self, name: str, *, dry_run: bool) -> Retained:
        """Delete the days of a gold table that are older than `gold_days`."""
        base, files = self._tables.version(name), self._tables.files(name)
        over: list[DataFile] = []
        if self._policy.gold_days and name not in KEPT_GOLD:
            oldest = datetime.fromtimestamp(self._now_us // MICROS_PER_S, UTC)
            oldest -= timedelta(days=self._policy.gold_days)
            over = [file for file in files if (file.partition.get("day") or "9") < f"{oldest:%Y-%m-%d}"]
        self._progress(f"{name}: {rows_of(over):,} of {rows_of(files):,} rows leave")
        if over and not dry_run:
            staged = StagedFiles(self._tables.schema(name), tuple(GOLD[name].partition_by), [])
            with self._emitting(name, name):
                self._tables.commit(name, staged, over, base=base)
        return Retained(name, rows_of(files), rows_of(over), None)

    def _split(self, name: str, expired: DataFrame, files: list[DataFile]) -> tuple[DataFrame, DataFrame]:
        """The rows to delete, and those that stay."""
        rows = self._tables.read_with_file(self._spark, name, files)
        if name == "bronze_rejects":
            leaves = is_expired_reject(self._policy, self._now_us)
            return rows.where(leaves), rows.where(~F.coalesce(leaves, F.lit(False)))  # noqa: FBT003 - SQL's
        go, stay = (
            rows.join(expired, "message_id", "left_semi"),
            rows.join(expired, "message_id", "left_anti"),
        )
        if name.endswith("_events"):
            alone = F.coalesce(is_expired_event(self._policy, self._now_us), F.lit(False))  # noqa: FBT003 - SQL's
            go, stay = go.unionByName(rows.where(alone)), stay.where(~alone)
        if name == "bronze_events" and self._tables.exists(deleted_numbers.TABLE):
            again = self._redelivered(stay)
            numbers = ["source", "seq", "message_id"]
            go = go.unionByName(stay.join(again, numbers, "left_semi"))
            stay = stay.join(again, numbers, "left_anti")
        return go, stay

    def _redelivered(self, rows: DataFrame) -> DataFrame:
        """Grain: source, seq and message_id of deleted events that were delivered to bronze again."""
        messages = self._tables.read(self._spark, DECIDES).select("message_id")
        unknown = rows.where("message_id IS NOT NULL").join(messages, "message_id", "left_anti")
        left = deleted_numbers.deleted_among(unknown, self._tables.read(self._spark, deleted_numbers.TABLE))
        return (
            unknown.select("source", "seq", "message_id")
            .distinct()
            .join(left, ["source", "seq"], "left_semi")
        )

    def _find(self, name: str, expired: DataFrame) -> Deletion:
        files = self._tables.files(name)
        if not files:
            return Deletion([], 0)
        go, _ = self._split(name, expired, files)
        counts = {path_below(name, row[FILE]): row["count"] for row in go.groupBy(FILE).count().collect()}
        touched = [file for file in files if file.path in counts]
        return Deletion(touched, sum(counts.values()))

    def _delete(self, name: str, expired: DataFrame, deletion: Deletion, base: int) -> int | None:
        """Archive the rows to delete, stage the rest, compare the counts, and only then commit."""
        go, stay = self._split(name, expired, deletion.files)
        archived = self._archived(name, go.drop(FILE))
        if archived is not None and archived != deletion.rows:
            raise Unavailable(
                f"the archive of {name} has {archived} rows instead of {deletion.rows}: nothing was deleted"
            )
        partitions = self._tables.partitions(name)
        groups = SILVER[name].groups if name in SILVER else None
        split = None if groups is None else file_group(self._tables, groups)
        staged = self._tables.stage(name, stay.drop(FILE), partition_by=partitions, split=split)
        there = rows_of(deletion.files)
        if staged.rows + deletion.rows != there:
            raise Unavailable(
                f"{staged.rows} rows of {name} would stay and {deletion.rows} leave, and there are {there}: "
                "nothing was deleted"
            )
        self._tables.commit(name, staged, deletion.files, txns=self._maintenance_txns(name), base=base)
        return archived

    def _catch_up(self, name: str) -> None:
        """Record that a table has read its source, whose deletions it has followed."""
        behind = [name] if name in SILVER else []
        if name == DECIDES:  # it is the last table: those that read it are done
            behind += [table for table, declared in SILVER.items() if declared.source == DECIDES]
        for table in behind:
            source = SILVER[table].source
            known = self._tables.last_txn(table, source)
            if self._tables.exists(table) and known != self._tables.version(source):
                self._tables.mark(table, self._maintenance_txns(table))

    def _maintenance_txns(self, name: str) -> list[Txn]:
        """The transactions that mark a commit as maintenance, which downstream tables do not follow."""
        txns = [Txn(MAINTENANCE, self._tables.version(name) + 1)]
        if name in SILVER:
            source = SILVER[name].source
            txns.append(Txn(source, self._tables.version(source)))
        return txns

    def _archived(self, name: str, rows: DataFrame) -> int | None:
        """Write rows to the archive, and count them there. The path depends on the version of the table."""
        if self._archive is None:
            return None
        version = f"{self._tables.table_id(name)}-{self._tables.version(name)}"
        place = f"{self._archive.rstrip('/')}/{name}/retained={version}"
        rows.write.partitionBy(*self._tables.partitions(name)).mode("overwrite").parquet(place)
        return self._spark.read.schema(rows.schema).parquet(place).count()
