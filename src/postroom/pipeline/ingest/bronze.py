"""Segments as tables: every line is a row of `bronze_events`, or of `bronze_rejects` with the reason.

Rule 1: nothing is dropped. Repeats and contradictions stay, each with its segment; fields that this version
        does not know stay in `rescued`.
Rule 2: a line is rejected when a column could not hold what it says: no time that the tables can compute
        with, a schema of a later version, an amount of money with too many decimal places.
Rule 3: Spark's JSON reader by itself is trusted with plain lines only (`plain`). All others are judged one by
        one (`judged`): the reader forgets unknown fields and what stands behind a line's first value, and it
        rounds.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from zlib import crc32

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import DateType, StringType, StructField, StructType

from postroom.core.events import SCHEMA, TS_US_MAX
from postroom.pipeline.schema import CORRUPT, EVENTS, LINES, MONEY, REQUIRED, RESCUED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PARTITIONS: Final = ("date",)
_READING: Final = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
_SEALED: Final = StructField("date", DateType())  # of the folder that a segment lies in
ROWS: Final = StructType(
    [*EVENTS.fields, *(StructField(name, StringType()) for name in (RESCUED, "segment")), _SEALED]
)
"""Of `bronze_events`."""
REJECTS: Final = StructType(
    [*(StructField(name, StringType()) for name in ("segment", "line", "reason")), _SEALED]
)
NAMED: Final = r"^[0-9]{8,}-"
BLANK: Final = r"^\s*$"
FILES: Final = "path STRING, modificationTime TIMESTAMP, length BIGINT, content BINARY"
"""What Spark tells of a file. A stream has to be told so."""
MARKS: Final = 63  # the bits of a long that is not negative
EXACT: Final = "decimal(38,29)"  # as many digits as there can be behind those that an amount has in front
LONG_AMOUNT: Final = r'"cost_usd"\s*:\s*[-+.0-9eE]{30}'  # more digits than `EXACT` is sure to hold


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
    """Whether a parsed line is no event: not JSON, wrong types, missing fields, a time or schema too high."""
    missing = [F.col(name).isNull() for name in REQUIRED]
    bad = F.col(CORRUPT).isNotNull() | _any([*missing, ~_is_in_time(), _is_newer()])
    return F.coalesce(bad, F.lit(True))  # noqa: FBT003 - a literal of SQL


def events(parsed: "DataFrame") -> "DataFrame":
    """Grain: one line that is an event. The wire's columns, `segment` and `date`."""
    return parsed.where(~is_bad()).select(*EVENTS.names, "segment", "date")


# ---- lines that are judged one by one --------------------------------------------------------------------


def judged(texts: "DataFrame") -> "DataFrame":
    """Each line of texts (`value`, `segment`, `date`) that is not blank, and the `reason` why it is no event.

    Every line is parsed several times, so this costs a multiple of `plain`.
    """
    parsed = texts.where(~F.col("value").rlike(BLANK)).withColumns(
        {
            "event": F.from_json("value", LINES, dict(_READING)),
            "is_alone": _is_alone(),
            "is_text": F.is_valid_utf8("value"),
            "is_exact": _is_exact(),
            RESCUED: _rescued(),
        }
    )
    flat = parsed.select("value", "segment", "date", "is_alone", "is_text", "is_exact", RESCUED, "event.*")
    return flat.withColumn("reason", _reason())


def set_apart(lines: "DataFrame", folder: str) -> None:
    """Write a copy of those judged lines that are events, for `apart`. `rescued` is a field of the copy."""
    told = F.to_json(F.struct(RESCUED))  # with braces, which a line has already
    field = F.substring(told, F.lit(2), F.length(told) - 2)
    opened = F.regexp_replace("value", r"\}\s*$", "")
    value = F.when(F.col(RESCUED).isNotNull(), F.concat(opened, F.lit(","), field, F.lit("}")))
    copies = lines.where("reason IS NULL").select(
        F.coalesce(value, "value").alias("value"), "date", "segment"
    )
    copies.write.partitionBy("date", "segment").text(folder)


def apart(spark: "SparkSession", folder: str) -> "DataFrame":
    """Rows of `bronze_events`, of a folder that was `set_apart`.

    They are read by the reader of `plain`, which keeps `detail` as it was written: `from_json` does not.
    """
    return spark.read.schema(ROWS).option("mode", "FAILFAST").json(folder)


