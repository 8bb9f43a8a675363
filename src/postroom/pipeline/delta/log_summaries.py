"""What a run that finds nothing new needs of a table's log, in time that hardly grows with its files.

`deltalake` reads every file of a table when it opens it. This module reads the version, the transactions and
the numbers of rows: two columns of the last checkpoint, and the commits after it.

Rule 1: the log is the only truth. Nothing else is stored.
Rule 2: a log with anything that is not understood here is left to `deltalake`: a checkpoint in several parts,
        features of a later protocol, a file without statistics, a missing commit.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from postroom.pipeline.delta.delta_log import LAST_CHECKPOINT, LOG, log_file
from postroom.pipeline.delta.storage import Storage
from postroom.pipeline.delta.tables import Tables

READER_VERSION: Final = 1  # the last one without features such as column mapping and deletion vectors
COMMITS_MAX: Final = 1_000  # commits after a checkpoint; a table with more is left to `deltalake`
_NUM_RECORDS: Final = r'"numRecords":\s*(?P<n>[0-9]+)'


class LogSummary(NamedTuple):
    """The last version of a table."""

    version: int
    rows: int
    txns: dict[str, int]


class _NotUnderstood(Exception):
    pass


class SummarizedTables(Tables):
    """Tables whose versions, transactions and numbers of rows are read from summaries, at their first use."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._summaries: dict[str, LogSummary | None] = {}

    def version(self, name: str) -> int:
        found = self._summary(name)
        return super().version(name) if found is None else found.version

    def last_txn(self, name: str, app_id: str) -> int:
        found = self._summary(name)
        return super().last_txn(name, app_id) if found is None else found.txns.get(app_id, -1)

    def row_count(self, name: str) -> int:
        found = self._summary(name)
        return super().row_count(name) if found is None else found.rows

    def _summary(self, name: str) -> LogSummary | None:
        if name not in self._summaries:
            self._summaries[name] = summary_of(self.storage, name)
        return self._summaries[name]


def summary_of(storage: Storage, name: str) -> LogSummary | None:
    """The summary of a table; None when there is no table, or its log has to be read by `deltalake`."""
    try:
        return _summarized(storage, name)
    except (_NotUnderstood, FileNotFoundError, json.JSONDecodeError, pa.ArrowException, KeyError):
        return None


def _summarized(storage: Storage, name: str) -> LogSummary:
    checkpoint = _last_checkpoint(storage, name)
    version = -1 if checkpoint is None else checkpoint
    commits = list(_commits_after(storage, name, version))
    if not commits and (checkpoint is None or storage.size(f"{name}/{log_file(version)}") is None):
        raise _NotUnderstood  # no table, or `_last_checkpoint` is outdated
    before = None if checkpoint is None else _Checkpoint(storage, name, checkpoint)
    txns = {} if before is None else before.txns()
    added: dict[str, int] = {}
    removed: set[str] = set()
    for commit in commits:
        for action in commit:
            _apply(action, txns, added, removed)
    rows = sum(added.values()) + (0 if before is None else before.rows_besides(removed | added.keys()))
    return LogSummary(version + len(commits), rows, txns)


def _last_checkpoint(storage: Storage, name: str) -> int | None:
    path = f"{name}/{LOG}/{LAST_CHECKPOINT}"
    if storage.size(path) is None:
        return None
    noted = json.loads(storage.read(path))
    if noted.get("parts") or noted.get("v2Checkpoint"):
        raise _NotUnderstood
    return int(noted["version"])


def _commits_after(storage: Storage, name: str, version: int) -> Iterator[list[dict[str, Any]]]:
    """The actions of each later commit."""
    for number in range(version + 1, version + 1 + COMMITS_MAX):
        path = f"{name}/{log_file(number)}"
        if storage.size(path) is None:
            return
        yield [json.loads(line) for line in storage.read(path).splitlines()]
    raise _NotUnderstood


class _Checkpoint:
    """The checkpoint of one version. Only the columns that are asked for are read."""

    def __init__(self, storage: Storage, name: str, version: int) -> None:
        self._file = pq.ParquetFile(f"{name}/{LOG}/{version:020d}.checkpoint.parquet", filesystem=storage.fs)
        [reader] = self._field("protocol", "minReaderVersion").to_pylist()
        _need_reader(reader)

    def txns(self) -> dict[str, int]:
        apps, versions = (self._field("txn", field).to_pylist() for field in ("appId", "version"))
        return dict(zip(apps, versions, strict=True))

    def rows_besides(self, paths: set[str]) -> int:
        """The rows of files that are not among `paths`."""
        stats = self._field("add", "stats")
        if paths:
            known = pc.is_in(self._field("add", "path"), pa.array(sorted(paths), pa.string()))
            stats = stats.filter(pc.invert(known))
        counts = pc.struct_field(pc.extract_regex(stats, _NUM_RECORDS), "n")
        if counts.null_count:
            raise _NotUnderstood
        return int(pc.sum(counts.cast(pa.int64())).as_py() or 0)

    def _field(self, action: str, field: str) -> Any:
        """A field of all actions of one kind."""
        return pc.struct_field(self._file.read(columns=[f"{action}.{field}"])[action].drop_null(), field)


def _apply(action: Mapping[str, Any], txns: dict[str, int], added: dict[str, int], removed: set[str]) -> None:
    """Follow one action of a commit."""
    if "txn" in action:
        txns[action["txn"]["appId"]] = action["txn"]["version"]
    elif "protocol" in action:
        _need_reader(action["protocol"]["minReaderVersion"])
    elif "add" in action:
        added[action["add"]["path"]] = json.loads(action["add"].get("stats") or "{}")["numRecords"]
    elif "remove" in action:
        path = action["remove"]["path"]
        added.pop(path, None)
        removed.add(path)


def _need_reader(version: int) -> None:
    if version > READER_VERSION:
        raise _NotUnderstood
