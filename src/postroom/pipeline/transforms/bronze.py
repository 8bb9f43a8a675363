"""Segments as tables: every line is a row of `bronze_events`, or of `bronze_rejects` with the reason.

Rule 1: nothing is dropped and nothing is judged: repeats and contradictions stay, each with its segment.
Rule 2: the JVM's JSON reader does all the work; a line is looked at once more only where one was bad.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import DateType, StructField, StructType

from postroom.pipeline.schema import CORRUPT, EVENTS, LINES, REQUIRED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PARTITIONS: Final = ("date",)
_READING: Final = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
_SEALED: Final = StructField("date", DateType())  # of the folder that a segment lies in
NAMED: Final = r"^[0-9]{8,}-"
BLANK: Final = r"^\s*$"


def lines(spark: "SparkSession", folder: str, segments: Sequence[str]) -> "DataFrame":
    """Every line of the segments as the reader takes it, with its `segment` and the `date` of that."""
    reader = spark.read.schema(StructType([*LINES.fields, _SEALED])).options(**_READING)
    found = reader.option("basePath", folder).json(list(segments))
    return found.select(*LINES.names, F.col("_metadata.file_name").alias("segment"), "date")


def arrivals(spark: "SparkSession", folder: str) -> "DataFrame":
    """The `segment` of every line as it comes, for a stream: its name counts, and nothing is parsed."""
    found = spark.readStream.option("basePath", folder).text(f"{folder}/date=*/hour=*/*.jsonl")
    return found.select(F.col("_metadata.file_name").alias("segment")).where(F.col("segment").rlike(NAMED))


def is_bad() -> "Column":
    """Whether a line is no event: not JSON, a field of the wrong type, or one of the first ones missing."""
    missing = [F.col(name).isNull() for name in REQUIRED]
    return F.coalesce(F.col(CORRUPT).isNotNull() | _any(missing), F.lit(True))  # noqa: FBT003 - a literal of SQL


def events(parsed: "DataFrame") -> "DataFrame":
    """Grain: one line that is an event. The wire's columns, `segment` and `date`."""
    return parsed.where(~is_bad()).select(*EVENTS.names, "segment", "date")


def bad_segments() -> "Column":
    """An aggregate: the segments in which a line is bad. There are few, or it is none of ours."""
    return F.array_sort(F.collect_set(F.when(is_bad(), F.col("segment"))))


def rejects(texts: "DataFrame") -> "DataFrame":
    """Grain: one line that is no event, of texts (`value`, `segment`, `date`). The text as it is, and why."""
    read = texts.where(~F.col("value").rlike(BLANK)).withColumn(
        "event", F.from_json("value", LINES, dict(_READING))
    )
    flat = read.select("segment", "date", F.col("value").alias("line"), "event.*")
    return flat.where(is_bad()).select("segment", "line", _reason().alias("reason"), "date")


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
        F.when(F.col(CORRUPT).isNotNull() & nothing_read, F.lit("it is not a JSON object"))
        .when(F.col(CORRUPT).isNotNull(), F.lit("a field has a value of another type"))
        .otherwise(F.concat(F.lit("it has no "), names))
    )


def _any(conditions: "Sequence[Column]") -> "Column":
    joined = conditions[0]
    for condition in conditions[1:]:
        joined = joined | condition
    return joined
