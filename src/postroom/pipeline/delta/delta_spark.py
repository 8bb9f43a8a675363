"""Commits by Delta's own connector (delta-spark), in the JVM of the driver.

Rule 1: Spark stages files as for delta-rs, and delta-rs reads the logs. Only the commit differs: the same
        actions become one transaction of the connector.
Rule 2: the connector commits the version after the one that was read, or nothing. Its own retries are
        switched off: they would accept commits of others that our rows were not computed from.
Rule 3: what a commit needs is set in clones of the session, and never in the session of the caller.
"""

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Final
from urllib.parse import quote

from deltalake import DeltaTable, Metadata, Schema
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction
from py4j.java_gateway import JavaPackage  # type: ignore[import-untyped]
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from postroom.errors import InvalidSetting, Unavailable
from postroom.pipeline.delta.delta_log import (
    NANOS_PER_MS,
    Change,
    FileAction,
    FileList,
    Operation,
    Txn,
    has_partitions,
    missing_columns,
    removals,
)
from postroom.pipeline.delta.storage import Storage
from postroom.pipeline.spark.jvm import active_session, jvm_of
from postroom.pipeline.spark.session import causes, first_sentence, is_classic

COMMIT_SETTINGS: Final = {
    "spark.databricks.delta.maxCommitAttempts": "0",  # retries after the first attempt
    # The connector would count rows while it writes files. It writes none here.
    "spark.databricks.delta.history.metricsEnabled": "false",
    # Delta's catalog and extension are for queries. A commit works without them.
    "spark.databricks.delta.requiredSparkConfsCheck.enabled": "false",
}
USER_METADATA: Final = "spark.databricks.delta.commitInfo.userMetadata"
CONFLICTS: Final = ("DELTA_CONCURRENT_", "DELTA_MAX_COMMIT_RETRIES_EXCEEDED", "DELTA_METADATA_CHANGED")
"""The beginnings of the connector's error classes that report a commit of another writer."""
PROTOCOL: Final = {"minReaderVersion": 1, "minWriterVersion": 2}  # of new tables, as by delta-rs
PATH_CHARACTERS: Final = "/=:,;@!$&'()*+"  # that the log does not escape

Line = dict[str, Any]
"""An action, as a line of the log."""


class Connector:
    """Commits through the connector of one Spark session."""

    def __init__(self) -> None:
        self._spark: SparkSession | None = None
        self._sessions: dict[Operation, Any] = {}

    def open(self, spark: SparkSession, storage: Storage) -> None:
        """Use the connector of a session. Raises if there is none, or one for another version of Spark."""
        require_connector(spark)
        self._spark, self._sessions = spark, {}
        try:
            with active_session(spark, self._session("WRITE")) as session:
                _delta(spark).DeltaLog.forTable(session, storage.place)  # which needs no table there
        except (Py4JError, PySparkException) as error:
            reason = first_sentence(causes(error)[-1])
            raise InvalidSetting(
                f"Delta's connector does not work with Spark {spark.version}, and may be for another version:"
                f" {reason}"
            ) from None

    def create(self, storage: Storage, name: str, change: Change) -> None:
        if not self._commit(storage.spark_path(name), -1, change, actions_of(change)):
            raise CommitFailedError(f"another writer has created table {name}")

    def write(self, storage: Storage, name: str, delta: DeltaTable, change: Change) -> bool:
        """Commit the version after that of `delta`, with the columns that the table lacks."""
        return self._commit(storage.spark_path(name), delta.version(), change, actions_of(change, delta))

    def _commit(self, place: str, version: int, change: Change, lines: Sequence[Line]) -> bool:
        """Commit the actions on top of a version; false if that is not the last version."""
        if self._spark is None:
            raise InvalidSetting("the writer delta-spark needs a session: give the tables to a Pipeline")
        try:
            with active_session(self._spark, self._session(change.operation)) as session:
                return _committed(self._spark, session, place, version, change, lines)
        except (Py4JError, PySparkException) as error:
            if is_overtaken(causes(error)):
                return False
            reason = first_sentence(causes(error)[-1])
            raise Unavailable(f"Delta's connector cannot commit to {place}: {reason}") from None

    def _session(self, operation: Operation) -> Any:
        """A clone of the session with the settings of commits. Threads commit different operations."""
        assert self._spark is not None  # noqa: S101 - the callers have asked
        if operation not in self._sessions:
            clone = self._spark._jsparkSession.cloneSession()  # noqa: SLF001 - there is no public way
            for key, value in {**COMMIT_SETTINGS, USER_METADATA: operation}.items():
                clone.conf().set(key, value)
            self._sessions[operation] = clone
        return self._sessions[operation]