def rejects(texts: "DataFrame") -> "DataFrame":
    """Grain: one line that is no event, of texts (`value`, `segment`, `date`). The text as it is, and why."""
    # Bytes that are no UTF-8 would keep every other program from reading the table.
    line = F.make_valid_utf8("value").alias("line")
    return judged(texts).where("reason IS NOT NULL").select("segment", line, "reason", "date")


def _is_alone() -> "Column":
    """Whether a line is one object and nothing else. The reader takes its first value, and forgets the rest.

    No rest can be right behind an object both in a list and in another object, and leave each at its end.
    """
    listed = F.from_json(F.concat(F.lit("["), "value", F.lit("]")), "array<string>")
    named = F.from_json(F.concat(F.lit('{"line":'), "value", F.lit("}")), "line string")
    is_object = named["line"].startswith("{")
    return F.coalesce((F.size(listed) == 1) & is_object, F.lit(False))  # noqa: FBT003 - a literal of SQL


def _is_exact() -> "Column":
    """Whether the column for money holds the amount of a line as it is. A variant does not round."""
    amount = F.from_json("value", "cost_usd variant")["cost_usd"]
    whole = F.try_variant_get(amount, "$", EXACT)
    kept = whole.cast(MONEY).cast(EXACT)
    is_same = F.coalesce(whole == kept, F.lit(True))  # noqa: FBT003 - no amount, or the reader refuses it
    return is_same & ~F.col("value").rlike(LONG_AMOUNT)


def _rescued() -> "Column":
    """The unknown fields of a line as JSON; NULL when there are none."""
    fields = F.from_json("value", "map<string,variant>")
    unknown = F.map_filter(fields, lambda name, _: ~name.isin(*EVENTS.names))
    return F.when(F.size(unknown) > 0, F.to_json(unknown))


def _is_in_time() -> "Column":
    return F.col("ts_us").between(0, TS_US_MAX)


def _is_newer() -> "Column":
    """A line of an earlier version may have no schema."""
    return F.coalesce(F.col("schema") > SCHEMA, F.lit(False))  # noqa: FBT003 - a literal of SQL


def _reason() -> "Column":
    """Why a judged line is no event; NULL when it is one."""
    missing = [F.when(F.col(name).isNull(), F.lit(name)) for name in REQUIRED]
    names = F.concat_ws(", ", *missing)
    nothing_read = F.coalesce(*[F.col(name).cast("string") for name in EVENTS.names]).isNull()
    is_corrupt = F.col(CORRUPT).isNotNull()
    return (
        F.when(~F.col("is_text"), F.lit("it is not UTF-8"))
        .when(is_corrupt & nothing_read, F.lit("it is not a JSON object"))
        .when(~F.col("is_alone"), F.lit("it is more than one JSON object"))
        .when(is_corrupt, F.lit("a field has a value of another type"))
        .when(names != "", F.concat(F.lit("it has no "), names))
        .when(~_is_in_time(), F.lit(f"its ts_us is not between 0 and {TS_US_MAX} microseconds"))
        .when(_is_newer(), F.format_string(f"its schema is %d, and the newest known is {SCHEMA}", "schema"))
        .when(~F.col("is_exact"), F.lit(f"its cost_usd has more than {MONEY.scale} decimal places"))
    )


# ---- files -----------------------------------------------------------------------------------------------


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
    """Rows of events with all columns of the wire. What a table of an earlier version lacks is NULL."""
    known = set(rows.columns)
    missing = {
        field.name: F.lit(None).cast(field.dataType) for field in EVENTS.fields if field.name not in known
    }
    return rows.withColumns(missing) if missing else rows  # Spark Connect refuses none


def texts(spark: "SparkSession", folder: str, segments: Sequence[str]) -> "DataFrame":
    """The lines of segments below a folder as plain text."""
    found = spark.read.option("basePath", folder).text(list(segments))
    sealed = F.col("date").cast(_SEALED.dataType)
    return found.select("value", F.col("_metadata.file_name").alias("segment"), sealed.alias("date"))


def _any(conditions: "Sequence[Column]") -> "Column":
    joined = conditions[0]
    for condition in conditions[1:]:
        joined = joined | condition
    return joined
