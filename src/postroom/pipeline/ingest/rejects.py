"""Rejected lines that this version can read: they move from `bronze_rejects` to `bronze_events`.

Rule 1: the first run of a version with a newer schema takes them up, and `rejects retry` at any time.
Rule 2: two commits do it. The first adds the events, and records the version of `bronze_rejects` that they
        come from. The second removes their lines. A job that is killed between them is finished from that
        record, so no line is taken up twice.
Rule 3: if another version has to finish it, it cannot know which lines were taken up. It then takes up all
        that it can read: bronze may have repeated lines, and silver has none.
"""

from contextlib import suppress
from typing import Final

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.errors import TableChanged
from postroom.pipeline.delta.delta_log import DataFile, Txn
from postroom.pipeline.delta.tables import Tables, require_rows
from postroom.pipeline.ingest import bronze
from postroom.pipeline.schema import RESCUED
from postroom.pipeline.spark.session import is_local

TABLE: Final = "bronze_rejects"
TRIES: Final = 5  # of a removal that other writers overtake
EVENTS: Final = "bronze_events"
READER: Final = "reader"
"""The application id of the newest schema that the rejects were read with."""
TAKEN: Final = "rejects taken up"
"""The application id of the version of rejects whose readable lines are in `bronze_events`."""


def reader() -> Txn:
    """What a table records that was read by this version."""
    return Txn(READER, bronze.NEWEST_SCHEMA)


def are_due(tables: Tables) -> bool:
    """Whether an earlier version has rejected lines that this one has not tried to read."""
    return tables.row_count(TABLE) > 0 and tables.last_txn(TABLE, READER) < reader().version


def take_up(spark: SparkSession, tables: Tables) -> int:
    """Take up the lines that can be read; returns their number. After `TableChanged`, call it again."""
    pinned = _finished(spark, tables)
    base, files = pinned.version(EVENTS), pinned.files(TABLE)
    if not files:
        return 0
    seen = Observation()
    lines = _validated(spark, pinned, files).observe(
        seen, F.count_if(F.col("reason").isNull()).alias("readable")
    )
    with pinned.copies(EVENTS, is_here=is_local(spark)) as copies:
        bronze.write_valid_lines(lines, copies)
        rows = bronze.read_valid_lines(spark, copies)
        staged = pinned.stage(EVENTS, rows, partition_by=bronze.PARTITIONS)
    require_rows(EVENTS, staged, seen.get["readable"])
    if not staged.rows:
        pinned.discard(EVENTS, staged.adds)
        pinned.mark(TABLE, [reader()], base=pinned.version(TABLE))
        return 0
    txns = [Txn(TAKEN, pinned.version(TABLE)), reader()]
    pinned.commit(EVENTS, staged, txns=txns, base=base)
    _finished(spark, tables)
    return staged.rows


def _finished(spark: SparkSession, tables: Tables) -> Tables:
    """One version of the tables in which no line that was taken up is still a reject.

    Another job may remove the same lines.
    """
    for _ in range(TRIES):
        pinned = tables.pinned()
        if not _has_taken(pinned):
            return pinned
        with suppress(TableChanged):
            _remove_taken(spark, pinned)
    raise TableChanged(TABLE)


def _has_taken(tables: Tables) -> bool:
    """Whether lines were taken up that are still in the table of rejects.

    The table of events is asked first: a later commit to it then refuses what is computed from this state.
    """
    return tables.last_txn(EVENTS, TAKEN) > tables.last_txn(TABLE, TAKEN)


def _remove_taken(spark: SparkSession, tables: Tables) -> None:
    """Remove the lines that were taken up from the version that `bronze_events` names."""
    taken, base = Txn(TAKEN, tables.last_txn(EVENTS, TAKEN)), tables.version(TABLE)
    if tables.last_txn(EVENTS, READER) != reader().version:
        tables.mark(TABLE, [taken], base=base)
        return
    added, _ = tables.changed(TABLE, taken.version)
    new = {file.path for file in added}
    old = [file for file in tables.files(TABLE) if file.path not in new]
    stay = _validated(spark, tables, old).where("reason IS NOT NULL")
    rows = stay.select("segment", F.col("value").alias("line"), "reason", "date")
    staged = tables.stage(TABLE, rows, partition_by=bronze.PARTITIONS)
    tables.commit(TABLE, staged, old, txns=[taken, reader()], base=base)


def _validated(spark: SparkSession, tables: Tables, files: list[DataFile]) -> DataFrame:
    """The lines of rejects, with the reason of this version. Bytes that were not UTF-8 are lost."""
    rows = tables.read(spark, TABLE, files).withColumnRenamed("line", "value")
    is_lost = F.col("reason") == bronze.NOT_UTF8
    found = bronze.validated(rows.where(~is_lost).drop("reason"))
    columns = ["value", "segment", "date", RESCUED, "reason"]
    lost = rows.where(is_lost).withColumn(RESCUED, F.lit(None).cast("string"))
    return found.select(*columns).unionByName(lost.select(*columns))
