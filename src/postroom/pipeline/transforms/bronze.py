"""Segments as tables: every line is a row of `bronze_events`, or of `bronze_rejects` with the reason.

Rule 1: nothing is dropped and nothing is judged: repeats and contradictions stay, each with its segment.
Rule 2: the JVM's JSON reader does all the work; lines are looked at more closely only where one was bad, or
        where a segment is not what was sealed: the reader forgets what stands behind a line's first value.
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


def lines(spark: "SparkSession", folder: str) -> "DataFrame":
    """Every line of a folder that has been `set_apart`, as the reader takes it."""
    rows = StructType([*LINES.fields, StructField("segment", StringType()), _SEALED])
    return spark.read.schema(rows).options(**_READING).json(folder)


def said(texts: "DataFrame") -> "DataFrame":
    """The lines that say something, of texts (`value`, `segment`, `date`), and whether each `is_alone`."""
    return texts.where(~F.col("value").rlike(BLANK)).withColumn("is_alone", _is_alone())


def _is_alone() -> "Column":
    """Whether a line is one object and nothing else. The reader takes its first value, and forgets the rest.

    No rest can be right behind an object both in a list and in another object, and leave each at its end.
    """
    listed = F.from_json(F.concat(F.lit("["), "value", F.lit("]")), "array<string>")
    named = F.from_json(F.concat(F.lit('{"line":'), "value", F.lit("}")), "line string")
    is_object = named["line"].startswith("{")
    return F.coalesce((F.size(listed) == 1) & is_object, F.lit(False))  # noqa: FBT003 - a literal of SQL


def set_apart(said: "DataFrame", folder: str) -> None:
    """Write a copy of the lines that the reader can be trusted with, for `lines`."""
    alone = said.where("is_alone").select("value", "date", "segment")
    alone.write.partitionBy("date", "segment").text(folder)


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


def marks_where(is_so: "Column") -> "Column":
    """An aggregate: the marks of the segments of rows, as bits. NULL when there are none.

    One long is all that a row can change, so it costs next to nothing. Segments may share a mark.
    """
    bit = (F.crc32("segment") % MARKS).cast("int")
    mark = F.call_function("shiftleft", F.lit(1).cast("long"), bit)
    return F.bit_or(F.when(is_so, mark))


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
    read = said(texts).withColumn("event", F.from_json("value", LINES, dict(_READING)))
    # Bytes that are no UTF-8 would keep every other program from reading the table. The reader refuses them,
    # `from_json` does not.
    is_text = F.is_valid_utf8("value").alias("is_text")
    line = F.make_valid_utf8("value").alias("line")
    flat = read.select("segment", "date", line, is_text, "is_alone", "event.*")
    bad = flat.where(is_bad() | ~F.col("is_text") | ~F.col("is_alone"))
    return bad.select("segment", "line", _reason().alias("reason"), "date")


def texts(spark: "SparkSession", folder: str, segments: Sequence[str]) -> "DataFrame":
    """The lines of segments below a folder as plain text."""
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
        .when(~F.col("is_alone"), F.lit("it is more than one JSON object"))
        .when(F.col(CORRUPT).isNotNull(), F.lit("a field has a value of another type"))
        .otherwise(F.concat(F.lit("it has no "), names))
    )


def _any(conditions: "Sequence[Column]") -> "Column":
    joined = conditions[0]
    for condition in conditions[1:]:
        joined = joined | condition
    return joined
