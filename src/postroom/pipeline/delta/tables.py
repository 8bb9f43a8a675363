"""Delta tables without a JVM jar: Spark writes the Parquet files, the `deltalake` wheel commits them.

Rule 1: a file is visible when a commit names it. Files that a killed job left behind are invisible to
        readers, and `vacuum` deletes them.
Rule 2: each load has a folder of its own, in which Spark writes: two jobs of Spark in one folder delete each
        other's temporary files. The files are then moved to their place in the table, under names that Spark
        makes unique.
Rule 3: a table may have several writers. Each commits on top of what it has read; see `delta_log`.
Rule 4: the values of partition columns are those of the log, wherever a file lies.
Rule 5: the rows that were written are counted while they are written, and compared with those of the files.
"""

import copy
import io
import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, Self
from urllib.parse import unquote

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from deltalake import WriterProperties
from deltalake.transaction import AddAction
from pyspark.sql import Column, DataFrame, DataFrameWriter, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import StructType

from postroom.errors import Unavailable
from postroom.pipeline import paths
from postroom.pipeline.delta import arrow_files
from postroom.pipeline.delta.arrow_files import FILE, NO_VALUE, ROW
from postroom.pipeline.delta.delta_log import NANOS_PER_MS, DataFile, FileAction, Logs, Mode, Txn, removals
from postroom.pipeline.delta.storage import NO_ACCESS, Access, Storage, StoredFile
from postroom.pipeline.schema import REQUIRED

LOAD: Final = "load"  # the beginning of the name of the folder of a load
COPIES: Final = "copies"  # the beginning of the name of a folder of temporary files
SPLIT: Final = "split"  # a column that is not stored
INDEXED: Final = ("message_id", "root_message_id", "ts_us", "first_us", "last_us", "hour_us", "minute_us")
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
KEEP_HOURS: Final = 168  # `vacuum` keeps the files of versions of this age, for their readers
COMPACT_BYTES: Final = 128 << 20
FILES_AT_ONCE: Final = 16  # whose footers are read, and that are moved, at a time


class StagedFiles(NamedTuple):
    """Files that are written but not committed yet."""

    schema: StructType
    partition_by: tuple[str, ...]
    adds: list[AddAction]

    @property
    def rows(self) -> int:
        return sum(json.loads(add.stats)["numRecords"] for add in self.adds)


class Split(NamedTuple):
    """Groups of rows that go to different files."""

    number: Column
    """The group of a row."""
    groups: Sequence[int]
    """The groups that rows are expected in. Rows of all other groups share files."""
    first_tasks: int = 1
    """How many tasks write the first of the groups, which has most rows."""
    tasks: int = 1
    """How many tasks write each other group."""

    def repartitioned(self, df: DataFrame) -> DataFrame:
        """The rows in tasks of one group each. A task costs far more than its rows if these are few."""
        place = F.array_position(F.array(*map(F.lit, self.groups)), self.number) - 1  # -1 is any other group
        spread = F.xxhash64(df.columns[0])
        first = F.pmod(spread, F.lit(self.first_tasks))
        other = F.lit(self.first_tasks) + F.pmod(place - 1, F.lit(len(self.groups))) * self.tasks
        task = F.when(place == 0, first).otherwise(other + F.pmod(spread, F.lit(self.tasks)))
        n = self.first_tasks + len(self.groups) * self.tasks
        return df.repartitionById(n, task.cast("int"))


