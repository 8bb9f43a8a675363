"""The quick way to take segments, and the careful one for lines that are no events: they give the same."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postroom.pipeline import taking
from postroom.pipeline.segments import sealed_segments
from postroom.pipeline.tables import Tables
from tests.spark.plainrows import rows_of
from tests.spark.stories import TOO_SHORT, happened, line, write_segment

GOOD = [happened("s", 1, "m1"), happened("s", 2, "m2", payload="p")]
ODD_LINES = [
    b"null",
    b"[]",
    GOOD[0] + GOOD[1],
    GOOD[0] + b"\r",
    line(event_id=None),
    line(priority="high"),
    line(cost_usd=1e30),
    line(detail=[1]),
    line(seq=1.5),
]


def taken(spark: SparkSession, folder: Path, how: str) -> tuple[object, ...]:
    tables = Tables(folder / how)
    segments = sealed_segments(folder / "events")
    if how == "quick":
        found = taking.take(spark, tables, str(folder / "events"), segments)
    else:
        paths = [segment.path for segment in segments]
        found = taking.take_lines(spark, tables, str(folder / "events"), paths)
    tables.commit("bronze_events", found.staged)
    files = {
        path.relative_to(tables.folder / "bronze_events").as_posix()
        for path in tables.folder.rglob("*.parquet")
    }
    assert files == {file.path for file in tables.files("bronze_events")}, "an orphan is left"
    return rows_of(tables, "bronze_events"), found.lines, found.marks, found.staged.rows


@pytest.mark.parametrize("odd", ODD_LINES)
def test_whatever_a_line_says_the_quick_way_and_the_careful_one_agree(
    spark: SparkSession, tmp_path: Path, odd: bytes
) -> None:
    write_segment(tmp_path / "events", 1, GOOD)
    write_segment(tmp_path / "events", 2, [GOOD[0], odd, GOOD[1]])
    assert taken(spark, tmp_path, "quick") == taken(spark, tmp_path, "careful")


def test_events_alone_are_read_once_and_an_empty_segment_is_none(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_segment(tmp_path / "events", 1, GOOD)
    write_segment(tmp_path / "events", 2, [])
    want = taken(spark, tmp_path, "careful")
    monkeypatch.setattr(taking, "take_lines", None)
    assert taken(spark, tmp_path, "quick") == want


def test_a_line_that_lacks_a_field_is_noticed(spark: SparkSession, tmp_path: Path) -> None:
    write_segment(tmp_path / "events", 1, [*GOOD, TOO_SHORT])
    _, lines, marks, rows = taken(spark, tmp_path, "quick")
    assert (lines, rows, marks is not None) == (3, 2, True)
