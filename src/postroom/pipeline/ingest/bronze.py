"""Segments as tables: every line becomes a row of `bronze_events`, or of `bronze_rejects` with the reason.

Rule 1: nothing is dropped. Repeated and contradicting lines stay, each with its segment. Fields that this
        version does not know stay in `rescued`.
Rule 2: a line is rejected when the columns cannot hold its values: a time outside the range of the tables, a
        schema of a later version, an amount of money with too many decimal places.
Rule 3: Spark's JSON reader alone reads plain lines only (`plain`). All others are validated one by one
        (`validated`), because the reader drops unknown fields and any text after a line's first value, and
        rounds amounts.
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Final
from zlib import crc32

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import DateType, StringType, StructField, StructType

from postroom.core.formats.events import SCHEMA, TS_US_MAX
from postroom.pipeline.schema import CORRUPT, EVENTS, LINES, MARK, MONEY, NOT_IN_LINE, REQUIRED, RESCUED

PARTITIONS: Final = ("date",)
_READING: Final = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
_SEALED: Final = StructField("date", DateType())  # of the folder of a segment
ROWS: Final = StructType(
    [*EVENTS.fields, *(StructField(name, StringType()) for name in (RESCUED, "segment", MARK)), _SEALED]
)
"""The columns of `bronze_events`."""
_STORED: Final = StructType([field for field in ROWS.fields if field.name not in NOT_IN_LINE])
"""Those that a line can have."""
_COPIED: Final = StructType([field for field in ROWS.fields if field.name != MARK])
"""Those of a copy of validated lines. A line cannot have a mark: it would say so of itself."""
REJECTS: Final = StructType(
    [*(StructField(name, StringType()) for name in ("segment", "line", "reason")), _SEALED]
)
NAMED: Final = r"^([0-9]{8,})-"  # a segment, and its number
SEALED: Final = r"/date=([0-9-]+)/"  # the date in the path of a segment
NUMBER_DIGITS_MAX: Final = 18  # of a number that is compared as a long
STREAM: Final = "stream"  # of an event that arrives: the folder of its stream
BLANK: Final = r"^\s*$"
NOT_UTF8: Final = "it is not UTF-8"
NEWEST_SCHEMA: Final = SCHEMA
SEGMENT_BITS: Final = 63  # of a non-negative long
EXACT: Final = "decimal(38,29)"  # the most decimal places, besides the digits before the point
LONG_AMOUNT: Final = r'"cost_usd"\s*:\s*[-+.0-9eE]{30}'  # more digits than `EXACT` is sure to hold


def plain(spark: SparkSession, paths: Sequence[str], *, with_date: bool = False) -> DataFrame:
    """`events` of segments, without `date` unless it is asked for. A malformed line raises.

    Only the name of the file stands between the reader and the writer: a column for bad lines would look up
    every field of every line once more. The caller has to check afterwards that no column of `REQUIRED` is
    NULL.
    """
    rows = spark.read.schema(_STORED).option("mode", "FAILFAST").json(list(paths))
    date = [_sealed_date().alias("date")] if with_date else []
    return rows.select("*", F.col("_metadata.file_name").alias("segment"), *date)


def _sealed_date() -> Column:
    """The date in the path of a segment."""
    return F.regexp_extract("_metadata.file_path", SEALED, 1).cast(_SEALED.dataType)


def is_read_failure(error: Exception) -> bool:
    """Whether `plain` may have failed because of the content of a line."""
    return "FAILED_READ_FILE" in str(error)


def arriving_events(spark: SparkSession, folder: str, ingested: int, bytes_max: int) -> DataFrame:
    """`plain` with `date` and `stream`, of segments after number `ingested`, as they arrive, for a stream.

    The condition on the number uses names of files only, so earlier files are not opened.
    """
    found = spark.readStream.schema(_STORED).option("mode", "FAILFAST").option("basePath", folder)
    lines = found.option("maxBytesPerTrigger", bytes_max).json(f"{folder}/date=*/hour=*/*.jsonl")
    name = F.col("_metadata.file_name")
    number = F.try_to_number(F.regexp_extract(name, NAMED, 1), F.lit("9" * NUMBER_DIGITS_MAX))
    return lines.where(number > ingested).select(
        *_STORED.names, name.alias("segment"), _sealed_date().alias("date"), F.lit(folder).alias(STREAM)
    )


def is_bad() -> Column:
    """Whether a parsed line is invalid: not JSON, wrong types, missing fields, a time or schema too high."""
    missing = [F.col(name).isNull() for name in REQUIRED]
    bad = reduce(or_, [F.col(CORRUPT).isNotNull(), *missing, ~_is_in_time(), _is_newer()])
    return F.coalesce(bad, F.lit(True))  # noqa: FBT003 - a literal of SQL


def events(parsed: DataFrame) -> DataFrame:
    """Grain: one line that is an event. The wire's columns, `segment` and `date`."""
    return parsed.where(~is_bad()).select(*EVENTS.names, "segment", "date")