class Tables(Logs):
    """The tables of one folder: their logs, and their rows by Spark."""

    def __init__(self, folder: Path | str | Storage, access: Access = NO_ACCESS) -> None:
        super().__init__(folder, access)
        self._rows: dict[tuple[str, ...], DataFrame] | None = None
        """The rows of files that were read since `small` was opened; None while it is not."""

    def pinned(self) -> Self:
        """A copy that keeps each table at its newest version at the time of first use."""
        pinned = copy.copy(self)
        pinned.pin()
        return pinned

    def values(self, name: str, column: str) -> set[Any]:
        """The distinct values of a column with few of them. No Spark is started."""
        found: set[Any] = set()
        for file in self.files(name):
            read = self._parquet(name, file.path).read(columns=[column])
            found.update(read.column(column).unique().to_pylist())
        return found

    def _parquet(self, name: str, path: str) -> pq.ParquetFile:
        return pq.ParquetFile(f"{name}/{path}", filesystem=self.storage.fs)

    # ---- reading -------------------------------------------------------------------------------------

    def profile(self, input_bytes: int) -> AbstractContextManager[None]:
        """`small` if the tables and the input are small; nothing otherwise."""
        return self.small() if self.is_small_with(input_bytes) else nullcontext()

    def is_small_with(self, input_bytes: int) -> bool:
        """Whether the tables and an input are so small that this process reads and writes their files."""
        left = paths.SMALL_BYTES - input_bytes
        for name in self.names():  # one large table is enough: its files need not be listed twice
            if left < 0:
                return False
            left -= self.listing(name).bytes
        return left >= 0

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
        chosen = self.files(name) if files is None else list(files)
        if self._rows is not None:
            return self._numbered(spark, name, chosen).drop(FILE, ROW)
        return self._scan(spark, name, chosen)

    def read_with_file(self, spark: SparkSession, name: str, files: list[DataFile]) -> DataFrame:
        """The rows of files, each with the URL of its `file`."""
        if self._rows is not None:
            return self._numbered(spark, name, files).drop(ROW)
        # By the whole path: a task gives its files of several days the same name.
        return self._scan(spark, name, files, {FILE: F.col("_metadata.file_path")})

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
        return self._scan(spark, name, files, {ROW: F.xxhash64("_metadata.file_path", "_metadata.row_index")})

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
        schema = self.schema(name)
        opened = (
            (f"{self.storage.place}/{name}/{file.path}", self._parquet(name, file.path), file.partition)
            for file in files
        )
        columns = arrow_files.as_nullable(schema).add(FILE, "string").add(ROW, "long")
        return spark.createDataFrame(convert(arrow_files.read_rows(opened, schema)), columns)

    def _scan(
        self,
        spark: SparkSession,
        name: str,
        chosen: list[DataFile],
        extra: Mapping[str, Column] | None = None,
    ) -> DataFrame:
        """The rows of files, with the `extra` columns of each row.

        Spark finds the values of partition columns in the folders of a file, if all files have the same
        folders. Files are therefore read by their layout.
        """
        schema = self.schema(name)
        if not chosen:
            nothing = spark.createDataFrame([], schema)
            return nothing.withColumns({name: F.lit(None) for name in extra}) if extra else nothing
        layouts: dict[tuple[Any, ...], list[DataFile]] = defaultdict(list)
        for file in chosen:
            layouts[_layout(file)].append(file)
        parts = [
            self._scan_layout(spark, name, schema, files) for _, files in sorted(layouts.items(), key=str)
        ]
        columns: list[Column | str] = list(schema.names)
        columns += [column.alias(name) for name, column in (extra or {}).items()]
        chosen_rows = [part.select(*columns) for part in parts]
        return reduce(lambda some, others: some.unionByName(others), chosen_rows)

    def _scan_layout(
        self, spark: SparkSession, name: str, schema: StructType, files: list[DataFile]
    ) -> DataFrame:
        paths = [self.storage.spark_path(f"{name}/{file.path}") for file in files]
        folder = self.storage.spark_path(name)
        if _has_partition_folders(files[0]):
            return spark.read.schema(schema).option("basePath", folder).parquet(*paths)
        stored = StructType([field for field in schema.fields if field.name not in files[0].partition])
        rows = spark.read.schema(stored).option("recursiveFileLookup", "true").parquet(*paths)
        values = {
            column: F.lit(value).cast(schema[column].dataType) for column, value in files[0].partition.items()
        }
        return rows.withColumns(values) if values else rows

    # ---- writing -------------------------------------------------------------------------------------

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
        split: Split | None = None,
        txns: Iterable[Txn] = (),
        base: int | None = None,
        mode: Mode = "append",
    ) -> None:
        """Replace the rows of the removed files, in one commit.

        For `split` see `stage`, for `base` and `mode` see `commit`.
        """
        staged = self.stage(name, df, partition_by=partition_by, split=split)
        self.commit(name, staged, removed, txns=txns, base=base, mode=mode)

    def stage(
        self, name: str, df: DataFrame, *, partition_by: Sequence[str] = (), split: Split | None = None
    ) -> StagedFiles:
        """Write files for a later commit. Until then no reader sees them.

        Rows that differ in their `split` go to different files.
        """
        if self._rows is not None:
            return self._write_small(name, df, partition_by, split)
        counted = Observation()
        rows = df if split is None else split.repartitioned(df)
        rows = rows.observe(counted, F.count(F.lit(1)).alias("rows"))
        adds = self._written(
            name, lambda folder: self._writer(name, rows, partition_by).parquet(folder), partition_by
        )
        staged = StagedFiles(df.schema, tuple(partition_by), adds)
        require_rows(name, staged, counted.get["rows"])
        return staged

    def stage_in(self, name: str, df: DataFrame, partition: Mapping[str, str]) -> list[AddAction]:
        """Write files of one partition, whose values are not columns of the rows.

        Spark then need not find the partition of each row. Several partitions may be written at once. The
        caller compares the number of rows.
        """
        if self._rows is not None:
            given = {column: F.lit(value).cast("date") for column, value in partition.items()}
            return self._write_small(name, df.withColumns(given), tuple(partition), None).adds
        below = "/".join(f"{column}={value}" for column, value in partition.items())
        writer = self._writer(name, df)
        return self._written(name, lambda folder: writer.parquet(f"{folder}/{below}"), tuple(partition))

    def _writer(self, name: str, df: DataFrame, partition_by: Sequence[str] = ()) -> DataFrameWriter:
        indexed = {f"{STATISTICS}#{column}": "true" for column in EXTRA_INDEXED.get(name, ())}
        return df.write.options(**WRITE_OPTIONS, **indexed).partitionBy(*partition_by)

    def _written(
        self, name: str, write: Callable[[str], None], partition_by: Sequence[str]
    ) -> list[AddAction]:
        """The files that Spark writes to a new folder, with their statistics, after a move to the table."""
        load = f"{name}/{LOAD}-{uuid.uuid4().hex}"
        try:
            write(self.storage.spark_path(load))
            files = [
                file._replace(path=file.path.removeprefix(f"{load}/"))
                for file in self.storage.files(load)
                if file.path.endswith(".parquet")  # and not a checksum
            ]
            with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="files") as pool:
                footers = list(pool.map(lambda file: self._parquet(load, file.path).metadata, files))
                names = [file.path for file in files]
                list(pool.map(lambda path: self.storage.move(f"{load}/{path}", f"{name}/{path}"), names))
        finally:
            self.storage.delete_folder(load)
        return [_add(name, file, footer, partition_by) for file, footer in zip(files, footers, strict=True)]

    def _write_small(
        self, name: str, df: DataFrame, partition_by: Sequence[str], split: Split | None
    ) -> StagedFiles:
        """Write the rows of a small table in this process."""
        rows = (df if split is None else df.withColumn(SPLIT, split.number)).toArrow()
        files = arrow_files.files_of(
            rows,
            partition_by=partition_by,
            split_by=() if split is None else (SPLIT,),
            dictionary=set(df.columns).difference(DISTINCT, VARIED),
            statistics=(*_indexed(name), *REQUIRED),
        )
        load, now_ms = f"part-{uuid.uuid4().hex}", time.time_ns() // NANOS_PER_MS
        adds = []
        for folder, groups, data in files:
            path = "/".join((*folder, "-".join((load, *groups)) + ".parquet"))
            self.storage.write(f"{name}/{path}", data)
            footer = pq.read_metadata(io.BytesIO(data))
            adds.append(_add(name, StoredFile(path, len(data), now_ms), footer, partition_by))
        staged = StagedFiles(df.schema, tuple(partition_by), adds)
        require_rows(name, staged, rows.num_rows)
        return staged

    @contextmanager
    def copies(self, name: str, *, is_here: bool = False) -> Iterator[str]:
        """A folder for temporary files, as Spark opens it. `vacuum` deletes those of killed jobs.

        It is a folder of the table. If Spark runs on this machine (`is_here`), copies for a small table at an
        address stay here, so that Spark needs no jar for that address.
        """
        if is_here and self.is_small and self.storage.local is None:
            with TemporaryDirectory(prefix="postroom-") as here:
                yield f"{here}/{COPIES}"
            return
        folder = f"{name}/{COPIES}-{uuid.uuid4().hex}"
        try:
            yield self.storage.spark_path(folder)
        finally:
            self.storage.delete_folder(folder)

    def discard(self, name: str, adds: Iterable[AddAction]) -> None:
        """Delete data files whose commit was refused or given up."""
        for add in adds:
            self.storage.delete(f"{name}/{add.path}")

    def commit(
        self,
        name: str,
        staged: StagedFiles,
        removed: Iterable[DataFile] = (),
        *,
        txns: Iterable[Txn] = (),
        base: int | None = None,
        mode: Mode = "append",
    ) -> None:
        """Add the staged files to the table, and remove others.

        `base` is the version from which the rows were computed. If another writer has changed rows since,
        nothing is committed and `TableChanged` is raised. Rows that do not depend on the table need no base.
        With `overwrite`, all other files, columns and partitions leave the table, which keeps its id.
        """
        actions: list[FileAction] = [*staged.adds, *removals(removed)]
        self._commit(name, staged.schema, staged.partition_by, actions, txns, base, mode)

    def mark(self, name: str, txns: Iterable[Txn], *, base: int | None = None) -> None:
        """Record the progress of an application without any rows."""
        self._commit(name, self.schema(name), self.partitions(name), [], txns, base)

    # ---- maintenance ---------------------------------------------------------------------------------

    def compact(self, name: str) -> int:
        """Merge small files of a partition. Returns the number of removed files."""
        metrics = self._writable(name).optimize.compact(
            target_size=COMPACT_BYTES, writer_properties=WriterProperties(compression="ZSTD")
        )
        return int(metrics["numFilesRemoved"])

    def vacuum(self, name: str, keep_hours: int = KEEP_HOURS) -> list[str]:
        """Delete files that no version of the last hours names."""
        return self._require(name).vacuum(
            keep_hours, dry_run=False, enforce_retention_duration=keep_hours >= KEEP_HOURS, full=True
        )


