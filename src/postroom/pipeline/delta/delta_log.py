"""The logs of the tables: versions, files and commits, through the `deltalake` wheel. No Spark is started.

Rule 1: a commit is one file of the table's log. It adds files, removes files and records transactions
        atomically.
Rule 2: other writers are expected. Rows that were computed from one version are committed on top of that
        version. If another writer was faster, the commit is tried again on top of a version that differs only
        by maintenance of other files, and refused (`TableChanged`) otherwise.
Rule 3: the files of a large table stay in Arrow. Only the chosen ones become Python objects.
Rule 4: a table with a feature that changes what its rows are, such as deletion vectors, is not read; one with
        a feature that its writers have to observe is not written. Both errors name the feature.
"""

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final, Literal, NamedTuple, cast
from urllib.parse import unquote

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from pyspark.sql.types import StructType

from postroom.errors import InvalidMessage, TableChanged, shown
from postroom.pipeline.delta.storage import NO_ACCESS, Access, Storage

LOG: Final = "_delta_log"
LAST_CHECKPOINT: Final = "_last_checkpoint"
LISTED_MAX: Final = 4  # versions of a table whose file lists are cached
NANOS_PER_MS: Final = 1_000_000
COMMIT_TRIES_MAX: Final = 20  # of a commit that maintenance by other writers keeps overtaking
MAINTENANCE: Final = "retain ended at"
"""The application id of commits by which `retain` deletes rows. Downstream tables keep theirs."""
ROWS_WITHDRAWN: Final = "remade"
"""Of a silver table: the last version that withdrew rows. Downstream tables are rebuilt."""
UNNAMED: Final = "unnamed"
"""Of `silver_events`: the last version that added events without a type or organization."""
RENAMED: Final = "renamed"
"""Of `silver_messages`: the last version in which a known message got another type or organization."""

