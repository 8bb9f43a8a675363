"""Redaction that the shipper has done is not done again; all other redaction is."""

import shutil
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from postroom import Tasks
from postroom.audit import redaction_marks
from postroom.audit.layout import CHAIN
from postroom.audit.redaction_marks import mark_of
from postroom.audit.segment_writer import SegmentSink
from postroom.core.formats.events import AuditEvent
from postroom.core.redaction import Level
from postroom.pipeline import paths
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.ingest import bronze, bronze_writer
from postroom.pipeline.ingest.segments import SegmentStream
from postroom.pipeline.jobs import SILVER_INPUTS, Pipeline
from postroom.pipeline.schema import MARK
from postroom.server.folder.shipping import Sources, opened
from postroom.settings import AuditSettings
from tests.spark.oracle import expected, oracle, stored
from tests.spark.plainrows import column, records, rows_of
from tests.spark.segmentfiles import sealed_segments
from tests.spark.stories import happened, write_segment

SECRETS = ("ada@example.com", "hunter2")
LEVELS: tuple[Level, ...] = ("full", "none", "medium")
RAW = '{"to":"ada@example.com"}'


def ship(folder: Path, level: Level) -> None:
    """Ship the events of some tasks, whose payloads and errors have secrets, redacted at a level."""
    store = f"sqlite:///{folder}/queue.db"
    with Tasks.open(store) as tasks:
        for _ in range(2):
            tasks.enqueue(agent="a", payload={"to": SECRETS[0], "n": 12}, type="t", max_retries=0)
            [task] = tasks.claim(agent="a")
            tasks.fail(task.task_id, task.lease, f'login of "bo" with password={SECRETS[1]} failed')
    with opened(folder / "audit", Sources(stores=(store,)), AuditSettings(redaction=level)) as shipping:
        shipping.once()


def claim_redacted(folder: Path, *events: bytes) -> None:
    """Seal events as redacted, though they are not: silver shows then whether they were redacted again."""
    with SegmentSink(folder, durability="os", prepare=lambda event: event, redaction=mark_of("full")) as sink:
        for event in events:
            sink.write([msgspec.json.decode(event, type=AuditEvent)])
            sink.seal()


def refresh(spark: SparkSession, tables: Tables, folder: Path, *, rebuild: bool = False) -> None:
    """What `run` and `backfill` do, for the only table that is redacted."""
    job = Pipeline(spark, tables, gold={})
    [stream] = streams = job.streams(folder)
    job._find_new_segments(streams)
    with tables.profile(job._new_bytes()):
        assert all(job._ingest(stream))
        job._refresh_tables({"silver_events": SILVER_INPUTS["silver_events"]}, rebuild=rebuild)


def payloads(tables: Tables) -> set[str]:
    return {row["payload"] for row in records(tables, "silver_events")}


def test_the_rows_are_the_same_with_and_without_marks(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark writes the files of the marked ones, as those of a large history."""
    for level in LEVELS:
        ship(tmp_path, level)
    shutil.copytree(tmp_path / "audit", tmp_path / "unmarked")
    (tmp_path / "unmarked" / CHAIN).unlink()
    marked, unmarked = Tables(tmp_path / "marked-tables"), Tables(tmp_path / "unmarked-tables")
    refresh(spark, unmarked, tmp_path / "unmarked")
    monkeypatch.setattr(paths, "SMALL_BYTES", 0)
    refresh(spark, marked, tmp_path / "audit")
    assert rows_of(marked, "silver_events") == rows_of(unmarked, "silver_events")
    columns, rows = expected(oracle(tmp_path / "audit"), "events")
    assert stored(marked, "silver_events", columns) == rows
    assert column(rows_of(unmarked, "bronze_events"), MARK) == set()
    told = {
        mark: str([row for row in records(marked, "bronze_events") if row[MARK] == mark])
        for mark in (mark_of("full"), None, mark_of("medium"))
    }
    leaks = {mark for mark, text in told.items() for secret in SECRETS if secret in text}
    assert (leaks, all("payload" in text for text in told.values())) == ({None}, True)
    assert not any(secret in str(records(marked, "silver_events")) for secret in SECRETS)


@pytest.mark.parametrize("is_small", [True, False])
def test_marked_rows_are_redacted_after_a_change_of_the_rules(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_small: bool
) -> None:
    monkeypatch.setattr(paths, "SMALL_BYTES", paths.SMALL_BYTES * is_small)
    claim_redacted(tmp_path / "audit", happened("s", 1, "m1", payload=RAW, error=RAW))
    tables = Tables(tmp_path / "tables")
    refresh(spark, tables, tmp_path / "audit")
    assert payloads(tables) == {RAW}
    monkeypatch.setattr(redaction_marks, "_rules_digest", lambda: "of other rules")
    refresh(spark, tables, tmp_path / "audit", rebuild=True)
    assert payloads(tables) == {'{"to":"<email>"}'}


def test_a_mark_does_not_count_for_bytes_that_were_changed(spark: SparkSession, tmp_path: Path) -> None:
    """That of the other segment does, whose bytes are as they were sealed."""
    events = [happened("s", n, f"m{n}", payload=RAW.replace("ada", f"ada{n}")) for n in (1, 2)]
    claim_redacted(tmp_path / "audit", *events)
    changed = sealed_segments(tmp_path / "audit")[0].path
    changed.write_bytes(changed.read_bytes().replace(b"ada1", b"eve1"))
    tables = Tables(tmp_path / "tables")
    refresh(spark, tables, tmp_path / "audit")
    assert payloads(tables) == {'{"to":"<email>"}', RAW.replace("ada", "ada2")}


def test_an_event_cannot_mark_itself(spark: SparkSession, tmp_path: Path) -> None:
    """The mark in the chain counts for plain lines, and one with an unknown field is none."""
    write_segment(tmp_path / "audit", 1, [happened("s", 1, "m1", payload=RAW, redaction=mark_of("full"))])
    stream, tables = SegmentStream(tmp_path / "audit"), Tables(tmp_path / "tables")
    ready = [segment._replace(redaction=mark_of("full")) for segment in stream.segments()]
    tables.commit("bronze_events", bronze_writer.write_segments(spark, tables, stream, ready).staged)
    [row] = records(tables, "bronze_events")
    assert (row[MARK], row["rescued"]) == (None, f'{{"redaction":"{mark_of("full")}"}}')


def test_a_micro_batch_has_the_marks_of_its_segments(spark: SparkSession, tmp_path: Path) -> None:
    claim_redacted(tmp_path / "audit", happened("s", 1, "m1"))
    with SegmentSink(tmp_path / "audit", durability="os") as sink:
        sink.write([msgspec.json.decode(happened("s", 2, "m2"), type=AuditEvent)])
        sink.seal()
    stream, tables = SegmentStream(tmp_path / "audit"), Tables(tmp_path / "tables")
    ready = stream.pending_after(-1).ready
    rows = bronze.plain(spark, [stream.path_of(segment) for segment in ready], with_date=True)
    found = bronze_writer.write_carried(spark, tables, stream, ready, rows)
    tables.commit("bronze_events", found.staged)
    marks = {row["event_id"]: row[MARK] for row in records(tables, "bronze_events")}
    assert marks == {"s#1": mark_of("full"), "s#2": None}
