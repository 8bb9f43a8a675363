"""Segments into files of `bronze_events`.

Rule 1: segments are taken for what they nearly always are: events, line by line. The first line that is none
        ends that, and they are read again by a reader that keeps such lines apart, which takes longer.
Rule 2: a segment lies in the folder of its date, so the rows of a date are written by themselves.
Rule 3: what every row of a file has in common is told by a path, and not computed for each of them.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from deltalake.transaction import AddAction
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.ordering import in_turn
from postroom.pipeline.schema import REQUIRED
from postroom.pipeline.segments import Segment
from postroom.pipeline.tables import Staged, Tables
from postroom.pipeline.transforms import bronze

DATES_AT_ONCE: Final = 3  # one begins and one ends while another one has all cores
TABLE: Final = "bronze_events"


class Taken(NamedTuple):
    """The files of some segments, and what their lines were."""

    staged: Staged
    lines: int
    marks: int | None
    """Of the segments in which a line is bad; see `bronze.bad_marks`."""


def take(spark: SparkSession, tables: Tables, folder: str, segments: Iterable[Segment]) -> Taken:
    """Write the files of segments below a folder. They count with a commit to come."""
    paths = [segment.path for segment in segments]
    try:
        adds = _take_events(spark, tables, paths)
    except (PySparkException, Py4JJavaError) as error:
        if not bronze.cannot_be_read(error):
            raise
        return take_lines(spark, tables, folder, paths)
    if not all(map(_is_whole, adds)):
        for add in adds:
            (tables.folder / TABLE / add.path).unlink()
        return take_lines(spark, tables, folder, paths)
    staged = Staged(bronze.ROWS, bronze.PARTITIONS, adds)
    return Taken(staged, staged.rows, None)


def _take_events(spark: SparkSession, tables: Tables, paths: Iterable[Path]) -> list[AddAction]:
    dates: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        dates[path.parts[-3].partition("=")[2]].append(path)
    adds = {}

    def take_date(date: str) -> None:
        with tables.aside(TABLE) as links:
            _link(dates[date], links)
            rows = bronze.plain(spark, str(links))
            adds[date] = tables.stage_in(TABLE, rows, {bronze.PARTITIONS[0]: date})

    in_turn(dict.fromkeys(sorted(dates), ()), take_date, DATES_AT_ONCE)
    return list(chain.from_iterable(adds.values()))


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
    """The careful way: what is no event is left out, and its segment marked."""
    seen = Observation()
    parsed = bronze.lines(spark, folder, [str(path) for path in paths])
    lines = parsed.observe(seen, bronze.bad_marks().alias("bad"), F.count("*").alias("lines"))
    staged = tables.stage(TABLE, bronze.events(lines), partition_by=bronze.PARTITIONS)
    return Taken(staged, seen.get["lines"], seen.get["bad"])
