"""Writes segments as files of `bronze_events`.

Rule 1: executors read every segment first, compare it with the hash in its name, and look whether its lines
        are plain. If all segments of a batch are as sealed and plain, Spark's JSON reader reads them.
        Otherwise the batch is validated line by line, which takes longer.
Rule 2: a segment lies in the folder of its date, so each date is written by a job of its own.
Rule 3: values that all rows of a file share come from its path, and are not computed for each row.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from deltalake.transaction import AddAction
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import Column, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.ingest import bronze, lines
from postroom.pipeline.ingest.lines import Inspected
from postroom.pipeline.ingest.segments import EventStream, Segment
from postroom.pipeline.schedule import run_in_order
from postroom.pipeline.schema import REQUIRED
from postroom.pipeline.tables import Staged, Tables, require_rows

DATES_AT_ONCE: Final = 3  # one starts and one ends while another uses all cores
TABLE: Final = "bronze_events"
INSPECTED: Final = "lines bigint, is_trusted boolean"

cloudpickle.register_pickle_by_value(lines)  # type: ignore[no-untyped-call]  # executors have no postroom


class WrittenSegments(NamedTuple):
    """The files of some segments, staged for a commit, and the number of lines."""

    staged: Staged
    lines: int
    bad_segments: int | None
    """The segments with a bad line, as bits; see `bronze.segment_bits`."""


def write_segments(
    spark: SparkSession, tables: Tables, stream: EventStream, segments: Iterable[Segment]
) -> WrittenSegments:
    """Write the files of segments of a stream. They become visible with a later commit."""
    segments = list(segments)
    found = _inspected(spark, tables, stream, segments)
    adds = _write_plain_lines(spark, tables, stream, segments) if found.is_trusted else None
    if adds is None:
        return write_validated_lines(spark, tables, stream, segments)
    staged = Staged(bronze.ROWS, bronze.PARTITIONS, adds)
    require_rows(TABLE, staged, found.lines)
    return WrittenSegments(staged, staged.rows, None)


def _inspected(
    spark: SparkSession, tables: Tables, stream: EventStream, segments: list[Segment]
) -> Inspected:
    """The lines of all segments, and whether all can be trusted. Executors look, unless data are small."""
    segments = [segment for segment in segments if segment.size]  # Spark reads no empty file
    if not segments:
        return Inspected(0, is_trusted=True)
    if tables.is_small:
        found = [lines.inspect(stream.storage.read(each.name), each.hash) for each in segments]
    else:
        files = spark.read.format("binaryFile").load([stream.path_of(segment) for segment in segments])
        look: Callable[..., Column] = F.arrow_udf(lines.inspect_files, INSPECTED)  # type: ignore[attr-defined]
        found = [
            tuple(row["found"]) for row in files.select(look("path", "content").alias("found")).collect()
        ]
    is_trusted = len(found) == len(segments) and all(trusted for _, trusted in found)
    return Inspected(sum(n for n, _ in found), is_trusted)


def _write_plain_lines(
    spark: SparkSession, tables: Tables, stream: EventStream, segments: list[Segment]
) -> list[AddAction] | None:
    """None when a line is no event; the files are deleted then."""
    adds: list[AddAction] = []
    try:
        _write_by_date(spark, tables, stream, segments, adds)
    except (PySparkException, Py4JJavaError) as error:
        tables.discard(TABLE, adds)
        if not bronze.is_read_failure(error):
            raise
        return None
    if all(map(_is_whole, adds)):
        return adds
    tables.discard(TABLE, adds)
    return None


def _write_by_date(
    spark: SparkSession, tables: Tables, stream: EventStream, segments: list[Segment], adds: list[AddAction]
) -> None:
    dates: dict[str, list[str]] = defaultdict(list)
    for segment in segments:
        dates[segment.date].append(stream.path_of(segment))

    def write_date(date: str) -> None:
        rows = bronze.plain(spark, dates[date])
        adds.extend(tables.stage_in(TABLE, rows, {bronze.PARTITIONS[0]: date}))

    run_in_order(dict.fromkeys(sorted(dates), ()), write_date, DATES_AT_ONCE)


def _is_whole(add: AddAction) -> bool:
    """Whether every row of a file has the required fields of an event."""
    stats = json.loads(add.stats)
    return not stats["numRecords"] or all(stats["nullCount"].get(name) == 0 for name in REQUIRED)


def write_validated_lines(
    spark: SparkSession, tables: Tables, stream: EventStream, segments: Iterable[Segment]
) -> WrittenSegments:
    """Validate every line. A line that is no event is left out, and the bit of its segment is set."""
    seen = Observation()
    paths = [stream.path_of(segment) for segment in segments]
    texts = bronze.validated(bronze.texts(spark, str(stream), paths))
    bad = bronze.segment_bits(F.col("reason").isNotNull()).alias("bad_segments")
    texts = texts.observe(seen, bad, F.count("*").alias("lines"))
    with tables.copies(TABLE) as copies:
        bronze.write_valid_lines(texts, copies)
        rows = bronze.read_valid_lines(spark, copies)
        staged = tables.stage(TABLE, rows, partition_by=bronze.PARTITIONS)
    return WrittenSegments(staged, seen.get["lines"], seen.get["bad_segments"])