def require_connector(spark: SparkSession) -> None:
    """Raise if the driver of a session has no connector, or if its JVM is not ours."""
    if not is_classic(spark):
        raise InvalidSetting(
            "the writer delta-spark commits in the JVM of the driver, and a Spark Connect client has none"
        )
    if isinstance(_delta(spark).DeltaLog, JavaPackage):
        raise InvalidSetting(
            "the writer delta-spark needs Delta's connector, which this Spark session does not have:"
            f" add its jar for Spark {spark.version}, or use the writer delta-rs"
        )


def is_overtaken(messages: Iterable[str]) -> bool:
    """Whether a commit failed because of another writer, by the messages of the exception and its causes."""
    return any(f"[{name}" in message for message in messages for name in CONFLICTS)


def _committed(
    spark: SparkSession, session: Any, place: str, version: int, change: Change, lines: Sequence[Line]
) -> bool:
    delta, none = _delta(spark), jvm_of(spark).scala.Option.empty()
    transaction = delta.DeltaLog.forTable(session, place).startTransaction(none, none)
    if transaction.readVersion() != version:  # another writer was faster, or the table was deleted
        delta.DeltaLog.invalidateCache(session, jvm_of(spark).org.apache.hadoop.fs.Path(place))
        return False
    if not change.is_blind:
        transaction.readWholeTable()
    actions = [delta.actions.Action.fromJson(json.dumps(line)) for line in lines]
    transaction.commit(_seq(spark, actions), _operation(spark, change))
    return True


def _operation(spark: SparkSession, change: Change) -> Any:
    """The operation that `DESCRIBE HISTORY` shows. Its predicates are unknown."""
    none, nothing = jvm_of(spark).scala.Option.empty(), _seq(spark, ())
    match change.operation:
        case "DELETE":
            return _companion(spark, "Delete").apply(nothing)
        case "MERGE":
            return _companion(spark, "Merge").apply(none, nothing, nothing, nothing)
    write = _companion(spark, "Write")
    mode = getattr(jvm_of(spark).org.apache.spark.sql.SaveMode, change.mode.capitalize())
    given = [mode, jvm_of(spark).scala.Option.apply(_seq(spark, change.partition_by))]
    names = set(dir(write))  # later versions may have more parameters
    while (default := f"apply$default${len(given) + 1}") in names:
        given.append(getattr(write, default)())
    return write.apply(*given)


def _companion(spark: SparkSession, name: str) -> Any:
    return getattr(getattr(_delta(spark), f"DeltaOperations${name}$"), "MODULE$")


def _delta(spark: SparkSession) -> Any:
    return jvm_of(spark).org.apache.spark.sql.delta


def _seq(spark: SparkSession, values: Iterable[Any]) -> Any:
    found = jvm_of(spark).java.util.ArrayList()
    for value in values:
        found.add(value)
    return jvm_of(spark).PythonUtils.toSeq(found)


# ---- actions, as in the log ----------------------------------------------------------------------------


def actions_of(change: Change, delta: DeltaTable | None = None) -> list[Line]:
    """The actions of a commit on top of `delta`, or of the first commit of a table, as lines of the log."""
    files: list[FileAction] = [*change.actions]
    if delta is None:
        head = [{"protocol": PROTOCOL}, _metadata(change.columns, change.partition_by)]
    else:
        head = _new_metadata(delta, change)
        if change.mode == "overwrite":
            files += removals(FileList.of(delta).all())
    return [*head, *map(_file, files), *map(_txn, change.txns)]


def _new_metadata(delta: DeltaTable, change: Change) -> list[Line]:
    """The metadata of a table that changes. Columns are added; an overwrite replaces them, and partitions."""
    if change.mode == "overwrite":
        columns = change.columns
    else:
        columns = Schema([*delta.schema().fields, *missing_columns(delta, change.columns)])
    if columns == delta.schema() and has_partitions(delta, change.partition_by):
        return []
    return [_metadata(columns, change.partition_by, delta.metadata())]


def _metadata(columns: Schema, partition_by: Sequence[str], known: Metadata | None = None) -> Line:
    facts = {
        "id": str(uuid.uuid4()) if known is None else str(known.id),
        "name": known and known.name,
        "description": known and known.description,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": columns.to_json(),
        "partitionColumns": list(partition_by),
        "createdTime": time.time_ns() // NANOS_PER_MS if known is None else known.created_time,
        "configuration": {} if known is None else known.configuration,
    }
    return {"metaData": facts}


def _file(action: FileAction) -> Line:
    facts = {
        "path": quote(action.path, safe=PATH_CHARACTERS),
        "partitionValues": dict(action.partition_values or {}),
        "size": action.size,
        "dataChange": action.data_change,
    }
    if isinstance(action, AddAction):
        return {"add": {**facts, "modificationTime": action.modification_time, "stats": action.stats}}
    times = {"deletionTimestamp": action.deletion_timestamp, "extendedFileMetadata": True}
    return {"remove": {**facts, **times}}


def _txn(txn: Txn) -> Line:
    return {"txn": {"appId": txn.app_id, "version": txn.version}}