# ---- lines that are validated one by one -------------------------------------------------------------------


def validated(texts: DataFrame, is_plain: Column | None = None) -> DataFrame:
    """The non-blank lines of texts (`value`, `segment`, `date`), each with the `reason` why it is invalid.

    A line that is not plain is parsed several times, so this costs a multiple of `plain`.
    """
    lines = texts.where(~F.col("value").rlike(BLANK)).withColumn("line", F.col("value"))
    if is_plain is not None:  # NULL costs the parsers next to nothing
        lines = lines.withColumn("is_plain", is_plain)
        lines = lines.withColumn("value", F.when(~F.col("is_plain"), F.col("line")))
    parsed = lines.withColumns(
        {
            "event": F.from_json("value", LINES, dict(_READING)),
            "is_alone": _is_alone(),
            "is_text": F.is_valid_utf8("value"),
            "is_exact": _is_exact(),
            RESCUED: _rescued(),
        }
    )
    flat = parsed.select(
        *(F.col("line").alias("value"), "segment", "date", RESCUED),
        *("is_alone", "is_text", "is_exact", F.col("value").isNotNull().alias("is_checked"), "event.*"),
    )
    return flat.withColumn("reason", F.when(F.col("is_checked"), _reason()))


def write_valid_lines(lines: DataFrame, folder: str) -> None:
    """Write the validated lines that are events, with `rescued` as a field, for `read_valid_lines`."""
    rescued = F.to_json(F.struct(RESCUED))  # with braces, which a line has already
    field = F.substring(rescued, F.lit(2), F.length(rescued) - 2)
    opened = F.regexp_replace("value", r"\}\s*$", "")
    value = F.when(F.col(RESCUED).isNotNull(), F.concat(opened, F.lit(","), field, F.lit("}")))
    copies = lines.where("reason IS NULL").select(
        F.coalesce(value, "value").alias("value"), "date", "segment"
    )
    copies.write.partitionBy("date", "segment").text(folder)


def read_valid_lines(spark: SparkSession, folder: str) -> DataFrame:
    """Rows of `bronze_events` from the folder of `write_valid_lines`.

    The JSON reader keeps the text of `detail` unchanged, which `from_json` does not.
    """
    return with_mark(spark.read.schema(_COPIED).option("mode", "FAILFAST").json(folder)).select(*ROWS.names)


def rejects(texts: DataFrame, is_plain: Column | None = None) -> DataFrame:
    """Grain: one invalid line of texts (`value`, `segment`, `date`). Its text, and the reason."""
    # Other programs could not read a table with text that is not UTF-8.
    line = F.make_valid_utf8("value").alias("line")
    return validated(texts, is_plain).where("reason IS NOT NULL").select("segment", line, "reason", "date")


def _is_alone() -> Column:
    """Whether a line is exactly one object. The reader reads the first value, and drops any text after it.

    No text after an object is valid both inside a list and inside another object.
    """
    listed = F.from_json(F.concat(F.lit("["), "value", F.lit("]")), "array<string>")
    named = F.from_json(F.concat(F.lit('{"line":'), "value", F.lit("}")), "line string")
    is_object = named["line"].startswith("{")
    return F.coalesce((F.size(listed) == 1) & is_object, F.lit(False))  # noqa: FBT003 - a literal of SQL


