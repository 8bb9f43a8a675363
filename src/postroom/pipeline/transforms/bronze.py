"""Segments as tables: every line is a row of `bronze_events`, or of `bronze_rejects` with the reason.

Rule 1: nothing is dropped and nothing is judged: repeats and contradictions stay, each with its segment.
Rule 2: the JVM's JSON reader does all the work; a line is looked at once more only where one was bad.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from zlib import crc32

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import DateType, StringType, StructField, StructType

from postroom.pipeline.schema import CORRUPT, EVENTS, LINES, REQUIRED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PARTITIONS: Final = ("date",)
_READING: Final = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
_SEALED: Final = StructField("date", DateType())  # of the folder that a segment lies in
ROWS: Final = StructType([*EVENTS.fields, StructField("segment", StringType()), _SEALED])
"""Of `bronze_events`."""
REJECTS: Final = StructType(
    [*(StructField(name, StringType()) for name in ("segment", "line", "reason")), _SEALED]
)
NAMED: Final = r"^[0-9]{8,}-"
BLANK: Final = r"^\s*$"
FILES: Final = "path STRING, modificationTime TIMESTAMP, length BIGINT, content BINARY"
"""What Spark tells of a file. A stream has to be told so."""
MARKS: Final = 63  # the bits of a long that is not negative


def lines(spark: "SparkSession", folder: str, segments: Sequence[str]) -> "DataFrame":
    """Every line of the segments as the reader takes it, with its `segment` and the `date` of that."""
    reader = spark.read.schema(StructType([*LINES.fields, _SEALED])).options(**_READING)
    found = reader.option("basePath", folder).json(list(segments))
    # The name by function: `_metadata` would have every row written once more on its way.
    segment = F.substring_index(F.input_file_name(), "/", -1)
    return found.select(*LINES.names, segment.alias("segment"), "date")


def plain(spark: "SparkSession", folder: str) -> "DataFrame":
    """`events` without `date`, of a folder `segment=NAME` for each segment. A line that cannot be read fails.

    There is nothing between the reader and the writer: not the text of bad lines, for which every field of
    every line would be looked up once more, and neither a condition nor a function, for which every row would
    be copied. Who reads like this has to look for columns of `REQUIRED` that are NULL afterwards.
    """
    rows = StructType([field for field in ROWS.fields if field.name not in PARTITIONS])
    return spark.read.schema(rows).option("mode", "FAILFAST").json(folder)


def cannot_be_read(error: Exception) -> bool:
    """Whether `plain` may have failed because of what a line says."""
    return "FAILED_READ_FILE" in str(error)


def arrivals(spark: "SparkSession", folder: str) -> "DataFrame":
    """The `segment` of every file as it comes, for a stream: its name counts, and it is not opened."""
    found = spark.readStream.format("binaryFile").schema(FILES).option("basePath", folder)
    named = found.load(f"{folder}/date=*/hour=*/*.jsonl").select(
        F.col("_metadata.file_name").alias("segment")
    )
    return named.where(F.col("segment").rlike(NAMED))


def is_bad() -> "Column":
    """Whether a line is no event: not JSON, a field of the wrong type, or one of the first ones missing."""
    missing = [F.col(name).isNull() for name in REQUIRED]
    return F.coalesce(F.col(CORRUPT).isNotNull() | _any(missing), F.lit(True))  # noqa: FBT003 - a literal of SQL


def events(parsed: "DataFrame") -> "DataFrame":
    """Grain: one line that is an event. The wire's columns, `segment` and `date`."""
    return parsed.where(~is_bad()).select(*EVENTS.names, "segment", "date")


def bad_marks() -> "Column":
    """An aggregate: the marks of the segments in which a line is bad, as bits. NULL when none is.

    One long is all that a row can change, so it costs next to nothing. Segments may share a mark.
    """
    bit = (F.crc32("segment") % MARKS).cast("int")
    mark = F.call_function("shiftleft", F.lit(1).cast("long"), bit)
    return F.bit_or(F.when(is_bad(), mark))


def may_be_bad(segment: str, marks: int | None) -> bool:
    """Whether a segment has one of the marks."""
    return bool((marks or 0) >> crc32(segment.encode()) % MARKS & 1)


def widened(rows: "DataFrame") -> "DataFrame":
    """The wire's columns; those that the table of an earlier version does not have are NULL."""
    known = set(rows.columns)
    missing = {
        field.name: F.lit(None).cast(field.dataType) for field in EVENTS.fields if field.name not in known
    }
    return rows.withColumns(missing) if missing else rows  # Spark Connect refuses none


def rejects(texts: "DataFrame") -> "DataFrame":
    """Grain: one line that is no event, of texts (`value`, `segment`, `date`). The text as it is, and why."""
    read = texts.where(~F.col("value").rlike(BLANK)).withColumn(
        "event", F.from_json("value", LINES, dict(_READING))
    )
    # Bytes that are no UTF-8 would keep every other program from reading the table. The reader refuses them,
    # `from_json` does not.
    is_text = F.is_valid_utf8("value").alias("is_text")
    flat = read.select("segment", "date", F.make_valid_utf8("value").alias("line"), is_text, "event.*")
    bad = flat.where(is_bad() | ~F.col("is_text"))
    return bad.select("segment", "line", _reason().alias("reason"), "date")


def texts(spark: "SparkSession", folder: str, segments: Sequence[str]) -> "DataFrame":
    """The same lines as plain text."""
    found = spark.read.option("basePath", folder).text(list(segments))
    sealed = F.col("date").cast(_SEALED.dataType)
    return found.select("value", F.col("_metadata.file_name").alias("segment"), sealed.alias("date"))


def _reason() -> "Column":
    missing = [F.when(F.col(name).isNull(), F.lit(name)) for name in REQUIRED]
    names = F.concat_ws(", ", *missing)
    nothing_read = F.coalesce(*[F.col(name).cast("string") for name in EVENTS.names]).isNull()
    return (
        F.when(~F.col("is_text"), F.lit("it is not UTF-8"))
        .when(F.col(CORRUPT).isNotNull() & nothing_read, F.lit("it is not a JSON object"))
        .when(F.col(CORRUPT).isNotNull(), F.lit("a field has a value of another type"))
        .otherwise(F.concat(F.lit("it has no "), names))
    )


def _any(conditions: "Sequence[Column]") -> "Column":
    joined = conditions[0]
    for condition in conditions[1:]:
        joined = joined | condition
    return joined
