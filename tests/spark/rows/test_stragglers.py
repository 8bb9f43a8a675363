"""One event of long ago in a batch reads an hour of long ago, and not the history since."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postroom.pipeline import paths
from postroom.pipeline.delta import file_index
from postroom.pipeline.delta.delta_log import DataFile
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.jobs import Pipeline
from tests.spark.plainrows import all_rows
from tests.spark.stories import HOUR_US, NOW_US, happened, write_segment

HOURS = range(0, 60, 6)


def born(hour: int, seq: int) -> bytes:
    """An event of a message whose id begins with its time, that many hours before the present."""
    ts_us = NOW_US - hour * HOUR_US
    return happened("s", seq, f"m{ts_us:020}", "enqueued", ts_us=ts_us)


def test_straggler_reads_the_hour_that_it_is_of(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "SMALL_BYTES", 0)
    monkeypatch.setattr(file_index, "FILES_UNCOUNTED", 0)
    events, tables = tmp_path / "events", Tables(tmp_path / "tables")
    job = Pipeline(spark, tables, gold={})
    for number, hour in enumerate(reversed(HOURS), 1):  # a file for each hour
        write_segment(events, number, [born(hour, number)])
        streams = job.streams(events)
        job._find_new_segments(streams)
        list(job._ingest(streams[0]))
        job._refresh_table(tables.pinned(), "silver_events", rebuild=False)
    job._refresh_table(tables.pinned(), "silver_messages", rebuild=False)
    write_segment(events, 90, [born(54, 1), born(0, 91)])
    read: dict[str, set[int]] = {}
    scan = Tables._scan

    def noted(
        known: Tables, session: SparkSession, name: str, files: list[DataFile], *more: object
    ) -> object:
        hours = {(NOW_US - file.low["ts_us"]) // HOUR_US for file in files if "ts_us" in file.low}
        read[name] = read.get(name, set()) | hours
        return scan(known, session, name, files, *more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Tables, "_scan", noted)
        [stream] = job.streams(events)
        job._find_new_segments([stream], skip_missing=True)
        list(job._ingest(stream))
        job._refresh_table(tables.pinned(), "silver_events", rebuild=False)
    assert read["silver_events"] == {0, 54}
    job.run(events, skip_missing=True)
    whole = Tables(tmp_path / "whole")
    Pipeline(spark, whole, gold={}).run(events, skip_missing=True)
    assert all_rows(tables) == all_rows(whole)


def test_files_between_two_ids_are_no_candidates(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [DataFile(f"{n}", 1, 1, {}, {"id": f"{n}0"}, {"id": f"{n}9"}, {}) for n in range(1, 6)]
    files.append(DataFile("unknown", 1, 1, {}, {}, {}, {}))
    ids = spark.createDataFrame([("11",), ("55",), (None,)], "id string")
    lookup = file_index.IdLookup(ids, 3, "11", "55")
    assert file_index.narrowed(files, lookup) == files
    monkeypatch.setattr(file_index, "FILES_UNCOUNTED", 0)
    assert [file.path for file in file_index.narrowed(files, lookup)] == ["1", "5", "unknown"]