def _is_exact() -> Column:
    """Whether the money column holds the amount of a line exactly. A variant does not round."""
    amount = F.from_json("value", "cost_usd variant")["cost_usd"]
    whole = F.try_variant_get(amount, "$", EXACT)
    kept = whole.cast(MONEY).cast(EXACT)
    is_same = F.coalesce(whole == kept, F.lit(True))  # noqa: FBT003 - there is no amount, or the reader rejects it
    return is_same & ~F.col("value").rlike(LONG_AMOUNT)


def _rescued() -> Column:
    """The unknown fields of a line as JSON; NULL when there are none."""
    fields = F.from_json("value", "map<string,variant>")
    unknown = F.map_filter(fields, lambda name, _: ~name.isin(*EVENTS.names))
    return F.when(F.size(unknown) > 0, F.to_json(unknown))


def _is_in_time() -> Column:
    return F.col("ts_us").between(0, TS_US_MAX)


def _is_newer() -> Column:
    """A line of an earlier version may have no schema."""
    return F.coalesce(F.col("schema") > NEWEST_SCHEMA, F.lit(False))  # noqa: FBT003 - a literal of SQL


def _reason() -> Column:
    """Why a validated line is not an event; NULL when it is one."""
    missing = [F.when(F.col(name).isNull(), F.lit(name)) for name in REQUIRED]
    names = F.concat_ws(", ", *missing)
    nothing_read = F.coalesce(*[F.col(name).cast("string") for name in EVENTS.names]).isNull()
    is_corrupt = F.col(CORRUPT).isNotNull()
    return (
        F.when(~F.col("is_text"), F.lit(NOT_UTF8))
        .when(is_corrupt & nothing_read, F.lit("it is not a JSON object"))
        .when(~F.col("is_alone"), F.lit("it is more than one JSON object"))
        .when(is_corrupt, F.lit("a field has a value of another type"))
        .when(names != "", F.concat(F.lit("it has no "), names))
        .when(~_is_in_time(), F.lit(f"its ts_us is not between 0 and {TS_US_MAX} microseconds"))
        .when(
            _is_newer(),
            F.format_string(f"its schema is %d, and the newest known is {NEWEST_SCHEMA}", "schema"),
        )
        .when(~F.col("is_exact"), F.lit(f"its cost_usd has more than {MONEY.scale} decimal places"))
    )


# ---- files -----------------------------------------------------------------------------------------------


def segment_bits(condition: Column) -> Column:
    """An aggregate: a bit for the segment of each row for which the condition holds. NULL without such a row.

    It is a single long, so it costs next to nothing. Segments may share a bit.
    """
    bit = (F.crc32("segment") % SEGMENT_BITS).cast("int")
    bits = F.call_function("shiftleft", F.lit(1).cast("long"), bit)
    return F.bit_or(F.when(condition, bits))


def may_have_rejects(segment: str, bits: int | None) -> bool:
    """Whether the bit of a segment is set."""
    return bool((bits or 0) >> crc32(segment.encode()) % SEGMENT_BITS & 1)


def with_all_columns(rows: DataFrame) -> DataFrame:
    """Event rows with all columns of this version. A column that an earlier version lacks is NULL."""
    known = set(rows.columns)
    missing = {
        field.name: F.lit(None).cast(field.dataType) for field in EVENTS.fields if field.name not in known
    }
    return rows.withColumns(missing) if missing else rows  # Spark Connect refuses an empty map


def with_mark(rows: DataFrame) -> DataFrame:
    """Rows of `bronze_events` with the column of marks, which earlier versions lack."""
    return rows if MARK in rows.columns else rows.withColumn(MARK, F.lit(None).cast(StringType()))


def texts(spark: SparkSession, folder: str, segments: Sequence[str]) -> DataFrame:
    """The lines of segments below a folder, as text."""
    found = spark.read.option("basePath", folder).text(list(segments))
    sealed = F.col("date").cast(_SEALED.dataType)
    return found.select("value", F.col("_metadata.file_name").alias("segment"), sealed.alias("date"))
