"""Writes segments as files of `bronze_events`.

Rule 1: if all segments of a batch match their hash and have only plain lines, Spark's JSON reader reads them
        directly. Otherwise the batch is validated line by line, which takes longer.
Rule 2: a segment lies in the folder of its date, so each date is written by a job of its own.
Rule 3: values that all rows of a file share come from its path, and are not computed for each row.
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
from postroom.pipeline.schedule import run_in_order
from postroom.pipeline.schema import REQUIRED
from postroom.pipeline.tables import Staged, Tables

DATES_AT_ONCE: Final = 3  # one starts and one ends while another uses all cores
TABLE: Final = "bronze_events"


class WrittenSegments(NamedTuple):
    """The files of some segments, staged for a commit, and the number of lines."""

    staged: Staged
    lines: int
    bad_segments: int | None
    """The segments with a bad line, as bits; see `bronze.segment_bits`."""


def write_segments(
    spark: SparkSession, tables: Tables, folder: str, segments: Iterable[Segment]
) -> WrittenSegments:
    """Write the files of segments below a folder. They become visible with a later commit."""
    segments = list(segments)
    paths = [segment.path for segment in segments]
    adds = _write_plain_lines(spark, tables, paths) if _are_trusted(segments) else None
    if adds is None:
        return write_validated_lines(spark, tables, folder, paths)
    staged = Staged(bronze.ROWS, bronze.PARTITIONS, adds)
    return WrittenSegments(staged, staged.rows, None)


def _are_trusted(segments: Iterable[Segment]) -> bool:
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="hash") as pool:
        return all(pool.map(_is_trusted, segments))


def _is_trusted(segment: Segment) -> bool:
    """Whether Spark's JSON reader reads a segment without a loss."""
    return is_as_sealed(segment) and are_plain(segment.path)


def _write_plain_lines(spark: SparkSession, tables: Tables, paths: Iterable[Path]) -> list[AddAction] | None:
    """None when a line is no event; the files are deleted then."""
    adds: list[AddAction] = []
    try:
        (_write_at_once if tables.is_small else _write_by_date)(spark, tables, paths, adds)
    except (PySparkException, Py4JJavaError) as error:
        _delete_files(tables, adds)
        if not bronze.is_read_failure(error):
            raise
        return None
    if all(map(_is_whole, adds)):
        return adds
    _delete_files(tables, adds)
    return None


def _write_at_once(spark: SparkSession, tables: Tables, paths: Iterable[Path], adds: list[AddAction]) -> None:
    with tables.staging_folder(TABLE) as links:
        for path in paths:
            _link(path, links / path.parts[-3])
        rows = bronze.read_valid_lines(spark, str(links))
        adds.extend(tables.stage(TABLE, rows, partition_by=bronze.PARTITIONS).adds)


def _write_by_date(spark: SparkSession, tables: Tables, paths: Iterable[Path], adds: list[AddAction]) -> None:
    dates: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        dates[path.parts[-3].partition("=")[2]].append(path)

    def write_date(date: str) -> None:
        with tables.staging_folder(TABLE) as links:
            for path in dates[date]:
                _link(path, links)
            rows = bronze.plain(spark, str(links))
            adds.extend(tables.stage_in(TABLE, rows, {bronze.PARTITIONS[0]: date}))

    run_in_order(dict.fromkeys(sorted(dates), ()), write_date, DATES_AT_ONCE)


def _delete_files(tables: Tables, adds: Iterable[AddAction]) -> None:
    for add in adds:
        (tables.folder / TABLE / add.path).unlink()


def _link(path: Path, links: Path) -> None:
    """Link a segment into a partition folder, so that Spark reads its name as a column."""
    folder = links / f"segment={path.name}"
    folder.mkdir(parents=True)
    (folder / path.name).symlink_to(path)


def _is_whole(add: AddAction) -> bool:
    """Whether every row of a file has the required fields of an event."""
    stats = json.loads(add.stats)
    return not stats["numRecords"] or all(stats["nullCount"].get(name) == 0 for name in REQUIRED)


def write_validated_lines(
    spark: SparkSession, tables: Tables, folder: str, paths: Iterable[Path]
) -> WrittenSegments:
    """Validate every line. A line that is no event is left out, and the bit of its segment is set."""
    seen = Observation()
    lines = bronze.validated(bronze.texts(spark, folder, [str(path) for path in paths]))
    bad = bronze.segment_bits(F.col("reason").isNotNull()).alias("bad_segments")
    lines = lines.observe(seen, bad, F.count("*").alias("lines"))
    with tables.staging_folder(TABLE) as copies:
        bronze.write_valid_lines(lines, str(copies))
        rows = bronze.read_valid_lines(spark, str(copies))
        staged = tables.stage(TABLE, rows, partition_by=bronze.PARTITIONS)
    return WrittenSegments(staged, seen.get["lines"], seen.get["bad_segments"])
