"""Writes segments as files of `bronze_events`.

Rule 1: executors read every segment first, and look whether its lines are plain. Its hash is compared with
        the chain, or with its name. Spark's JSON reader reads the segments that are as sealed and plain. Of
        the others it reads a copy, after the lines that are not plain were validated one by one; all lines,
        if the segment is not as it was sealed.
Rule 2: a segment lies in the folder of its date, so each date is written by a job of its own.
        Small segments, and events that a micro-batch carries, are written by one job, whatever their dates.
Rule 3: values that all rows of a file share come from its path, and are not computed for each row.
Rule 4: a row has the mark of the redaction that the chain records for its segment. Lines that are validated
        one by one have none, so they are redacted again.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from deltalake.transaction import AddAction
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.delta.tables import StagedFiles, Tables, require_rows
from postroom.pipeline.ingest import bronze, lines
from postroom.pipeline.ingest.lines import Inspected
from postroom.pipeline.ingest.segments import Segment, SegmentStream
from postroom.pipeline.schedule import run_in_order
from postroom.pipeline.schema import MARK, REQUIRED
from postroom.pipeline.spark.session import is_local

DATES_AT_ONCE: Final = 3  # one starts and one ends while another uses all cores
TABLE: Final = "bronze_events"
EMPTY_SHA256: Final = hashlib.sha256().hexdigest()
INSPECTED: Final = "lines bigint, is_plain boolean, sha256 string"

cloudpickle.register_pickle_by_value(lines)  # type: ignore[no-untyped-call]  # executors have no postroom


class WrittenSegments(NamedTuple):
    """The files of some segments, staged for a commit, and the number of lines."""

    segments: list[Segment]
    staged: StagedFiles
    lines: int
    bad_segments: int | None
    """The segments with a bad line, as bits; see `bronze.segment_bits`."""
    is_plain: Column | None = None
    """Whether a line was not validated, because it is plain; None if all of them were."""

    @property
    def rejects(self) -> int:
        """The number of bad lines."""
        return self.lines - self.staged.rows


def write_segments(
    spark: SparkSession, tables: Tables, stream: SegmentStream, segments: Iterable[Segment]
) -> WrittenSegments:
    """Write the files of segments of a stream. They become visible with a later commit."""
    segments = list(segments)
    found = _inspected(spark, tables, stream, segments)
    plain = [segment for segment in segments if found[segment.name].is_trusted]
    adds = _write_plain_lines(spark, tables, stream, plain) if plain else []
    if adds is None:  # a plain line is no event to the reader
        plain, adds = [], []
    staged = StagedFiles(bronze.ROWS, bronze.PARTITIONS, adds)
    require_rows(TABLE, staged, sum(found[segment.name].lines for segment in plain))
    others = [segment for segment in segments if segment not in plain]
    if not others:
        return WrittenSegments(segments, staged, staged.rows, None)
    sealed = frozenset(segment.file_name for segment in others if found[segment.name].is_as_sealed)
    return _joined(segments, staged, _write_odd_segments(spark, tables, stream, others, sealed))


def _write_odd_segments(
    spark: SparkSession,
    tables: Tables,
    stream: SegmentStream,
    segments: list[Segment],
    sealed: frozenset[str],
) -> WrittenSegments:
    """Write segments with lines that are not plain: all of them are validated if the reader refuses one."""
    try:
        written = write_validated_lines(spark, tables, stream, segments, sealed)
    except (PySparkException, Py4JJavaError) as error:
        if not sealed or not bronze.is_read_failure(error):
            raise
    else:
        if all(map(_is_whole, written.staged.adds)):
            return written
        tables.discard(TABLE, written.staged.adds)
    return write_validated_lines(spark, tables, stream, segments)


def write_carried(
    spark: SparkSession, tables: Tables, stream: SegmentStream, ready: list[Segment], rows: DataFrame
) -> WrittenSegments:
    """Write the events of a stream that a micro-batch carries, of segments that are ready.

    Earlier segments that it does not carry are read from their files. So are all of them if one line of the
    micro-batch is not plain: Spark then fails to read it, whichever stream the line is of.
    """
    seen, names = Observation(), {segment.file_name: segment for segment in ready}
    chosen = rows.where(F.col("segment").isin(list(names))).withColumn(MARK, _mark(ready))
    chosen = chosen.observe(seen, F.collect_set("segment").alias("segments"))
    try:
        staged = tables.stage(TABLE, chosen, partition_by=bronze.PARTITIONS)
    except (PySparkException, Py4JJavaError) as error:
        if not bronze.is_read_failure(error):
            raise
        return write_segments(spark, tables, stream, ready)
    carried = [names[name] for name in seen.get["segments"] or ()]
    last = max((segment.number for segment in carried), default=-1)
    segments = [segment for segment in ready if segment.number <= last]
    found = _inspected(spark, tables, stream, carried)
    is_trusted = all(each.is_trusted for each in found.values())
    if not is_trusted or not all(map(_is_whole, staged.adds)):
        tables.discard(TABLE, staged.adds)
        return write_segments(spark, tables, stream, segments)
    require_rows(TABLE, staged, sum(each.lines for each in found.values()))
    others = [segment for segment in segments if segment not in carried]
    if not others:
        return WrittenSegments(segments, staged, staged.rows, None)
    return _joined(segments, staged, write_segments(spark, tables, stream, others))


def _joined(segments: list[Segment], plain: StagedFiles, rest: WrittenSegments) -> WrittenSegments:
    """The files of plain segments, and those of the rest."""
    both = plain._replace(adds=[*plain.adds, *rest.staged.adds])
    return WrittenSegments(segments, both, plain.rows + rest.lines, rest.bad_segments, rest.is_plain)


def texts_of(spark: SparkSession, stream: SegmentStream, segments: Iterable[Segment]) -> DataFrame:
    """The lines of segments: `value`, `segment`, `date`."""
    return bronze.texts(spark, str(stream), [stream.path_of(segment) for segment in segments])


class _Inspection(NamedTuple):
    """What was found in a segment."""

    lines: int
    is_plain: bool
    is_as_sealed: bool

    @property
    def is_trusted(self) -> bool:
        """Whether Spark's JSON reader reads the segment without a loss."""
        return self.is_plain and self.is_as_sealed


