"""The tables as a declarative pipeline: `spark-pipelines run` over the same transforms.

`python -m postroom.pipeline.declarative FOLDER EVENTS` makes a project for it.

Rule 1: each table is a transform and the names of its inputs. Spark decides on the order, and on which tables
        are out of date.
Rule 2: bronze is a streaming table: each segment is read once. Silver and gold are materialized views.
Rule 3: a project has a persistent catalog of its own, so a second run knows the tables of the first, and
        reads only the new segments.
Rule 4: a table is read through a view. Otherwise Spark would bind a definition to the table of an earlier run
        in the catalog, and might build it before its inputs. The views of a pipeline are in no catalog.
Rule 5: a row that the shipper has redacted is not redacted again, by the rule of `postroom pipeline run`: the
        lines of the chain are intact, and the segment has the hash that its line records. `bronze_segments`
        has the hash of each segment, which executors compute when it arrives.
Rule 6: a definition may not query the data. Tables that do, and tables that depend on them, are only built by
        `postroom pipeline run`: `silver_spans` queries its trees until all places are found.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from pyspark import pipelines
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.types import DateType, StringType, StructField, StructType

from postroom.errors import EXIT_OK, EXIT_USAGE, InvalidMessage, InvalidSetting, PostroomError, Unavailable
from postroom.pipeline.follow.refresh import Table
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.ingest import bronze, redaction
from postroom.pipeline.ingest.segments import SegmentStream
from postroom.pipeline.schema import CORRUPT, EVENTS, LINES, MARK
from postroom.pipeline.silver.events import Append, rank
from postroom.pipeline.silver.span_tree import Tree
from postroom.pipeline.silver.tables import SILVER
from postroom.pipeline.spark.session import DRIVER_OPTIONS, LOCAL_SETTINGS, LOOPBACK, SETTINGS

Transform = tuple[Callable[..., DataFrame], tuple[str, ...], Sequence[str]]
"""A function of DataFrames, the tables that it gets, and the columns that partition the result."""

EVENTS_SETTING: Final = "spark.postroom.events"  # Spark only passes settings with this prefix
LEVEL_SETTING: Final = "spark.postroom.redaction"
LEVELS: Final = ("none", "medium", "full")
SPEC_NAME: Final = "spark-pipeline.yml"
CONF_FOLDER: Final = "conf"
CONF_NAME: Final = "spark-defaults.conf"  # the name that Spark looks for
DEFINITIONS: Final = "definitions"
SEGMENTS: Final = "bronze_segments"
FILE_NAME: Final = "[^/]+$"
BINARY_FILE: Final = "path string, modificationTime timestamp, length long, content binary"
MARKED: Final = StructType([StructField(name, StringType()) for name in ("segment", "sha256", MARK)])
QUERYING: Final = frozenset(name for name, table in SILVER.items() if isinstance(table.change, Tree))
"""Tables whose updates query the data, which a definition may not do."""

SPEC: Final = """\
name: postroom
storage: {storage}
libraries:
  - glob:
      include: {definitions}/**
configuration:
  {events_setting}: {events}
  {level_setting}: medium
  spark.sql.session.timeZone: UTC
"""
CONF: Final = {
    name: SETTINGS[name] for name in (DRIVER_OPTIONS, "spark.ui.enabled", "spark.ui.showConsoleProgress")
} | {
    **LOCAL_SETTINGS,
    "spark.connect.grpc.binding.address": LOOPBACK,
    "spark.sql.catalogImplementation": "hive",
}
"""The settings of a local Spark at its start. A spec may only have settings that can change later."""
DEFINITION: Final = """\
from postroom.pipeline.declarative import define

define(spark)
"""


def write_project(folder: Path, events: Path) -> Path:
    """Create a folder for `spark-pipelines run`; returns the path of its spec."""
    if folder.exists() and any(folder.iterdir()):
        raise InvalidSetting(f"{folder} is not empty: a project gets a folder of its own")
    definitions = folder / DEFINITIONS
    definitions.mkdir(parents=True)
    (definitions / "tables.py").write_text(DEFINITION)
    here = folder.absolute()
    (folder / CONF_FOLDER).mkdir()
    (folder / CONF_FOLDER / CONF_NAME).write_text(_conf(here))
    spec = folder / SPEC_NAME
    spec.write_text(
        SPEC.format(
            storage=(here / "storage").as_uri(),
            definitions=DEFINITIONS,
            events_setting=EVENTS_SETTING,
            events=events.absolute(),
            level_setting=LEVEL_SETTING,
        )
    )
    return spec


def _conf(folder: Path) -> str:
    """The settings of a Spark with its tables and its catalog in a folder."""
    own = {
        "spark.sql.warehouse.dir": str(folder / "tables"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": (
            f"jdbc:derby:;databaseName={folder / 'catalog'};create=true"
        ),
    }
    return "".join(f"{name}  {value}\n" for name, value in {**CONF, **own}.items())


def define(spark: SparkSession) -> None:
    """Define every table. A definitions file calls it with the session that Spark passes."""
    folder, level = spark.conf.get(EVENTS_SETTING, None), spark.conf.get(LEVEL_SETTING, "medium")
    if not folder:
        raise InvalidSetting(f"the configuration of the pipeline has no {EVENTS_SETTING}")
    if level not in LEVELS:
        raise InvalidSetting(f"{LEVEL_SETTING} must be one of {', '.join(LEVELS)}, not {level!r}")
    # Outside the definitions: they may ask Spark for nothing, such as the type of the function.
    done = redaction.is_done(level)  # type: ignore[arg-type]
    columns = redaction.redacted(level, done)  # type: ignore[arg-type]
    pipelines.temporary_view(name="lines")(named("lines", partial(arriving, spark, folder)))
    pipelines.table(name="bronze_events", partition_cols=list(bronze.PARTITIONS))(
        named("bronze_events", lambda: bronze.events(spark.readStream.table("lines")))
    )
    pipelines.table(name=SEGMENTS)(named(SEGMENTS, lambda: hashed(spark.readStream, folder)))
    redacted = Redacted(columns, done, marked_segments(spark, folder))
    derived = {name: _transform(name, redacted) for name in lazy({**SILVER, **GOLD})}
    for name in ("bronze_events", SEGMENTS, *derived):
        pipelines.temporary_view(name=view_of(name))(named(view_of(name), partial(spark.read.table, name)))
    for name, (build, inputs, partitions) in derived.items():
        view = pipelines.materialized_view(name=name, partition_cols=list(partitions))
        view(named(name, partial(_built, spark, build, inputs, partitions)))


class Redacted(NamedTuple):
    """How the events of bronze are redacted."""

    columns: Mapping[str, Column]
    done: Column
    marks: DataFrame
    """The marks of segments in the chain, with the hash that it records."""

    def build(self, table: Table, rows: DataFrame, segments: DataFrame) -> DataFrame:
        intact = self.marks.join(segments, ["segment", "sha256"]).select("segment", MARK).distinct()
        marked = rows.join(F.broadcast(intact), "segment", "left")
        return once(table.build(marked, self.columns, self.done))


def _transform(name: str, redacted: Redacted) -> "Transform":
    table = (SILVER | GOLD)[name]
    if isinstance(table.change, Append):
        return partial(redacted.build, table), (table.source, SEGMENTS), table.partition_by
    return table.build, table.inputs, table.partition_by


def _built(
    spark: SparkSession, build: Callable[..., DataFrame], inputs: tuple[str, ...], partitions: Sequence[str]
) -> DataFrame:
    """The rows of a table. Spark's catalog needs the partition columns last."""
    made = build(*[spark.read.table(view_of(source)) for source in inputs])
    return made.selectExpr(f"* EXCEPT ({', '.join(partitions)})", *partitions) if partitions else made


def view_of(name: str) -> str:
    return f"of_{name}"


def named(name: str, query: Callable[[], DataFrame]) -> Callable[[], DataFrame]:
    """A query with the name of its table, which Spark reports."""

    def flow() -> DataFrame:
        return query()

    flow.__name__ = name
    return flow


def lazy(tables: Mapping[str, Table]) -> list[str]:
    """The tables whose transforms run no query, and whose inputs do not either."""
    missing = set(QUERYING)
    found = []
    for name, table in tables.items():
        if name not in missing and missing.isdisjoint(table.inputs):
            found.append(name)
        else:
            missing.add(name)
    return found


def arriving(spark: SparkSession, folder: str) -> DataFrame:
    """The lines of the segments as they arrive, with `segment` and the `date` of its folder."""
    schema = StructType([*LINES.fields, StructField("date", DateType())])
    reader = spark.readStream.schema(schema).option("columnNameOfCorruptRecord", CORRUPT)
    found = reader.option("mode", "PERMISSIVE").json(folder)
    return found.select(*LINES.names, F.col("_metadata.file_name").alias("segment"), "date")


def hashed(reader: DataStreamReader | DataFrameReader, folder: str) -> DataFrame:
    """Grain: a segment. The hash of its bytes."""
    found = reader.format("binaryFile").schema(BINARY_FILE).option("recursiveFileLookup", "true")
    segments = found.option("pathGlobFilter", "*.jsonl").load(folder)
    name = F.regexp_extract("path", FILE_NAME, 0).alias("segment")
    return segments.select(name, F.sha2("content", 256).alias("sha256"))


def marked_segments(spark: SparkSession, folder: str) -> DataFrame:
    """Grain: a segment with a mark in the chain. None if the chain is damaged, or not on this machine."""
    try:
        chain = SegmentStream(folder).sound_chain()
    except (InvalidMessage, Unavailable):
        chain = []
    known = [(entry.name.rpartition("/")[2], entry.sha256, entry.redaction) for entry in chain]
    return spark.createDataFrame([row for row in known if all(row)], MARKED)


def once(rows: DataFrame) -> DataFrame:
    """Grain: event_id. Of two events with one id the same one is kept as by `postroom pipeline run`."""
    names = [*EVENTS.names, "day"]
    others = [name for name in names if name not in {"event_id", "ts_us"}]
    ranked = rows.withColumn("rank", rank({}))
    first = ranked.groupBy("event_id").agg(F.min(F.struct("ts_us", "rank", *others)).alias("event"))
    return first.select("event_id", "event.*").select(*names)


def main(words: list[str]) -> int:
    match words:
        case [folder, events]:
            try:
                sys.stdout.write(f"{write_project(Path(folder), Path(events))}\n")
            except PostroomError as error:
                sys.stderr.write(f"{error}\n")
                return EXIT_USAGE
            return EXIT_OK
    sys.stderr.write("usage: python -m postroom.pipeline.declarative FOLDER EVENTS\n")
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
