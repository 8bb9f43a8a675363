"""Delta tables without a JVM jar: Spark writes the Parquet files, the `deltalake` wheel commits them.

Rule 1: a file is visible when a commit names it. Files that a killed job left behind are invisible to
        readers, and `vacuum` deletes them.
Rule 2: a commit is one file of the table's log. It adds files, removes files and records transactions
        atomically.
Rule 3: a folder of tables has one writer at a time. A reader needs no lock: it reads the files of one
        version, and `vacuum` keeps those of the last days.
Rule 4: other programs do not know our lock, and may compact a table at any time. Rows that were computed from
        one version are committed on top of that version, or not at all.
"""

import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from urllib.parse import unquote

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, WriterProperties
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import StructType

from postroom.errors import InvalidMessage, TableChanged
from postroom.pipeline import arrow_files
from postroom.pipeline.arrow_files import FILE, NO_VALUE, ROW
from postroom.pipeline.paths import is_small, local_path
from postroom.pipeline.schema import REQUIRED
from postroom.pipeline.session import CONNECTOR
from postroom.system import lock

WRITER_LOCK: Final = "_writer.lock"
STAGING: Final = "_staging"
LOG: Final = "_delta_log"
INDEXED: Final = ("message_id", "root_message_id", "ts_us", "first_us", "last_us", "hour_us")
"""Columns whose lowest and highest value in each file are in the log, so that a job can skip files."""
EXTRA_INDEXED: Final[dict[str, tuple[str, ...]]] = {"silver_messages": ("parent_message_id",)}
"""The same for single tables. Elsewhere no job needs them, and the statistics would cost time."""
DISTINCT: Final = (
    *(
        "event_id",
        "seq",
        "ts_us",
        "message_id",
        "parent_message_id",
        "root_message_id",
        "trace_id",
        "span_id",
    ),
    *("payload", "lease", "duration_us", "created_us", "enqueued_us", "first_dequeued_us", "first_us"),
    *("first_delivered_us", "finished_us", "last_us", "queue_us", "total_us", "end_code", "dequeued_us"),
    *("started_us", "ended_us", "heartbeat_us", "waited_us", "worked_us", "start_us", "end_us"),
)
"""Columns with mostly distinct values: Parquet would start a dictionary only to abandon it."""
VARIED: Final = (
    *("goal_id", "task_id", "user_id", "agent_id", "queue", "sender", "recipient", "body_bytes"),
    *("tokens_in", "tokens_out", "cost_usd", "error", "detail"),
)
"""Columns with many values: a dictionary costs more than it gains, because zstd compresses repeats."""
STATISTICS: Final = "parquet.column.statistics.enabled"
WRITE_OPTIONS: Final = {
    "parquet.compression.codec.zstd.level": "1",  # nearly as small, for less CPU
    **{f"parquet.enable.dictionary#{name}": "false" for name in (*DISTINCT, *VARIED)},
    # Statistics cost time, and rows come in an order in which most columns rule out no file.
    STATISTICS: "false",
    **{f"{STATISTICS}#{name}": "true" for name in {*INDEXED, *REQUIRED}},
}
LISTED_MAX: Final = 4  # versions of a table whose file lists are cached
KEEP_HOURS: Final = 168  # `vacuum` keeps the files of versions of this age, for their readers
COMPACT_BYTES: Final = 128 << 20
NANOS_PER_MS: Final = 1_000_000
MAINTENANCE: Final = "retain ended at"
"""The application id of commits by which `retain` deletes rows. Downstream tables keep theirs."""
ROWS_WITHDRAWN: Final = "remade"
"""Of a silver table: the last version that withdrew rows. Downstream tables are rebuilt."""
UNNAMED: Final = "unnamed"
"""Of `silver_events`: the last version that added events without a type or organization."""
RENAMED: Final = "renamed"
"""Of `silver_messages`: the last version in which a known message got another type or organization."""


class Txn(NamedTuple):
    """The progress of an application, committed together with its rows."""

    app_id: str
    version: int


class DataFile(NamedTuple):
    """One Parquet file of a table, as described by the log."""

    path: str
    """Relative to the table's folder."""
    size: int
    rows: int
    partition: dict[str, str | None]
    low: dict[str, Any]
    high: dict[str, Any]
    nulls: dict[str, int | None]