def _inspected(
    spark: SparkSession, tables: Tables, stream: SegmentStream, segments: list[Segment]
) -> dict[str, _Inspection]:
    """What was found in each segment, by its name. Executors look, unless data are small."""
    full = [segment for segment in segments if segment.size]  # Spark reads no empty file
    if tables.is_small:
        contents = ((each.name, stream.storage.read(each.name)) for each in full)
        found = {name: Inspected(*lines.inspect(data)) for name, data in contents}
    else:
        found = _inspected_by_executors(spark, stream, full) if full else {}
    nothing = Inspected(0, True, EMPTY_SHA256)  # noqa: FBT003 - a field
    return {
        each.name: _Inspection(one.lines, one.is_plain, one.sha256.startswith(each.seal) or not each.size)
        for each in segments
        for one in [found.get(each.name, nothing)]
    }


def hashes_of(spark: SparkSession, stream: SegmentStream, segments: Sequence[Segment]) -> dict[str, str]:
    """The SHA-256 of the bytes of segments, by their names, which executors compute."""
    found = {segment.name: EMPTY_SHA256 for segment in segments}
    if full := [segment for segment in segments if segment.size]:  # Spark reads no empty file
        inspected = _inspected_by_executors(spark, stream, full)
        found |= {name: each.sha256 for name, each in inspected.items()}
    return found


def _inspected_by_executors(
    spark: SparkSession, stream: SegmentStream, segments: Iterable[Segment]
) -> dict[str, Inspected]:
    """What was found in segments that are not empty, by their names."""
    look: Callable[..., Column] = F.arrow_udf(lines.inspect_files, INSPECTED)  # type: ignore[attr-defined]
    files, column = _files_of(spark, stream, segments)
    rows = files.select("path", look(column).alias("found")).collect()
    # The name of a segment is the end of its path: its date, its hour and its file.
    return {"/".join(row["path"].split("/")[-3:]): Inspected(*row["found"]) for row in rows}


