import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.schema import EVENTS
from postroom.pipeline.tables import Tables
from tests.spark.conftest import TablesOf
from tests.spark.oracle import FIELDS, expected, oracle, rows_of

GOOD = {
    "event_id": "s#1",
    "seq": 1,
    "ts_us": 5,
    "kind": "created",
    "contract": "bus",
    "source": "s",
    "schema": 1,
}


def write_segment(folder: Path, number: int, lines: list[bytes]) -> str:
    place = folder / "date=2025-01-05" / "hour=01" / f"{number:08}-0123456789ab.jsonl"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"".join(line + b"\n" for line in lines))
    return place.name


def line(**fields: object) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


@pytest.fixture
def taken(spark: SparkSession, tmp_path: Path) -> Tables:
    write_segment(
        tmp_path / "events",
        1,
        [
            line(cost_usd=0.123456789, detail={"a": [1, 2.50]}),
            b'{"event_id":"s#2","seq":2,',
            b"",
            b"{}",
            b"[1]",
            line(event_id="s#3", seq="three"),
            b'{"event_id":"s#4","seq":4}',
            b"\xff\xfe",
        ],
    )
    write_segment(
        tmp_path / "events",
        2,
        [
            b'{"event_id":"s#5","seq":5,"ts_us":6,"kind":"created","contract":"bus","source":"s"}',
            line(event_id="s#6", seq=6, schema=2, mood="calm", detail={"deep": {"er": None}}),
        ],
    )
    tables = Tables(tmp_path / "tables")
    Pipeline(spark, tables, gold={}).run(tmp_path / "events")
    return tables


def test_every_line_is_a_row_with_its_segment(spark: SparkSession, tables_of: TablesOf) -> None:
    folder, tables = tables_of(1500, 11)
    columns, rows = expected(oracle(folder), "lines")
    found = tables.read(spark, "bronze_events")
    assert found.columns == columns
    assert rows_of(found) == rows


def test_the_schema_is_that_of_the_events() -> None:
    from postroom.core.events import AuditEvent

    assert list(AuditEvent.__struct_fields__) == EVENTS.names == list(FIELDS)


def test_a_line_that_is_no_event_is_kept_with_the_reason(spark: SparkSession, taken: Tables) -> None:
    found = taken.read(spark, "bronze_rejects").select("line", "reason").collect()
    assert {row["line"]: row["reason"] for row in found} == {
        '{"event_id":"s#2","seq":2,': "it is not a JSON object",
        "{}": "it has no event_id, seq, ts_us, kind, contract, source",
        "[1]": "it is not a JSON object",
        line(event_id="s#3", seq="three").decode(): "a field has a value of another type",
        '{"event_id":"s#4","seq":4}': "it has no ts_us, kind, contract, source",
        "\ufffd\ufffd": "it is not a JSON object",
    }
    assert {row["segment"] for row in taken.read(spark, "bronze_rejects").collect()} == {
        "00000001-0123456789ab.jsonl"
    }


def test_money_is_exact_and_details_stay_as_they_were(spark: SparkSession, taken: Tables) -> None:
    row = taken.read(spark, "bronze_events").where("seq = 1").first()
    assert row is not None
    assert (str(row["cost_usd"]), row["detail"]) == ("0.123456789", '{"a": [1, 2.5]}')


def test_events_of_older_and_newer_versions_are_read(spark: SparkSession, taken: Tables) -> None:
    rows = taken.read(spark, "silver_events").select("seq", "schema", "queue", "detail", "ts_us").collect()
    assert sorted(tuple(row) for row in rows) == [
        (1, 1, None, '{"a": [1, 2.5]}', 5),
        (5, None, None, None, 6),
        (6, 2, None, '{"deep": {"er": null}}', 5),
    ]


def test_a_segment_is_taken_once(spark: SparkSession, taken: Tables, tmp_path: Path) -> None:
    job = Pipeline(spark, taken, gold={})
    before = {name: taken.version(name) for name in taken.names()}
    assert job.run(tmp_path / "events").segments == 0
    assert {name: taken.version(name) for name in taken.names()} == before
    write_segment(tmp_path / "events", 3, [line(event_id="s#7", seq=7), b"no"])
    summary = job.run(tmp_path / "events")
    assert (summary.segments, summary.lines, summary.rejects) == (1, 2, 1)
    assert (summary.rows["bronze_events"], summary.rows["bronze_rejects"]) == (4, 7)


def test_open_segments_and_other_files_are_left_alone(
    spark: SparkSession, taken: Tables, tmp_path: Path
) -> None:
    (tmp_path / "events" / "_open").mkdir()
    (tmp_path / "events" / "_open" / "00000004.jsonl").write_bytes(line(seq=9))
    (tmp_path / "events" / "date=2025-01-05" / "hour=01" / "notes.jsonl").write_bytes(line(seq=9))
    assert Pipeline(spark, taken, gold={}).run(tmp_path / "events").segments == 0