class Commit(NamedTuple):
    """The files that one version of a table added and removed."""

    added: frozenset[str]
    removed: frozenset[str]
    is_maintenance: bool
    """Whether it changed no row, or only deleted rows for `retain`."""


def rows_of(files: Iterable[DataFile]) -> int:
    return sum(file.rows for file in files)


class Staged(NamedTuple):
    """Files that are written but not committed yet."""

    schema: StructType
    partition_by: tuple[str, ...]
    adds: list[AddAction]

    @property
    def rows(self) -> int:
        return sum(json.loads(add.stats)["numRecords"] for add in self.adds)


class Tables:
    """The tables of one folder, each in a folder of its own name."""

    def __init__(self, folder: Path | str) -> None:
        """The folder, as a path or as a `file:` URI."""
        self.folder = local_path(folder)
        self._rows: dict[tuple[str, ...], DataFrame] | None = None
        """The rows of files that were read since `small` was opened; None while it is not."""
        self._listed: dict[str, dict[tuple[str, int], list[DataFile]]] = {}
        """The files of some versions of each table, which never change."""
        self._opened: dict[str, DeltaTable] = {}
        """The last known version of each table."""

    # ---- the log -------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Every table with at least one commit."""
        return sorted(log.parent.name for log in self.folder.glob(f"*/{LOG}") if any(log.iterdir()))

    def require_tables(self) -> None:
        """Raise if the folder has no tables."""
        if not self.names():
            raise InvalidMessage(f"there are no tables in {self.folder}")

    def exists(self, name: str) -> bool:
        return self._delta(name) is not None

    def version(self, name: str) -> int:
        """The number of the last commit; -1 when there is none."""
        delta = self._delta(name)
        return -1 if delta is None else delta.version()

    def last_txn(self, name: str, app_id: str) -> int:
        """The last version that an application recorded in this table; -1 when there is none."""
        delta = self._delta(name)
        found = None if delta is None else delta.transaction_version(app_id)
        return -1 if found is None else found

    def is_withdrawn(self, source: str, name: str) -> bool:
        """Whether rows were withdrawn from `source` after table `name` read it: then `name` is rebuilt."""
        return self.last_txn(source, ROWS_WITHDRAWN) > self.last_txn(name, source) >= 0

    def files(self, name: str, version: int | None = None) -> list[DataFile]:
        """The files of a version; of the current one by default."""
        delta = self._delta(name)
        if delta is None:
            return []
        is_current = version is None or version == delta.version()
        which = (str(delta.metadata().id), delta.version() if version is None else version)
        known = self._listed.setdefault(name, {})
        files = known.get(which)
        if files is None:
            # The current version is not opened again: another writer may have committed meanwhile.
            files = _files_of(delta if is_current else self._require(name, version))
            if len(known) >= LISTED_MAX:
                known.clear()
            known[which] = files
        return files

    def changed(
        self, name: str, since: int, until: int | None = None
    ) -> tuple[list[DataFile], list[DataFile]]:
        """The files that were added and removed between two versions.

        Maintenance does not count: neither a compaction, which moves rows to other files, nor `retain`.
        """
        until = self.version(name) if until is None else until
        before = _by_path(self.files(name, since)) if since >= 0 else {}
        before = self._after_maintenance(name, before, since, until)
        now = _by_path(self.files(name, until)) if until >= 0 else {}
        added = [file for path, file in now.items() if path not in before]
        return added, [file for path, file in before.items() if path not in now]

    def _after_maintenance(
        self, name: str, before: dict[str, DataFile], since: int, until: int
    ) -> dict[str, DataFile]:
        """The files of a version after later maintenance.

        They are returned unchanged if maintenance touched newer rows, or if a commit is no longer in the log.
        Rows that were only moved then count as removed and added.
        """
        known = dict(before)
        for version in range(since + 1, until + 1) if before else ():
            commit = self._read_commit(name, version)
            if commit is None:
                return before
            if not commit.is_maintenance:
                continue
            if not commit.removed <= known.keys():
                return before
            known = {path: file for path, file in known.items() if path not in commit.removed}
            known |= {file.path: file for file in self.files(name, version) if file.path in commit.added}
        return known

    def _read_commit(self, name: str, version: int) -> "Commit | None":
        try:
            lines = self._log_of(name, version).read_bytes().splitlines()
        except FileNotFoundError:
            return None
        return _commit_of([json.loads(line) for line in lines])

    def file_exists(self, name: str, file: DataFile) -> bool:
        """Whether a file still exists. `vacuum` may have deleted a file of an old version."""
        return (self.folder / name / file.path).exists()

    def values(self, name: str, column: str) -> set[Any]:
        """The distinct values of a column with few of them. No Spark is started."""
        found: set[Any] = set()
        for file in self.files(name):
            path = self.folder / name / file.path
            read = pq.read_table(path, columns=[column], partitioning=None)
            found.update(read.column(column).unique().to_pylist())
        return found

    def schema(self, name: str) -> StructType:
        """The columns of a table, its partition columns included."""
        delta = self._require(name)
        return StructType.fromJson(json.loads(delta.schema().to_json()))

    def _delta(self, name: str, version: int | None = None) -> DeltaTable | None:
        if version is None and (opened := self._opened.get(name)) is not None and self._is_last(name, opened):
            return opened
        try:
            delta = DeltaTable(self.folder / name, version=version)
        except TableNotFoundError:
            return None
        if version is None:
            self._opened[name] = delta
        return delta

    def _is_last(self, name: str, delta: DeltaTable) -> bool:
        """Whether a version is still the last one. Opening the table would read its whole log."""
        this, following = (self._log_of(name, delta.version() + step).exists() for step in (0, 1))
        return this and not following

    def _log_of(self, name: str, version: int) -> Path:
        return self.folder / name / LOG / f"{version:020d}.json"

    def _require(self, name: str, version: int | None = None) -> DeltaTable:
        delta = self._delta(name, version)
        if delta is None:
            raise InvalidMessage(f"there is no table {name} in {self.folder}")
        return delta

    # ---- reading -------------------------------------------------------------------------------------

    def profile(self, *inputs: Path | None) -> AbstractContextManager[None]:
        """`small` if the tables and other folders are small; nothing otherwise."""
        return self.small() if is_small(self.folder, *inputs) else nullcontext()

    @contextmanager
    def small(self) -> Iterator[None]:
        """Read and write files in this process while this is open. The tables have to be small.

        The rows of a file are sent to Spark once, and all queries over them share them.
        """
        self._rows = {}
        try:
            yield
        finally:
            self._rows = None

    @property
    def is_small(self) -> bool:
        return self._rows is not None

    def read(self, spark: SparkSession, name: str, files: Iterable[DataFile] | None = None) -> DataFrame:
        """The rows of the current version, or of some of its files."""
        if files is None and spark.conf.get(CONNECTOR, "false") == "true":
            return spark.read.format("delta").load(str(self.folder / name))
        chosen = self.files(name) if files is None else list(files)
        if self._rows is not None:
            return self._numbered(spark, name, chosen).drop(FILE, ROW)
        return self._scan(spark, name, chosen)

    def read_with_file(self, spark: SparkSession, name: str, files: list[DataFile]) -> DataFrame:
        """The rows of files, each with the URL of its `file`."""
        if self._rows is not None:
            return self._numbered(spark, name, files).drop(ROW)
        # By the whole path: a task gives its files of several days the same name.
        file = F.col("_metadata.file_path") if files else F.lit(None).cast("string")
        return self._scan(spark, name, files).withColumn(FILE, file)

    def read_with_row(
        self,
        spark: SparkSession,
        name: str,
        files: list[DataFile],
        convert: Callable[[pa.Table], pa.Table] | None = None,
    ) -> DataFrame:
        """The rows of files, each with a number (`row`) that is the same at every read of a run.

        Rows of small tables are converted on their way to Spark.
        """
        if self._rows is not None:
            return self._numbered(spark, name, files, convert).drop(FILE)
        return self._scan(spark, name, files).withColumn(ROW, _row_number())

    def _numbered(
        self,
        spark: SparkSession,
        name: str,
        files: list[DataFile],
        convert: Callable[[pa.Table], pa.Table] | None = None,
    ) -> DataFrame:
        """The rows of files of a small table, with their file and their number."""
        assert self._rows is not None  # noqa: S101 - the callers have asked
        if convert is not None:
            return self._sent(spark, name, files, convert)
        which = (name, *(file.path for file in files))
        known = self._rows.get(which)
        if known is None:
            known = self._rows[which] = self._sent(spark, name, files, lambda rows: rows)
        return known

    def _sent(
        self, spark: SparkSession, name: str, files: list[DataFile], convert: Callable[[pa.Table], pa.Table]
    ) -> DataFrame:
        folder = self.folder / name
        schema = self.schema(name)
        rows = arrow_files.read_rows([(folder / file.path, file.partition) for file in files], schema)
        columns = arrow_files.as_nullable(schema).add(FILE, "string").add(ROW, "long")
        return spark.createDataFrame(convert(rows), columns)

    def _scan(self, spark: SparkSession, name: str, chosen: list[DataFile]) -> DataFrame:
        schema = self.schema(name)
        if not chosen:
            return spark.createDataFrame([], schema)
        folder = self.folder / name
        paths = [str(folder / file.path) for file in chosen]
        rows = spark.read.schema(schema).option("basePath", str(folder)).parquet(*paths)
        return rows if rows.columns == schema.names else rows.select(*schema.names)

    # ---- writing -------------------------------------------------------------------------------------

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the writer lock of the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        refused = f"another job is writing the tables in {self.folder}: wait until it is done"
        with lock.alone(self.folder / WRITER_LOCK, refused):
            yield

    def append(
        self, name: str, df: DataFrame, *, partition_by: Sequence[str] = (), txns: Iterable[Txn] = ()
    ) -> None:
        """Add rows."""
        self.swap(name, df, (), partition_by=partition_by, txns=txns)

    def replace(
        self, name: str, df: DataFrame, *, partition_by: Sequence[str] = (), txns: Iterable[Txn] = ()
    ) -> None:
        """Replace all rows."""
        self.swap(name, df, self.files(name), partition_by=partition_by, txns=txns)

    def swap(
        self,
        name: str,
        df: DataFrame,
        removed: Iterable[DataFile],
        *,
        partition_by: Sequence[str] = (),
        split_by: str | None = None,
        txns: Iterable[Txn] = (),
        base: int | None = None,
    ) -> None:
        """Replace the rows of the removed files, in one commit.

        For `split_by` see `stage`, for `base` see `commit`.
        """
        staged = self.stage(name, df, partition_by=partition_by, split_by=split_by)
        self.commit(name, staged, removed, txns=txns, base=base)

    def stage(
        self, name: str, df: DataFrame, *, partition_by: Sequence[str] = (), split_by: str | None = None
    ) -> Staged:
        """Write files for a later commit. Until then no reader sees them.

        Rows that differ in `split_by` go to different files. It is no column of the table.
        """
        split = () if split_by is None else (split_by,)
        if self._rows is not None:
            return Staged(
                df.drop(*split).schema, tuple(partition_by), self._write_small(name, df, partition_by, split)
            )
        with self.staging_folder(name) as staging:
            df.write.options(**_write_options(name)).partitionBy(*split, *partition_by).parquet(str(staging))
            adds = [self._add(name, path, partition_by) for path in self._place(name, staging, len(split))]
        return Staged(df.drop(*split).schema, tuple(partition_by), adds)

    def stage_in(self, name: str, df: DataFrame, partition: Mapping[str, str]) -> list[AddAction]:
        """Write files of one partition, whose values are no columns of the rows.

        Spark then need not find the partition of each row. Several partitions may be written at once.
        """
        with self.staging_folder(name) as staging:
            folders = [f"{column}={value}" for column, value in partition.items()]
            df.write.options(**_write_options(name)).parquet(str(staging.joinpath(*folders)))
            return [self._add(name, path, tuple(partition)) for path in self._place(name, staging)]

    def _write_small(
        self, name: str, df: DataFrame, partition_by: Sequence[str], split_by: Sequence[str]
    ) -> list[AddAction]:
        """Write the rows of a small table in this process."""
        places = arrow_files.write_rows(
            df.toArrow(),
            self.folder / name,
            f"part-{uuid.uuid4()}.parquet",
            partition_by=partition_by,
            split_by=split_by,
            dictionary=set(df.columns).difference(DISTINCT, VARIED),
            statistics=(*_indexed(name), *REQUIRED),
        )
        return [self._add(name, path, partition_by) for path in places]

    @contextmanager
    def staging_folder(self, name: str) -> Iterator[Path]:
        """A temporary folder of a table. `vacuum` deletes those of killed jobs."""
        staging = self.folder / name / STAGING / uuid.uuid4().hex
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            with suppress(OSError):  # another staging folder exists
                staging.parent.rmdir()

    def commit(
        self,
        name: str,
        staged: Staged,
        removed: Iterable[DataFile] = (),
        *,
        txns: Iterable[Txn] = (),
        base: int | None = None,
    ) -> None:
        """Add the staged files to the table, and remove others.

        `base` is the version from which the rows were computed. If there is a later version, nothing is
        committed and `TableChanged` is raised. Rows that do not depend on the table need no base.
        """
        now_ms = time.time_ns() // NANOS_PER_MS
        gone = [
            RemoveAction(file.path, True, now_ms, file.size, file.partition)  # noqa: FBT003 - it is data that changes
            for file in removed
        ]
        self._commit(name, staged.schema, staged.partition_by, [*staged.adds, *gone], txns, base)

    def mark(self, name: str, txns: Iterable[Txn]) -> None:
        """Record the progress of an application without any rows."""
        delta = self._require(name)
        self._commit(name, self.schema(name), delta.metadata().partition_columns, [], txns)

    def _place(self, name: str, staging: Path, splits: int = 0) -> list[Path]:
        """Move files that Spark has written to the folders of their partitions."""
        table = self.folder / name
        placed = []
        for file in sorted(staging.rglob("*.parquet")):
            folders = file.relative_to(staging).parts[:-1]
            # A task gives its files the same name in different folders.
            name = "-".join((*folders[:splits], file.name)).lstrip("_")
            place = table.joinpath(*folders[splits:], name)
            place.parent.mkdir(parents=True, exist_ok=True)
            placed.append(file.rename(place))
        return placed

    def _add(self, name: str, path: Path, partition_by: Sequence[str]) -> AddAction:
        below = path.relative_to(self.folder / name)
        stat = path.stat()
        return AddAction(
            below.as_posix(),
            stat.st_size,
            _partition_of(below, partition_by),
            stat.st_mtime_ns // NANOS_PER_MS,
            data_change=True,
            stats=json.dumps(_stats_of(path, _indexed(name))),
        )

    def _commit(
        self,
        name: str,
        schema: StructType,
        partition_by: Sequence[str],
        actions: list[AddAction | RemoveAction],
        txns: Iterable[Txn],
        base: int | None = None,
    ) -> None:
        properties = CommitProperties(app_transactions=[Transaction(*txn) for txn in txns])
        columns = delta_schema(schema)
        delta = (
            None if self._delta(name) is None else DeltaTable(self.folder / name)
        )  # opened again, because the commit changes it
        if delta is None:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
            create_table_with_add_actions(
                str(self.folder / name),
                columns,
                cast("list[AddAction]", actions),
                partition_by=list(partition_by),
                commit_properties=properties,
            )
            return
        if base is not None and delta.version() != base:
            raise TableChanged(name)
        _need_partitions(name, delta, partition_by)
        try:
            _add_columns(delta, columns)
            delta.create_write_transaction(
                actions, "append", columns, list(partition_by), commit_properties=properties
            )
        except CommitFailedError:  # another writer has just removed one of the same files
            raise TableChanged(name) from None

    # ---- maintenance ---------------------------------------------------------------------------------

    def drop(self, name: str) -> None:
        """Delete a table that can be rebuilt.

        The log is removed in one step, because half a log could be neither read nor rebuilt. If the process
        is killed after that, `vacuum` deletes the rest.
        """
        with self.staging_folder(name) as staging:
            staging.parent.mkdir(exist_ok=True)
            (self.folder / name / LOG).rename(staging)
            self._opened.pop(name, None)
        shutil.rmtree(self.folder / name)

    def compact(self, name: str) -> int:
        """Merge small files of a partition. Returns the number of removed files."""
        metrics = self._require(name).optimize.compact(
            target_size=COMPACT_BYTES, writer_properties=WriterProperties(compression="ZSTD")
        )
        return int(metrics["numFilesRemoved"])

    def vacuum(self, name: str, keep_hours: int = KEEP_HOURS) -> list[str]:
        """Delete files that no version of the last hours names, and staging folders of killed jobs."""
        shutil.rmtree(self.folder / name / STAGING, ignore_errors=True)
        return self._require(name).vacuum(
            keep_hours, dry_run=False, enforce_retention_duration=keep_hours >= KEEP_HOURS, full=True
        )