def _files_of(
    spark: SparkSession, stream: SegmentStream, segments: Iterable[Segment]
) -> tuple[DataFrame, str]:
    """The files of segments, and the column with what `inspect_files` takes.

    Python opens files of this machine by itself: on its way through the JVM, a segment of 128 MiB takes more
    than half a GiB of the heap.
    """
    if stream.storage.local is None or not is_local(spark):
        files = spark.read.format("binaryFile").load([stream.path_of(segment) for segment in segments])
        return files.select("path", "content"), "content"
    paths = [(str(stream.storage.local / segment.name),) for segment in segments]
    return spark.createDataFrame(paths, "path string"), "path"


def _mark(segments: Iterable[Segment]) -> Column:
    """The mark of the segment of a row; NULL if it has none."""
    names: dict[str, list[str]] = defaultdict(list)
    for segment in segments:
        names[segment.redaction].append(segment.file_name)
    unmarked = names.pop("", None)
    if len(names) == 1 and unmarked is None:
        return F.lit(next(iter(names)))
    column = F.lit(None).cast("string")
    for mark, marked in names.items():
        column = F.when(F.col("segment").isin(marked), F.lit(mark)).otherwise(column)
    return column


def _write_plain_lines(
    spark: SparkSession, tables: Tables, stream: SegmentStream, segments: list[Segment]
) -> list[AddAction] | None:
    """None when a line is not an event; the files are deleted then."""
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
    spark: SparkSession, tables: Tables, stream: SegmentStream, segments: list[Segment], adds: list[AddAction]
) -> None:
    mark = _mark(segments)
    if tables.is_small:  # a job takes longer than its rows
        rows = bronze.plain(spark, [stream.path_of(segment) for segment in segments], with_date=True)
        rows = rows.withColumn(MARK, mark)
        adds += tables.stage(TABLE, rows, partition_by=bronze.PARTITIONS).adds
        return
    dates: dict[str, list[str]] = defaultdict(list)
    for segment in segments:
        dates[segment.date].append(stream.path_of(segment))

    def write_date(date: str) -> None:
        rows = bronze.plain(spark, dates[date]).withColumn(MARK, mark)
        adds.extend(tables.stage_in(TABLE, rows, {bronze.PARTITIONS[0]: date}))

    run_in_order(dict.fromkeys(sorted(dates), ()), write_date, DATES_AT_ONCE)


def _is_whole(add: AddAction) -> bool:
    """Whether every row of a file has the required fields of an event."""
    stats = json.loads(add.stats)
    return not stats["numRecords"] or all(stats["nullCount"].get(name) == 0 for name in REQUIRED)


def write_validated_lines(
    spark: SparkSession,
    tables: Tables,
    stream: SegmentStream,
    segments: list[Segment],
    sealed: frozenset[str] = frozenset(),
) -> WrittenSegments:
    """Validate every line, except plain ones of segments that are as they were `sealed`.

    A line that is not an event is left out, and the bit of its segment is set.
    """
    seen = Observation()
    is_plain = _is_plain(sealed) if sealed and not tables.is_small else None
    texts = bronze.validated(texts_of(spark, stream, segments), is_plain)
    bad = bronze.segment_bits(F.col("reason").isNotNull()).alias("bad_segments")
    rejects = F.count_if(F.col("reason").isNotNull()).alias("rejects")
    texts = texts.observe(seen, bad, rejects, F.count("*").alias("lines"))
    with tables.copies(TABLE, is_here=is_local(spark)) as copies:
        bronze.write_valid_lines(texts, copies)
        rows = bronze.read_valid_lines(spark, copies)
        staged = tables.stage(TABLE, rows, partition_by=bronze.PARTITIONS)
    found = seen.get
    require_rows(TABLE, staged, found["lines"] - found["rejects"])
    return WrittenSegments(segments, staged, found["lines"], found["bad_segments"], is_plain)


def _is_plain(sealed: frozenset[str]) -> Column:
    """Whether a line of one of some segments is plain. Executors look."""
    look: Callable[..., Column] = F.arrow_udf(lines.inspect_lines, "boolean")  # type: ignore[attr-defined]
    return F.col("segment").isin(sorted(sealed)) & look(F.col("value").cast("binary"))