def require_rows(name: str, staged: StagedFiles, rows: int) -> None:
    """Raise if the staged files have other rows than those that were written."""
    if staged.rows != rows:
        raise Unavailable(
            f"the files of {name} have {staged.rows} rows, and {rows} were written: nothing was committed"
        )


# ---- files ---------------------------------------------------------------------------------------------


def _layout(file: DataFile) -> tuple[Any, ...]:
    """Files of one layout are read together."""
    names = tuple(part.partition("=")[0] for part in file.path.split("/")[:-1])
    return names if _has_partition_folders(file) else ("", *file.partition.items())


def _has_partition_folders(file: DataFile) -> bool:
    """Whether Spark finds the partition of a file in the names of its folders."""
    folders = [part.partition("=") for part in file.path.split("/")[:-1]]
    found = {name: unquote(value) for name, _, value in folders}
    known = {name: NO_VALUE if value is None else value for name, value in file.partition.items()}
    return all(sign for _, sign, _ in folders) and known.items() <= found.items()


def _partition_of(path: str, partition_by: Sequence[str]) -> dict[str, str | None]:
    found = dict(part.split("=", 1) for part in path.split("/")[:-1])
    values = {name: unquote(found[name]) for name in partition_by}
    return {name: None if value == NO_VALUE else value for name, value in values.items()}


def _indexed(name: str) -> tuple[str, ...]:
    return INDEXED + EXTRA_INDEXED.get(name, ())


def _add(name: str, file: StoredFile, footer: pq.FileMetaData, partition_by: Sequence[str]) -> AddAction:
    stats = json.dumps(_stats_of(footer, _indexed(name)))
    partition = _partition_of(file.path, partition_by)
    return AddAction(file.path, file.size, partition, file.modified_ms, data_change=True, stats=stats)


def _stats_of(footer: pq.FileMetaData, indexed: Sequence[str]) -> dict[str, Any]:
    """The number of rows, and the range and NULLs of some columns."""
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
