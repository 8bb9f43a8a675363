"""The quick way to take segments, and the careful one for lines that are no events: they give the same."""

from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.audit.layout import CHAIN, SEGMENT
from postroom.audit.segment_writer import SegmentSink
from postroom.core.formats.events import AuditEvent
from postroom.errors import Unavailable
from postroom.pipeline import paths
from postroom.pipeline.delta.storage import Storage
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.ingest import bronze, bronze_writer
from postroom.pipeline.ingest.segments import SegmentStream
from postroom.pipeline.jobs import Pipeline
from tests.spark.plainrows import records, rows_of
from tests.spark.segmentfiles import sealed_segments
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
    line(mood="calm"),
    line(rescued="mine"),
    line(schema=99),
    line(schema=None),
    line(ts_us=1 << 53),
    line(message_id=""),
]

AMOUNTS = {
    b"0.123456789": "0.123456789",
    b"0.1234567890": "0.123456789",
    b"1E-7": "0.000000100",
    b"-12.5": "-12.500000000",
    b"999999999": "999999999.000000000",
    b"0.1234567891": None,
    b"1e-10": None,
    b"0.12345678900000000000000000000000000000000000001": None,
    b"1e9": None,
}
"""What a line says that something cost, and the column; None where the line is rejected."""
DEEP = 1_000_000


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
    stream = SegmentStream(folder / "events")
    segments = stream.segments()
    if how == "carried":
        paths = [stream.path_of(segment) for segment in segments]
        date = F.lit(segments[0].date).cast("date")
        carried = bronze.plain(spark, paths).withColumn("date", date)
        found = bronze_writer.write_carried(spark, tables, stream, segments, carried)
    else:
        write = bronze_writer.write_segments if how == "quick" else bronze_writer.write_validated_lines
        found = write(spark, tables, stream, segments)
    tables.commit("bronze_events", found.staged)
    files = {
        path.relative_to(tables.folder / "bronze_events").as_posix()
        for path in tables.folder.rglob("*.parquet")
    }
    assert files == {file.path for file in tables.files("bronze_events")}, "an orphan is left"
    return rows_of(tables, "bronze_events"), found.lines, found.bad_segments, found.staged.rows


@pytest.mark.parametrize("odd", ODD_LINES)
def test_whatever_a_line_says_the_quick_way_and_the_careful_one_agree(
    spark: SparkSession, tmp_path: Path, odd: bytes
) -> None:
    write_segment(tmp_path / "events", 1, GOOD)
    write_segment(tmp_path / "events", 2, [GOOD[0], odd, GOOD[1]])
    want = taken(spark, tmp_path, "careful")
    assert taken(spark, tmp_path, "quick") == want
    assert taken(spark, tmp_path, "carried") == want


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


def test_an_amount_of_money_is_kept_exactly_or_the_line_is_rejected(
    spark: SparkSession, tmp_path: Path
) -> None:
    lines = {
        line(seq=n, event_id=f"s#{n}", cost_usd=0).replace(b'"cost_usd": 0', b'"cost_usd": ' + amount): kept
        for n, (amount, kept) in enumerate(AMOUNTS.items(), 1)
    }
    write_segment(tmp_path / "events", 1, list(lines))
    stream, tables = SegmentStream(tmp_path / "events"), Tables(tmp_path / "tables")
    found = bronze_writer.write_segments(spark, tables, stream, stream.segments())
    tables.commit("bronze_events", found.staged)
    stored = {row["seq"]: f"{row['cost_usd']:f}" for row in records(tables, "bronze_events")}
    assert stored == {n: kept for n, kept in enumerate(AMOUNTS.values(), 1) if kept is not None}


def test_a_line_that_is_nested_too_deeply_is_one_reject(spark: SparkSession, tmp_path: Path) -> None:
    deep = {
        b"[" * 5_000 + b"]" * 5_000,
        b"[" * DEEP + b"]" * DEEP,
        line(detail=0).replace(b'"detail": 0', b'"detail": ' + b"[" * DEEP + b"]" * DEEP),
    }
    write_segment(tmp_path / "events", 1, [GOOD[0], *deep, GOOD[1]])
    _, lines, marks, rows = taken(spark, tmp_path, "quick")
    assert (lines, rows, marks is not None) == (len(deep) + 2, 2, True)
    paths = [str(segment.path) for segment in sealed_segments(tmp_path / "events")]
    kept = bronze.rejects(bronze.texts(spark, str(tmp_path / "events"), paths)).collect()
    assert {row["line"].encode() for row in kept} == deep
    assert {row["reason"] for row in kept} == {"it is not a JSON object"}


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
    monkeypatch.setattr(bronze_writer, "write_validated_lines", None)
    assert taken(spark, tmp_path, "quick") == want