# ---- files in the log ---------------------------------------------------------------------


def path_below(name: str, url: str) -> str:
    """The path of a file relative to the folder of its table, from its URL."""
    return unquote(url).rpartition(f"/{name}/")[2]


def delta_schema(schema: StructType) -> Schema:
    """The schema in the format of the log. Every column may be NULL."""
    fields = [{**field.jsonValue(), "nullable": True} for field in schema.fields]
    return Schema.from_json(json.dumps({"type": "struct", "fields": fields}))


def _need_partitions(name: str, delta: DeltaTable, wanted: Sequence[str]) -> None:
    """Raise if the partitioning differs: a table cannot have files of both."""
    known = delta.metadata().partition_columns
    if known != list(wanted):
        raise InvalidMessage(
            f"table {name} of an earlier version is partitioned by {', '.join(known) or 'nothing'}, not by"
            f" {', '.join(wanted) or 'nothing'} as now: delete its folder, and rebuild the tables with"
            " `postroom pipeline backfill`"
        )


def _add_columns(delta: DeltaTable, wanted: Schema) -> None:
    """Add the columns that a table of an earlier version lacks. They are NULL in its old rows."""
    known = {field.name for field in delta.schema().fields}
    new = [field for field in wanted.fields if field.name not in known]
    if new:
        delta.alter.add_columns(new)
        delta.update_incremental()


