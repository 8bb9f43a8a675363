"""Segments into files of `bronze_events`.

Rule 1: segments whose bytes are as they were sealed, and whose lines are plain, are read by Spark's JSON
        reader alone. Segments of a batch with any other line are judged line by line, which takes longer.
Rule 2: a segment lies in the folder of its date, so the rows of a date are written by themselves.
Rule 3: what every row of a file has in common is told by a path, and not computed for each of them.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from deltalake.transaction import AddAction
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.ingest import bronze
from postroom.pipeline.ingest.lines import are_plain
from postroom.pipeline.ingest.segments import Segment, is_as_sealed
from postroom.pipeline.schedule import in_turn
from postroom.pipeline.schema import REQUIRED
from postroom.pipeline.tables import Staged, Tables

DATES_AT_ONCE: Final = 3  # one begins and one ends while another one has all cores
TABLE: Final = "bronze_events"


class Taken(NamedTuple):
    """The files of some segments, and what their lines were."""

    staged: Staged
    lines: int
    marks: int | None
    """Of the segments in which a line is bad; see `bronze.marks_where`."""


def take(spark: SparkSession, tables: Tables, folder: str, segments: Iterable[Segment]) -> Taken:
    """Write the files of segments below a folder. They count with a commit to come."""
    segments = list(segments)
    paths = [segment.path for segment in segments]
    adds = _take_events(spark, tables, paths) if _are_trusted(segments) else None
    if adds is None:
        return take_lines(spark, tables, folder, paths)
    staged = Staged(bronze.ROWS, bronze.PARTITIONS, adds)
    return Taken(staged, staged.rows, None)


def _are_trusted(segments: Iterable[Segment]) -> bool:
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="hash") as pool:
        return all(pool.map(_is_trusted, segments))


def _is_trusted(segment: Segment) -> bool:
    """Whether Spark's reader can be trusted with a segment."""
    return is_as_sealed(segment) and are_plain(segment.path)


def _take_events(spark: SparkSession, tables: Tables, paths: Iterable[Path]) -> list[AddAction] | None:
    """None when a line is no event, and nothing is left of it then."""
    dates: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        dates[path.parts[-3].partition("=")[2]].append(path)
    adds: list[AddAction] = []

    def take_date(date: str) -> None:
        with tables.aside(TABLE) as links:
            _link(dates[date], links)
            rows = bronze.plain(spark, str(links))
            adds.extend(tables.stage_in(TABLE, rows, {bronze.PARTITIONS[0]: date}))

    try:
        in_turn(dict.fromkeys(sorted(dates), ()), take_date, DATES_AT_ONCE)
    except (PySparkException, Py4JJavaError) as error:
        _forget(tables, adds)
        if not bronze.cannot_be_read(error):
            raise
        return None
    if all(map(_is_whole, adds)):
        return adds
    _forget(tables, adds)
    return None


def _forget(tables: Tables, adds: Iterable[AddAction]) -> None:
    for add in adds:
        (tables.folder / TABLE / add.path).unlink()


def _link(paths: Iterable[Path], links: Path) -> None:
    """Let Spark find segments as values of a partition."""
    for path in paths:
        folder = links / f"segment={path.name}"
        folder.mkdir(parents=True)
        (folder / path.name).symlink_to(path)


def _is_whole(add: AddAction) -> bool:
    """Whether every row of a file has what an event has to have."""
    told = json.loads(add.stats)
    return not told["numRecords"] or all(told["nullCount"].get(name) == 0 for name in REQUIRED)


def take_lines(spark: SparkSession, tables: Tables, folder: str, paths: Iterable[Path]) -> Taken:
    """Judge every line by itself. A line that is no event is left out, and its segment marked."""
    seen = Observation()
    lines = bronze.judged(bronze.texts(spark, folder, [str(path) for path in paths]))
    bad = bronze.marks_where(F.col("reason").isNotNull()).alias("marks")
    lines = lines.observe(seen, bad, F.count("*").alias("lines"))
    with tables.aside(TABLE) as copies:
        bronze.set_apart(lines, str(copies))
        rows = bronze.apart(spark, str(copies))
        staged = tables.stage(TABLE, rows, partition_by=bronze.PARTITIONS)
    return Taken(staged, seen.get["lines"], seen.get["marks"])