def test_a_line_that_lacks_a_field_is_noticed(spark: SparkSession, tmp_path: Path) -> None:
    write_segment(tmp_path / "events", 1, [*GOOD, TOO_SHORT])
    _, lines, marks, rows = taken(spark, tmp_path, "quick")
    assert (lines, rows, marks is not None) == (3, 2, True)


def test_line_lost_between_validation_and_table_is_detected(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is an event or a reject. Nothing is committed then."""
    write_segment(tmp_path / "events", 1, [GOOD[0], b"{", b"[]", GOOD[1]])
    tables = Tables(tmp_path / "tables")
    job = Pipeline(spark, tables)
    [stream] = job.streams(tmp_path / "events")
    job._find_new_segments([stream])
    for broken, name in (("read_valid_lines", "bronze_events"), ("rejects", "bronze_rejects")):
        whole = getattr(bronze, broken)
        with monkeypatch.context() as patch:
            patch.setattr(bronze, broken, lambda *args, whole=whole: whole(*args).limit(1))
            with pytest.raises(Unavailable, match=f"{name} have 1 rows, and 2 were written: nothing was"):
                list(job._ingest(stream))
        assert tables.names() == []
    assert len(list(job._ingest(stream))) == 1
    assert (job._lines, job._rejects) == (4, 2)
    assert (tables.row_count("bronze_events"), tables.row_count("bronze_rejects")) == (2, 2)


def test_the_driver_reads_no_segment_of_large_data(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of a stream with a chain, nor of a copy without one whose last segment is truncated."""
    with SegmentSink(tmp_path / "chained", durability="os") as sink:
        sink.write([msgspec.json.decode(text, type=AuditEvent) for text in GOOD])
        sink.seal()
    for number, lines in enumerate([GOOD, [], GOOD, GOOD], 1):
        write_segment(tmp_path / "copied", number, lines)
    last = sealed_segments(tmp_path / "copied")[-1].path
    last.write_bytes(last.read_bytes()[:-1])
    opened: list[str] = []
    read = Storage.read

    def noted(storage: Storage, path: str, start: int = 0) -> bytes:
        opened.append(path)
        return read(storage, path, start)

    monkeypatch.setattr(Storage, "read", noted)
    monkeypatch.setattr(paths, "SMALL_BYTES", 0)
    tables = Tables(tmp_path / "tables")
    job = Pipeline(spark, tables)
    streams = job.streams([tmp_path / "chained", tmp_path / "copied"])
    job._find_new_segments(streams)
    with tables.profile(job._new_bytes()):
        batches = [[segment.number for segment in batch] for each in streams for batch in job._ingest(each)]
    assert (batches, tables.row_count("bronze_events")) == ([[1], [1, 2, 3]], 3 * len(GOOD))
    assert job._last_note.endswith("copied: segment 4 is truncated or missing and waited for")
    assert CHAIN in opened
    assert not [path for path in opened if SEGMENT.fullmatch(path)]


def test_one_odd_line_sends_no_other_line_the_careful_way(spark: SparkSession, tmp_path: Path) -> None:
    """Of its segment the plain lines are not validated; those of other segments keep their mark as well."""
    write_segment(tmp_path / "events", 1, GOOD)
    write_segment(tmp_path / "events", 2, [GOOD[0], line(mood="calm"), GOOD[1]])
    stream, tables = SegmentStream(tmp_path / "events"), Tables(tmp_path / "tables")
    segments = [segment._replace(redaction="as told") for segment in stream.segments()]
    found = bronze_writer.write_segments(spark, tables, stream, segments)
    tables.commit("bronze_events", found.staged)
    marks = {(row["segment"][:8], row["redaction"]) for row in records(tables, "bronze_events")}
    assert marks == {("00000001", "as told"), ("00000002", None)}
    assert found.is_plain is not None
    texts = bronze_writer.texts_of(spark, stream, segments[1:])
    told = texts.select("value", found.is_plain.alias("is_plain")).collect()
    assert [row["is_plain"] for row in told] == [True, False, True]


def test_plain_line_is_not_validated(spark: SparkSession) -> None:
    texts = spark.createDataFrame(
        [("{", "a", None), ("[", "b", None)], "value string, segment string, date date"
    )
    found = bronze.validated(texts, F.col("segment") == "a").select("segment", "reason").collect()
    assert dict(map(tuple, found)) == {"a": None, "b": "it is not a JSON object"}
