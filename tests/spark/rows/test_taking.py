"""The quick way to take segments, and the careful one for lines that are no events: they give the same."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postroom.pipeline import taking
from postroom.pipeline.segments import sealed_segments
from postroom.pipeline.tables import Tables
from postroom.pipeline.transforms import bronze
from tests.spark.plainrows import rows_of
from tests.spark.stories import TOO_SHORT, happened, line, write_segment

GOOD = [happened("s", 1, "m1"), happened("s", 2, "m2", payload="p")]
ODD_LINES = [
    b"null",
    GOOD[0] + b"\r",
    line(event_id=None),
    line(priority="high"),
    line(cost_usd=1e30),
    line(detail=[1]),
    line(seq=1.5),
]


FORGOTTEN = {
    b"[]": "it is not a JSON object",
    b"[" + GOOD[0] + b"]": "it is not a JSON object",
    GOOD[0] + GOOD[1]: "it is more than one JSON object",
    GOOD[0] + b" and more": "it is more than one JSON object",
    GOOD[0] + b"," + GOOD[1]: "it is more than one JSON object",
    GOOD[0] + b"]": "it is more than one JSON object",
    GOOD[0] + b"}": "it is more than one JSON object",
    GOOD[0] + b',"line":{}': "it is more than one JSON object",
}
"""Lines of which Spark's reader says nothing, or takes a part and nothing of the rest; and the reason."""


def break_seal(events: Path) -> None:
    """As after somebody has changed a segment: its name promises other bytes."""
    for segment in sealed_segments(events):
        number, _, _ = segment.path.name.partition("-")
        segment.path.rename(segment.path.with_name(f"{number}-{'0' * 12}.jsonl"))


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


def test_what_is_not_as_it_was_sealed_is_read_to_the_end_of_every_line(
    spark: SparkSession, tmp_path: Path
) -> None:
    events = tmp_path / "events"
    write_segment(events, 1, [GOOD[0], b"", *FORGOTTEN, b"  ", GOOD[1] + b"  "])
    break_seal(events)
    _, lines, marks, rows = taken(spark, tmp_path, "quick")
    assert (lines, rows, marks is not None) == (len(FORGOTTEN) + 2, 2, True)
    texts = bronze.texts(spark, str(events), [str(segment.path) for segment in sealed_segments(events)])
    kept = {row["line"].encode(): row["reason"] for row in bronze.rejects(texts).collect()}
    assert kept == FORGOTTEN


def test_a_bad_line_of_one_date_leaves_no_files_of_the_others(spark: SparkSession, tmp_path: Path) -> None:
    write_segment(tmp_path / "events", 1, GOOD, "2025-01-04")
    write_segment(tmp_path / "events", 2, [*GOOD, b"{"], "2025-01-05")
    _, lines, _, rows = taken(spark, tmp_path, "quick")
    assert (lines, rows) == (5, 4)


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
