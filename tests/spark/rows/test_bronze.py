from typing import get_args

from postroom.core.formats.events import AuditEvent
from postroom.message import EventKind
from postroom.pipeline.schema import EVENTS
from tests.spark.conftest import TablesOf
from tests.spark.oracle import FIELDS, expected, oracle, stored
from tests.spark.plainrows import records
from tests.spark.stories import (
    AHEAD,
    BEFORE_1970,
    LAST,
    NANOSECONDS,
    NEWER_SCHEMA,
    NO_UTF8,
    NOW_US,
    THIRD,
    TOO_EXACT,
    WORDS_FOR_NUMBERS,
    Story,
)

OUT_OF_TIME = "its ts_us is not between 0 and 9007199254740991 microseconds"


def test_every_line_is_a_row_with_its_segment(tables_of: TablesOf) -> None:
    folder, tables = tables_of()
    columns, rows = expected(oracle(folder), "lines")
    assert tables.schema("bronze_events").names == columns
    assert stored(tables, "bronze_events") == rows


def test_the_history_with_faults_tells_of_every_kind_of_event(tables_of: TablesOf) -> None:
    """So every oracle of a table that is made of it has seen them all."""
    _, tables = tables_of(faults=True)
    assert {row["kind"] for row in records(tables, "bronze_events")} == set(get_args(EventKind))


def test_the_schema_is_that_of_the_events() -> None:
    assert list(AuditEvent.__struct_fields__) == EVENTS.names == list(FIELDS)


def test_a_line_that_is_not_an_event_is_kept_with_the_reason(story: Story) -> None:
    found = story.chapters[0].rows["bronze_rejects"]
    assert {row["line"]: row["reason"] for row in found} == {
        '{"event_id":"s#2","seq":2,': "it is not a JSON object",
        "{}": "it has no event_id, seq, ts_us, kind, contract, source",
        "[1]": "it is not a JSON object",
        WORDS_FOR_NUMBERS.decode(): "a field has a value of another type",
        '{"event_id":"s#4","seq":4}': "it has no ts_us, kind, contract, source",
        "\ufffd\ufffd": "it is not UTF-8",
        NO_UTF8.decode(errors="replace"): "it is not UTF-8",
        NANOSECONDS.decode(): OUT_OF_TIME,
        BEFORE_1970.decode(): OUT_OF_TIME,
        NEWER_SCHEMA.decode(): "its schema is 99, and the newest known is 1",
        TOO_EXACT.decode(): "its cost_usd has more than 9 decimal places",
    }
    [segment] = {row["segment"] for row in found}
    assert segment.startswith("00000001-")


def test_money_is_exact_and_details_stay_as_they_were(story: Story) -> None:
    row = story.chapters[0].row("bronze_events", event_id="s#1")
    assert (str(row["cost_usd"]), row["detail"]) == ("0.123456789", '{"a": [1, 2.5]}')


def test_unknown_fields_are_kept_in_a_column_of_their_own(story: Story) -> None:
    rows = {row["event_id"]: row["rescued"] for row in story.chapters[0].rows["bronze_events"]}
    assert rows["s#6"] == '{"mood":"calm","moods":[1,{"a":null}]}'
    assert {name for name, rescued in rows.items() if rescued is not None} == {"s#6"}


def test_events_of_older_and_newer_versions_are_read(story: Story) -> None:
    found = [row for row in story.chapters[0].rows["silver_events"] if row["source"] == "s"]
    assert sorted(
        (row["seq"], row["schema"], row["queue"], row["detail"], row["ts_us"]) for row in found
    ) == [
        (1, 1, None, '{"a": [1, 2.5]}', NOW_US),
        (5, None, None, None, 6),
        (6, 1, None, '{"deep": {"er": null}}', NOW_US),
    ]


def test_a_segment_is_ingested_once_by_run_or_stream(story: Story) -> None:
    """A stream, then a run, then the stream again."""
    first, second, third, *_ = story.chapters
    assert (story.second.segments, story.second.lines, story.second.rejects) == (1, 5, 1)
    assert story.second.rows == {name: len(rows) for name, rows in second.rows.items()}
    assert len(second.rows["bronze_events"]) == len(first.rows["bronze_events"]) + 4
    assert len(second.rows["bronze_rejects"]) == len(first.rows["bronze_rejects"]) + 1
    assert len(third.rows["bronze_events"]) == len(second.rows["bronze_events"]) + len(THIRD + AHEAD)


def test_ingest_skips_open_segments_and_unknown_files(story: Story) -> None:
    assert story.nothing_new.segments == 0
    assert story.chapters[3].versions == story.chapters[2].versions


def test_a_segment_after_a_missing_one_waits_for_it(story: Story) -> None:
    _, second, third, fourth, _ = story.chapters
    names = [{row["message_id"] for row in each.rows["silver_messages"]} for each in (second, third, fourth)]
    assert [{"a", "b"} <= found for found in names] == [False, True, True]
    assert (story.second.waiting, story.second.missing) == (1, [(4, 4)])
    assert story.second.note == "segment 4 is missing, and 1 later segment waits for it"
    assert (story.nothing_new.waiting, story.nothing_new.missing) == (1, [(6, 6)])
    assert "last" not in names[-1]


def test_who_does_not_wait_is_told_what_was_passed_over(story: Story) -> None:
    assert (story.skipped.segments, story.skipped.lines, story.skipped.waiting) == (1, len(LAST), 0)
    assert story.skipped.missing == [(6, 6)]
    assert story.skipped.note == "segment 6 is missing and skipped"
    assert story.chapters[4].row("silver_messages", message_id="last")["outcome"] == "open"