def _row_number() -> Column:
    """A number for a row of a Parquet file, the same at every read."""
    # By the whole path: a task gives its files of several dates the same name.
    return F.xxhash64("_metadata.file_path", "_metadata.row_index")


def _partition_of(path: Path, partition_by: Sequence[str]) -> dict[str, str | None]:
    found = dict(part.split("=", 1) for part in path.parts[:-1])
    values = {name: unquote(found[name]) for name in partition_by}
    return {name: None if value == NO_VALUE else value for name, value in values.items()}


def _indexed(name: str) -> tuple[str, ...]:
    return INDEXED + EXTRA_INDEXED.get(name, ())


def _write_options(name: str) -> dict[str, str]:
    return WRITE_OPTIONS | {f"{STATISTICS}#{column}": "true" for column in EXTRA_INDEXED.get(name, ())}


def _stats_of(path: Path, indexed: Sequence[str]) -> dict[str, Any]:
    """The number of rows, and the range and NULLs of some columns, from the file's footer."""
    footer = pq.read_metadata(path)
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for at, column in enumerate(footer.schema.names):
        if column not in (*indexed, *REQUIRED) or footer.schema.column(at).path != column:
            continue  # not indexed, or a field of a struct
        groups = [footer.row_group(n).column(at).statistics for n in range(footer.num_row_groups)]
        if not groups or any(group is None for group in groups):
            continue
        if all(group.has_null_count for group in groups):
            nulls[column] = sum(group.null_count for group in groups)
        if column in indexed and all(group.has_min_max for group in groups):
            low[column] = min(group.min for group in groups)
            high[column] = max(group.max for group in groups)
    return {"numRecords": footer.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls}


def _commit_of(actions: Sequence[Mapping[str, Any]]) -> Commit:
    adds, removes = ([action[kind] for action in actions if kind in action] for kind in ("add", "remove"))
    moved = all(not file["dataChange"] for file in (*adds, *removes))
    left = any(action.get("txn", {}).get("appId") == MAINTENANCE for action in actions)
    added, removed = (frozenset(unquote(file["path"]) for file in files) for files in (adds, removes))
    return Commit(added, removed, moved or left)


def _by_path(files: Iterable[DataFile]) -> dict[str, DataFile]:
    return {file.path: file for file in files}


def _files_of(delta: DeltaTable) -> list[DataFile]:
    rows = pa.table(delta.get_add_actions(flatten=True)).to_pylist()
    return [
        DataFile(
            unquote(row["path"]),
            row["size_bytes"],
            row["num_records"] or 0,
            {name: _as_text(value) for name, value in _prefixed(row, "partition.").items()},
            _prefixed(row, "min."),
            _prefixed(row, "max."),
            _prefixed(row, "null_count."),
        )
        for row in rows
    ]


def _prefixed(row: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}


def _as_text(value: object) -> str | None:
    return None if value is None else str(value)