READ: Final = frozenset({"columnMapping", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"})
"""Reader features of a protocol that change no row, or only if they are in use: see `_read_features`."""
WRITTEN: Final = READ | {"appendOnly", "changeDataFeed", "checkConstraints", "generatedColumns", "invariants"}
"""The same of writers: see `_written_features`. delta-rs observes `appendOnly`."""
COLUMN_RULES: Final = {
    "delta.generationExpression": "generatedColumns",
    "delta.identity.start": "identityColumns",
    "delta.invariants": "invariants",
}
"""Metadata of a column that oblige writers, and the features that they belong to."""

Mode = Literal["append", "overwrite"]
Operation = Literal["WRITE", "MERGE", "DELETE", "PROGRESS"]
"""The operation of a commit, kept in its `userMetadata`: delta-rs itself records each of them as WRITE."""
FileAction = AddAction | RemoveAction


class Txn(NamedTuple):
    """The progress of an application, committed together with its rows."""

    app_id: str
    version: int


_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")  # of a table, which is also the name of its folder


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


def rows_of(files: Iterable[DataFile]) -> int:
    return sum(file.rows for file in files)


def removals(files: Iterable[DataFile]) -> list[RemoveAction]:
    """The actions that remove files, with their rows, at the current time."""
    now_ms = time.time_ns() // NANOS_PER_MS
    return [
        RemoveAction(file.path, True, now_ms, file.size, file.partition)  # noqa: FBT003 - it is data that changes
        for file in files
    ]


class Commit(NamedTuple):
    """What one version of a table changed."""

    added: dict[str, DataFile]
    removed: frozenset[str]
    is_maintenance: bool
    """Whether it changed no row, or only deleted rows for `retain`."""
    is_harmless: bool
    """Whether it changed no row and recorded no progress: a compaction, a new column."""


class CommitContent(NamedTuple):
    """The contents of one commit."""

    columns: Schema
    partition_by: Sequence[str]
    actions: Sequence[FileAction]
    txns: Sequence[Txn]
    mode: Mode
    is_blind: bool
    """Whether its rows were computed without those of the table."""

    @property
    def operation(self) -> Operation:
        """The name that people know from other engines. `retain` writes the rows that stay to other files."""
        kinds = {type(action) for action in self.actions}
        is_maintenance = MAINTENANCE in {txn.app_id for txn in self.txns}
        if RemoveAction in kinds and (kinds == {RemoveAction} or is_maintenance):
            return "DELETE"
        if self.mode == "append" and RemoveAction in kinds:
            return "MERGE"
        return "WRITE" if kinds or self.mode == "overwrite" else "PROGRESS"


class FileList:
    """The files of one version of a table."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows

    @classmethod
    def of(cls, delta: DeltaTable) -> "FileList":
        return cls(pa.table(delta.get_add_actions(flatten=True)))

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    @property
    def rows(self) -> int:
        return int(pc.sum(self._rows["num_records"]).as_py() or 0)

    @property
    def bytes(self) -> int:
        return int(pc.sum(self._rows["size_bytes"]).as_py() or 0)

    def extent(self, column: str) -> tuple[Any, Any] | None:
        """The lowest and the highest value of a column; None when the log does not know."""
        low, high = self._column("min", column), self._column("max", column)
        if low is None or high is None or low.null_count or high.null_count or not len(low):
            return None
        return pc.min(low).as_py(), pc.max(high).as_py()

    def newest(self, column: str) -> Any:
        """The highest known value of a column."""
        high = self._column("max", column)
        return None if high is None else pc.max(high).as_py()

    def may_have_nulls(self, column: str) -> bool:
        """Whether a column can have a NULL. A file without a count may have one."""
        nulls = self._column("null_count", column)
        return bool(len(self)) if nulls is None else bool(nulls.null_count or pc.max(nulls).as_py())

    def all(self) -> list[DataFile]:
        return [_file_of(row) for row in self._rows.to_pylist()]

    def overlapping(self, column: str, low: Any, high: Any) -> list[DataFile]:
        """The files that can hold a value between `low` and `high`. An unknown limit counts as yes."""
        return self.within(column, low, high).all()

    def within(self, column: str, low: Any, high: Any) -> "FileList":
        """The files whose range of the column overlaps `low` to `high`."""
        lowest, highest = self._column("min", column), self._column("max", column)
        if lowest is None or highest is None or low is None or high is None:
            return self
        meets = pc.and_(
            pc.fill_null(pc.less_equal(lowest, high), True),  # noqa: FBT003 - a value
            pc.fill_null(pc.greater_equal(highest, low), True),  # noqa: FBT003 - a value
        )
        return FileList(self._rows.filter(meets))

    def in_partitions(self, column: str, values: Iterable[str | None]) -> list[DataFile]:
        """The files of some values of a partition column."""
        known = self._rows[f"partition.{column}"].cast(pa.string())
        return FileList(self._rows.filter(pc.is_in(known, pa.array(list(values), pa.string())))).all()

    def partition_values(self, column: str) -> set[str | None]:
        return set(self._rows[f"partition.{column}"].cast(pa.string()).unique().to_pylist())

    def named(self, paths: Iterable[str]) -> list[DataFile]:
        """The files with these paths."""
        wanted = set(paths)
        if not wanted:
            return []
        mask = pa.array([unquote(path) in wanted for path in self._rows["path"].to_pylist()], pa.bool_())
        return FileList(self._rows.filter(mask)).all()

    def paths(self) -> set[str]:
        return {unquote(path) for path in self._rows["path"].to_pylist()}

    def _column(self, kind: str, column: str) -> Any:
        name = f"{kind}.{column}"
        return self._rows[name] if name in self._rows.column_names else None


class Logs:
    """The logs of the tables of one folder, each in a folder of its own name."""

    def __init__(self, folder: Path | str | Storage, access: Access = NO_ACCESS) -> None:
        """The folder is a path, or an address such as `s3a://bucket/tables`."""
        self.storage = folder if isinstance(folder, Storage) else Storage(folder, access)
        self._listed: dict[str, dict[tuple[str, int], FileList]] = {}
        """The files of some versions of each table, which never change."""
        self._newest: dict[str, DeltaTable] = {}
        """The last known version of each table. Pinned copies share it: to open it means to read the log."""
        self._opening: defaultdict[str, Lock] = defaultdict(Lock)
        """Of each table: steps that need its new version wait for the one that opens it."""
        self._opened: dict[str, DeltaTable | None] = {}
        """Of pinned tables, the version of each that is used."""
        self._is_pinned = False

    def pin(self) -> None:
        """Keep each table at its newest version at the time of first use."""
        self._opened, self._is_pinned = {}, True

    @property
    def folder(self) -> Path:
        """The folder, if it lies on this machine."""
        if self.storage.local is None:
            raise InvalidMessage(f"{self.storage} is not a folder of this machine")
        return self.storage.local

    def names(self) -> list[str]:
        """Every table with at least one commit."""
        folders = [name for name in self.storage.folders() if _NAME.fullmatch(name)]
        return [name for name in folders if self.storage.files(f"{name}/{LOG}", deep=False)]

    def require_tables(self) -> None:
        """Raise if the folder has no tables."""
        if not self.names():
            raise InvalidMessage(f"there are no tables in {self.storage}")

    # ---- versions --------------------------------------------------------------------------------------

    def exists(self, name: str) -> bool:
        return self._delta(name) is not None

    def version(self, name: str) -> int:
        """The number of the last commit; -1 when there is none."""
        delta = self._delta(name)
        return -1 if delta is None else delta.version()

    def table_id(self, name: str) -> str:
        """The id of a table, which never changes."""
        return str(self._require(name).metadata().id)

    def partitions(self, name: str) -> list[str]:
        """The names of the partition columns."""
        return list(self._require(name).metadata().partition_columns)

    def last_txn(self, name: str, app_id: str) -> int:
        """The last version that an application recorded in this table; -1 when there is none."""
        delta = self._delta(name)
        found = None if delta is None else delta.transaction_version(app_id)
        return -1 if found is None else found

    def is_withdrawn(self, source: str, name: str) -> bool:
        """Whether rows were withdrawn from `source` after table `name` read it: then `name` is rebuilt."""
        return self.last_txn(source, ROWS_WITHDRAWN) > self.last_txn(name, source) >= 0

    def schema(self, name: str) -> StructType:
        """The columns of a table, its partition columns included."""
        return StructType.fromJson(json.loads(self._require(name).schema().to_json()))

    # ---- files -----------------------------------------------------------------------------------------

    def listing(self, name: str, version: int | None = None) -> FileList:
        """The files of a version; of the current one by default. The table has to exist."""
        delta = self._require(name)
        is_current = version is None or version == delta.version()
        which = (str(delta.metadata().id), delta.version() if version is None else version)
        known = self._listed.setdefault(name, {})
        found = known.get(which)
        if found is None:
            # The current version is not opened again: another writer may have committed meanwhile.
            chosen = delta if is_current else self._at(name, version)
            found = FileList.of(chosen)
            if len(known) >= LISTED_MAX:
                known.clear()
            known[which] = found
        return found

    def files(self, name: str, version: int | None = None) -> list[DataFile]:
        """The files of a version as Python objects; empty if the table does not exist."""
        return self.listing(name, version).all() if self.exists(name) else []

    def row_count(self, name: str) -> int:
        """The number of rows by the statistics of the log. The files are not listed."""
        delta = self._delta(name)
        return 0 if delta is None else int(delta.count())

    def changed(
        self, name: str, since: int, until: int | None = None
    ) -> tuple[list[DataFile], list[DataFile]]:
        """The files that were added and removed between two versions.

        Maintenance does not count: neither a compaction, which moves rows to other files, nor `retain`. Only
        the commits between the versions are read. If one of them is no longer in the log, or has moved old
        and new rows into one file, rows that were only moved count as removed and added.
        """
        until = self.version(name) if until is None else until
        if since < 0:
            return (self.files(name, until), []) if until >= 0 else ([], [])
        followed = self._followed(name, range(since + 1, until + 1))
        if followed is None:
            before, now = self.listing(name, since), self.listing(name, until)
            new, gone = now.paths() - before.paths(), before.paths() - now.paths()
            return now.named(new), before.named(gone)
        added, removed, moved = followed
        # An old row may have been moved before it was removed.
        old = self.listing(name, since).named(removed) if removed else []
        return list(added.values()), old + [moved[path] for path in removed if path in moved]

    def _followed(
        self, name: str, versions: Iterable[int]
    ) -> tuple[dict[str, DataFile], list[str], dict[str, DataFile]] | None:
        """The files of new rows, the removed files of old rows, and files to which old rows were moved."""
        added: dict[str, DataFile] = {}
        removed: list[str] = []
        moved: dict[str, DataFile] = {}
        for version in versions:
            commit = self.read_commit(name, version)
            if commit is None:
                return None
            new = commit.removed & added.keys()
            if not commit.is_maintenance:
                removed += commit.removed - new
                added = {path: file for path, file in added.items() if path not in new} | commit.added
            elif not new:
                moved |= commit.added
            elif new == commit.removed:
                added = {path: file for path, file in added.items() if path not in new} | commit.added
            else:
                return None
        return added, removed, moved

    def read_commit(self, name: str, version: int) -> Commit | None:
        """What a version changed; None when its commit is no longer in the log."""
        try:
            lines = self.storage.read(f"{name}/{log_file(version)}").splitlines()
        except FileNotFoundError:
            return None
        return _commit_of([json.loads(line) for line in lines])

    def file_exists(self, name: str, file: DataFile) -> bool:
        """Whether a file still exists. `vacuum` may have deleted a file of an old version."""
        return self.storage.size(f"{name}/{file.path}") is not None

    # ---- opening ---------------------------------------------------------------------------------------

    def _delta(self, name: str) -> DeltaTable | None:
        """The last version of a table; of pinned tables, the one that was the last at their first use."""
        if self._is_pinned and name in self._opened:
            return self._opened[name]
        with self._opening[name]:
            opened = self._newest.get(name)
            if opened is None or not self._is_last(name, opened):
                opened = self._latest(name)
                if opened is not None:
                    self._newest[name] = opened
        if self._is_pinned:
            self._opened[name] = opened
        return opened

    def _latest(self, name: str) -> DeltaTable | None:
        if not _NAME.fullmatch(name):  # such as a path to another folder
            return None
        try:
            return self._at(name, None)
        except TableNotFoundError:
            return None

    def _at(self, name: str, version: int | None) -> DeltaTable:
        uri, options = self.storage.uri_of(name), self.storage.options
        delta = DeltaTable(uri, version=version, storage_options=options)
        if features := _read_features(delta):
            raise InvalidMessage(f"table {name} cannot be read: it uses {features}")
        return delta

    def _writable(self, name: str) -> DeltaTable:
        """The last version of a table that may be written."""
        delta = self._require(name)
        _need_writable(name, delta)
        return delta

    def _is_last(self, name: str, delta: DeltaTable) -> bool:
        """Whether a version is still the last one. Opening the table would read its whole log."""
        this, following = (self.storage.size(f"{name}/{log_file(delta.version() + step)}") for step in (0, 1))
        return this is not None and following is None

    def _require(self, name: str) -> DeltaTable:
        delta = self._delta(name)
        if delta is None:
            raise InvalidMessage(f"there is no table {name} in {self.storage}")
        return delta

    # ---- commits ---------------------------------------------------------------------------------------

    def _commit(
        self,
        name: str,
        schema: StructType,
        partition_by: Sequence[str],
        actions: Sequence[FileAction],
        txns: Iterable[Txn],
        base: int | None,
        mode: Mode = "append",
    ) -> None:
        """Commit actions on top of version `base`, or of the last version if it is None."""
        change = CommitContent(delta_schema(schema), partition_by, actions, list(txns), mode, base is None)
        removed = {action.path for action in actions if isinstance(action, RemoveAction)}
        delta = self._delta(name)
        for _ in range(COMMIT_TRIES_MAX):
            if delta is None:
                if base not in (None, -1):
                    raise TableChanged(name)
                return self._create(name, change)
            _need_writable(name, delta)
            if base is not None and delta.version() != base:
                self._require_harmless(name, range(base + 1, delta.version() + 1), removed)
            if mode == "append":
                _need_partitions(name, delta, partition_by)
            if _write(self.storage, name, delta, change):
                return None
            delta = self._latest(name)
        raise TableChanged(name)

    def _create(self, name: str, change: CommitContent) -> None:
        if self.storage.local is not None:
            (self.storage.local / name).mkdir(parents=True, exist_ok=True)
        try:
            create_table_with_add_actions(
                self.storage.uri_of(name),
                change.columns,
                cast("list[AddAction]", list(change.actions)),
                partition_by=list(change.partition_by),
                storage_options=self.storage.options,
                commit_properties=_properties(change),
            )
        except DeltaError:
            if self._latest(name) is None:
                raise
            raise TableChanged(name) from None  # another writer has created it just now

    def forget(self, name: str) -> None:
        """Release the memory that a table takes."""
        self._newest.pop(name, None)
        self._opened.pop(name, None)
        self._listed.pop(name, None)

    def _require_harmless(self, name: str, versions: Iterable[int], removed: set[str]) -> None:
        """Raise if one of these versions changed rows, or removed a file that is to be removed."""
        for version in versions:
            commit = self.read_commit(name, version)
            if commit is None or not commit.is_harmless or commit.removed & removed:
                raise TableChanged(name)


def _write(storage: Storage, name: str, delta: DeltaTable, change: CommitContent) -> bool:
    """Commit the version after that of `delta`; false if this has to be tried on top of the last one.

    New columns, and the other partitions of an overwrite, are a commit before it.
    """
    is_overwrite = change.mode == "overwrite"
    try:
        known = {field.name for field in delta.schema().fields}
        new = [field for field in change.columns.fields if field.name not in known]
        if new and not is_overwrite:  # a table of an earlier version; they are NULL in its old rows
            delta.alter.add_columns(new)
            return False
        if is_overwrite and not _has_partitions(delta, change.partition_by):
            delta = _emptied(storage, name, delta.version(), change)
        delta.create_write_transaction(
            list(change.actions),
            change.mode,
            change.columns if is_overwrite else delta.schema(),
            list(change.partition_by),
            commit_properties=_properties(change),
        )
    except CommitFailedError:  # another writer was faster
        return False
    return True


def _emptied(storage: Storage, name: str, version: int, change: CommitContent) -> DeltaTable:
    """The version after this one, without rows and with the columns and partitions of a change.

    delta-rs changes partitions only by a write of rows, and here files are committed. A job that is killed
    before the next commit leaves an empty table, whose transactions still say that it has to be rebuilt.
    """
    delta = DeltaTable(storage.uri_of(name), version=version, storage_options=storage.options)
    write_deltalake(
        delta,
        pa.schema(change.columns.to_arrow()).empty_table(),
        mode="overwrite",
        schema_mode="overwrite",
        partition_by=list(change.partition_by),
        commit_properties=_properties(change._replace(txns=())),
    )
    return delta


def _properties(change: CommitContent) -> CommitProperties:
    return CommitProperties(
        custom_metadata={"userMetadata": change.operation},
        app_transactions=[Transaction(*txn) for txn in change.txns],
        max_commit_retries=0,
    )


def path_below(name: str, url: str) -> str:
    """The path of a file relative to the folder of its table, from its URL."""
    return unquote(url).rpartition(f"/{name}/")[2]


def delta_schema(schema: StructType) -> Schema:
    """The schema in the format of the log. Every column may be NULL."""
    fields = [{**field.jsonValue(), "nullable": True} for field in schema.fields]
    return Schema.from_json(json.dumps({"type": "struct", "fields": fields}))


def log_file(version: int) -> str:
    return f"{LOG}/{version:020d}.json"


def _read_features(delta: DeltaTable) -> str:
    """The features in use that change which rows a file has; empty when there are none."""
    features = set(delta.protocol().reader_features or ()) - READ
    if delta.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
        features.add("columnMapping")
    return ", ".join(sorted(features))


def _need_writable(name: str, delta: DeltaTable) -> None:
    """Raise if a feature in use asks something of writers that this one does not do."""
    settings = delta.metadata().configuration
    features = set(delta.protocol().writer_features or ()) - WRITTEN
    features |= {
        COLUMN_RULES[rule] for field in delta.schema().fields for rule in COLUMN_RULES.keys() & field.metadata
    }
    if any(key.startswith("delta.constraints.") for key in settings):
        features.add("checkConstraints")
    if settings.get("delta.enableChangeDataFeed") == "true":
        features.add("changeDataFeed")
    if features:
        raise InvalidMessage(f"table {name} cannot be written: it uses {', '.join(sorted(features))}")


def _need_partitions(name: str, delta: DeltaTable, wanted: Sequence[str]) -> None:
    """Raise if the partitioning differs: a table cannot have files of both."""
    if not _has_partitions(delta, wanted):
        known = delta.metadata().partition_columns
        raise InvalidMessage(
            f"table {name} of an earlier version is partitioned by {', '.join(known) or 'nothing'}, not by"
            f" {', '.join(wanted) or 'nothing'} as now: delete its folder, and rebuild the tables with"
            " `postroom pipeline backfill`"
        )


def _has_partitions(delta: DeltaTable, wanted: Sequence[str]) -> bool:
    """Whether a table is partitioned by these columns."""
    return delta.metadata().partition_columns == list(wanted)


def _commit_of(actions: Sequence[Mapping[str, Any]]) -> Commit:
    adds, removes = ([action[kind] for action in actions if kind in action] for kind in ("add", "remove"))
    txns = {action["txn"]["appId"] for action in actions if "txn" in action}
    moved = all(not file["dataChange"] for file in (*adds, *removes))
    added = {(file := _logged_file(add)).path: file for add in adds}
    removed = frozenset(unquote(file["path"]) for file in removes)
    return Commit(added, removed, moved or MAINTENANCE in txns, moved and not txns)


def _logged_file(add: Mapping[str, Any]) -> DataFile:
    """A file of the log, from the line that added it."""
    stats = json.loads(add.get("stats") or "{}")
    parts = ((stats.get(kind) or {}) for kind in ("minValues", "maxValues", "nullCount"))
    partition = {name: value or None for name, value in add["partitionValues"].items()}
    return DataFile(_checked_path(add["path"]), add["size"], stats.get("numRecords") or 0, partition, *parts)


def _checked_path(logged: str) -> str:
    """The path of a file of a log. The log of another writer may name any file of this machine."""
    path = unquote(logged)
    if path.startswith("/") or "://" in path or ".." in path.split("/"):
        raise InvalidMessage(f"the log of the table names a file outside of its folder: {shown(path)}")
    return path


def _file_of(row: Mapping[str, Any]) -> DataFile:
    return DataFile(
        _checked_path(row["path"]),
        row["size_bytes"],
        row["num_records"] or 0,
        {name: None if value is None else str(value) for name, value in _prefixed(row, "partition.")},
        *({name: value for name, value in _prefixed(row, kind) if value is not None} for kind in _STATS),
    )


_STATS: Final = ("min.", "max.", "null_count.")


def _prefixed(row: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    return ((name.removeprefix(prefix), value) for name, value in row.items() if name.startswith(prefix))
