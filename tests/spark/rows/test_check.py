"""The checker of tables finds what was planted, and says word for word what the checker of the core says."""

import json
import random
import shutil
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession

from postroom.audit.reader import Segments, StreamPosition
from postroom.core.formats.events import AuditEvent, event_id, to_line
from postroom.core.history import message_checker
from postroom.core.history.history_checker import History, Violation
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.follow import deleted_numbers
from postroom.pipeline.follow.deleted_numbers import deleted_runs, merged
from postroom.pipeline.generator.generate import FAULTS, generate
from postroom.pipeline.query import check as checking
from postroom.pipeline.query.check import RULES, CheckResult, ViolationSample, check_tables, spark_hash
from postroom.pipeline.schema import EVENTS
from tests.spark.commands import Commands
from tests.spark.conftest import TablesOf
from tests.spark.stories import events_in

HORIZON_US = 86_400 * 10**6

DerivedState = set[tuple[str, str, tuple[str, ...], str]]


def told(violations: list[Any]) -> DerivedState:
    return {(one.rule, one.message_id, tuple(one.event_ids), one.sentence) for one in violations}


def by_the_core(events: list[AuditEvent]) -> list[Violation]:
    history = History()
    for event in events:
        history.add(event)
    return [one for one in history.verdict(horizon_us=HORIZON_US).violations if one.rule in RULES]


def faults_in(folder: Path) -> list[dict[str, Any]]:
    """What the generator lists of what can be found here."""
    planted = map(json.loads, (folder / FAULTS).read_text().splitlines())
    return [fault for fault in planted if fault["rule"] in RULES]


def is_all_that_was_planted(found: CheckResult, planted: list[dict[str, Any]]) -> bool:
    return sorted((one.rule, one.message_id) for one in found.samples) == sorted(
        (fault["rule"], fault["message_id"]) for fault in planted
    ) and {one.event_ids for one in found.samples if one.rule == "gap"} == {
        tuple(fault["event_ids"]) for fault in planted if fault["rule"] == "gap"
    }


MESSAGES, EVENTS_MIN = 23_000, 100_000


@pytest.mark.usefixtures("compiled")
def test_check_finds_exactly_the_planted_faults_in_100_000_events(
    spark: SparkSession, tmp_path: Path
) -> None:
    """`make crash` does it with five million, by the commands."""
    generate(tmp_path / "events", MESSAGES, 3, faults=True)
    lines = events_in(spark, tmp_path / "events").persist()
    found = checked(tmp_path, lines, silver=lines.dropDuplicates(["event_id"]))
    lines.unpersist()
    assert found.events > EVENTS_MIN
    assert set(found.counts) == set(RULES)
    assert found.violations == len(found.samples)
    assert is_all_that_was_planted(found, faults_in(tmp_path / "events"))


def test_a_clean_history_is_clean(tables_of: TablesOf) -> None:
    _, tables = tables_of()
    found = check_tables(tables)
    assert (found.counts, found.samples, found.violations) == ({}, [], 0)
    assert found.events > found.messages > 1400


def test_the_command_says_what_the_checker_of_the_core_says_and_fails(
    tables_of: TablesOf, commands: Commands
) -> None:
    folder, tables = tables_of(faults=True)
    done = commands("check", "--tables", tables.folder)
    assert done.code == 1, done.stderr
    samples = [
        ViolationSample(row["rule"], row["message_id"], tuple(row["event_ids"]), row["sentence"])
        for row in map(json.loads, done.stdout.splitlines())
    ]
    events = [event for block, _ in Segments(folder).after(StreamPosition(0, 0)) for event in block]
    assert told(samples) == told(by_the_core(events))
    assert {one.rule for one in samples} == set(RULES)
    assert f"{len(samples)} violations in" in done.stderr


def test_check_shows_the_first_violations_of_each_rule_and_counts_all(
    tables_of: TablesOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tables = tables_of(faults=True)
    whole = check_tables(tables)
    monkeypatch.setattr(checking, "SAMPLES_MAX", 2)
    monkeypatch.setattr(checking, "HELD_MAX", 4)
    found = check_tables(tables)
    shown = [[one for one in whole.samples if one.rule == rule][:2] for rule in sorted(RULES)]
    assert (found.counts, found.samples) == (whole.counts, [one for first in shown for one in first])


def test_deleted_events_are_checked_as_those_of_the_whole_history(
    spark: SparkSession, tables_of: TablesOf, tmp_path: Path
) -> None:
    """The violations of messages that lost no event stay the same."""
    tables = Tables(tmp_path / "tables")
    shutil.copytree(tables_of(faults=True)[1].folder, tables.folder)
    before = check_tables(tables).samples
    events = tables.read(spark, "silver_events").localCheckpoint()
    leaves = events.select("message_id").distinct().orderBy("message_id").limit(300).localCheckpoint()
    gone = events.join(leaves, "message_id", "left_semi").where("seq < 400").localCheckpoint()
    tables.replace(deleted_numbers.TABLE, merged(deleted_runs(gone)))
    tables.replace("silver_events", events.join(gone, ["source", "seq"], "left_anti"), partition_by=["day"])
    touched = {row["message_id"] for row in leaves.collect()}
    after = check_tables(tables).samples
    stay = [[one for one in samples if one.message_id not in touched] for samples in (before, after)]
    assert stay[0] == stay[1] != []


def test_the_hash_of_a_text_is_that_of_spark(spark: SparkSession) -> None:
    texts = ["\u00e9\u20ac" * (n % 3) + "abcdefghij"[: n % 10] + "x" * n for n in range(80)]
    rows = spark.createDataFrame([(text,) for text in texts], "text string")
    by_spark = {
        row["text"]: row["hash"] for row in rows.selectExpr("text", "xxhash64(text) AS hash").collect()
    }
    assert {text: spark_hash(text) for text in texts} == by_spark


def checked(
    folder: Path, rows: DataFrame, deleted: DataFrame | None = None, *, silver: DataFrame | None = None
) -> CheckResult:
    """What the checker finds in tables of these rows."""
    tables = Tables(folder / f"tables-{uuid.uuid4().hex}")
    tables.append("bronze_events", rows)
    tables.append("silver_events", rows if silver is None else silver)
    if deleted is not None:
        tables.append(deleted_numbers.TABLE, deleted)
    return check_tables(tables)


KINDS = (
    "created", "enqueued", "promoted", "dequeued", "dequeued", "execution_started", "heartbeat",
    "execution_failed", "lease_lapsed", "released", "deferred", "retry_scheduled", "execution_completed",
    "dead_letter", "cancelled", "expired", "quarantined", "delivered", "deleted", "replayed", "duplicate",
)  # fmt: skip


def made_up(source: str, rng: random.Random) -> list[AuditEvent]:
    """Any events of two messages in any order, with leases that may be the right ones, and holes."""
    events: list[AuditEvent] = []
    open_leases = {"a": 0, "b": 0}
    seq = rng.choice((0, 0, 0, 7))
    fresh = {name for name in "ab" if rng.random() < 0.9}
    known, over, forgotten = set(fresh), set[str](), set[str]()
    for _ in range(rng.randint(1, 14)):
        seq += rng.choice((1,) * 9 + (3,))
        name = rng.choice("ab")
        message_id = f"{source}-{name}"
        kind = "created" if name in fresh else rng.choice(KINDS)
        fresh.discard(name)
        if kind == "created" and name not in known & over and events:  # an id is used again after an end only
            kind = "enqueued" if any(event.message_id == message_id for event in events) else kind
        if kind == "deleted" and name in forgotten:  # once
            kind = "heartbeat"
        if kind in message_checker.ENDS:
            over.add(name)
            forgotten |= {name} if kind == "deleted" else set()
        elif kind in ("created", "dequeued", "replayed"):
            over.discard(name)
            forgotten.discard(name)
        if kind == "dequeued":
            open_leases[name] = seq
        lease = rng.choice((open_leases[name],) * 4 + (0, 1)) if kind not in ("created", "enqueued") else 0
        if kind == "dequeued":
            lease = seq
        waits = kind in ("created", "retry_scheduled", "deferred")
        detail = {"delay_s": rng.choice((2, 200_000))} if waits else {}
        events.append(
            AuditEvent(
                event_id=event_id(source, seq),
                seq=seq,
                ts_us=seq * rng.choice((1, 10**10)),
                kind=kind,  # type: ignore[arg-type]
                contract=rng.choice(("engine", "engine", "tasks")) if not events else events[0].contract,
                source=source,
                schema=1,
                queue="q",
                message_id=message_id,
                state="SCHEDULED" if detail else "QUEUED",
                lease=lease,
                detail=detail,
            )
        )
    return events


def test_random_histories_give_the_same_result_as_the_core_checker(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Hundreds of sources, each a small history of its own, in one job."""
    rng = random.Random(20)
    histories = [made_up(f"s{n:03}", rng) for n in range(600)]
    events = [event for history in histories for event in history]
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(to_line, events)))
    rows = spark.read.schema(EVENTS).json(str(tmp_path / "events.jsonl"))
    found, said = told(checked(tmp_path, rows).samples), told(by_the_core(events))
    assert found == said
    assert {one[0] for one in said} == set(RULES)


def test_two_events_of_one_number_are_found_among_honest_repeats(spark: SparkSession, tmp_path: Path) -> None:
    event = made_up("s", random.Random(1))[0]
    other = msgspec.structs.replace(event, queue="elsewhere")
    lines = [to_line(event), to_line(event), to_line(other)]
    for number, (told_lines, n) in enumerate([(lines[:2], 0), (lines, 1)]):
        file = tmp_path / f"{number}.jsonl"
        file.write_bytes(b"".join(told_lines))
        rows = spark.read.schema(EVENTS).json(str(file))
        assert checked(tmp_path, rows, silver=rows.limit(1)).counts.get("gap", 0) == n


# ---- what `retain` let leave -----------------------------------------------------------------------------


def rows_of_events(spark: SparkSession, events: list[AuditEvent], file: Path) -> DataFrame:
    file.write_bytes(b"".join(map(to_line, events)))
    return spark.read.schema(EVENTS).json(str(file))


def life(name: str, numbers: list[int], *kinds: str) -> list[AuditEvent]:
    """Events of one message of a store, under these numbers."""
    first = next((seq for seq, kind in zip(numbers, kinds, strict=True) if kind == "dequeued"), 1)
    return [
        AuditEvent(
            event_id=event_id("s", seq),
            seq=seq,
            ts_us=seq,
            kind=kind,  # type: ignore[arg-type]
            contract="engine",
            source="s",
            schema=1,
            queue="q",
            message_id=name,
            state="QUEUED",
            lease=0 if kind in ("created", "replayed") else first,
        )
        for seq, kind in zip(numbers, kinds, strict=True)
    ]


DONE = ("created", "dequeued", "execution_completed", "delivered")


def test_what_has_left_is_not_missing_and_what_never_came_is(spark: SparkSession, tmp_path: Path) -> None:
    """7 lies among numbers that left, 11 between those and others, and 16 behind the last of them."""
    gone = life("a", [1, 2, 5, 6], *DONE) + life("b", [8, 9, 10, 14], *DONE)
    there = life("c", [3, 4, 12, 13], *DONE) + life("d", [15, 17, 18, 19], *DONE)
    whole = rows_of_events(spark, gone + there, tmp_path / "whole")
    left = merged(deleted_runs(rows_of_events(spark, gone, tmp_path / "gone")))
    rows = rows_of_events(spark, there, tmp_path / "there")
    found = checked(tmp_path, rows, left)
    sentences = [f"of source s, {seq} is missing" for seq in (11, 16, 7)]
    assert [one.sentence for one in found.samples] == sentences
    assert (found.samples, found.counts) == (checked(tmp_path, whole).samples, {"gap": 3})
    # What was noted and stayed after all, as after a kill, changes nothing.
    assert checked(tmp_path, whole, left).samples == found.samples


def test_a_deleted_message_with_later_events_is_not_reported_as_unknown(
    spark: SparkSession, tmp_path: Path
) -> None:
    """It waited for longer than it was kept, or somebody sent it again, or its lease lapsed late."""
    gone = life("waits", [1], "created") + life("dead", [2, 3, 4], "created", "dequeued", "dead_letter")
    gone += life("held", [5, 6], "created", "dequeued") + life("done", [7, 8, 9, 10], *DONE)
    back = life("waits", [11, 12], "dequeued", "execution_completed")
    back += life("dead", [13, 14, 15], "replayed", "dequeued", "execution_completed")
    back += [msgspec.structs.replace(event, lease=6) for event in life("held", [16], "lease_lapsed")]
    real = life("nobody", [17, 18], "dequeued", "execution_completed")
    left = merged(deleted_runs(rows_of_events(spark, gone, tmp_path / "gone")))
    rows = rows_of_events(spark, back + real, tmp_path / "back")
    assert [(one.rule, one.message_id) for one in checked(tmp_path, rows, left).samples] == [
        ("unknown", "nobody")
    ]


def test_the_time_of_a_source_is_that_of_what_has_left_too(spark: SparkSession, tmp_path: Path) -> None:
    """A message that a hold keeps is no less lost when all that came later has left."""
    held = life("held", [1], "created")
    later = [msgspec.structs.replace(one, ts_us=2 * HORIZON_US) for one in life("a", [2, 3, 4, 5], *DONE)]
    left = merged(deleted_runs(rows_of_events(spark, later, tmp_path / "later")))
    rows = rows_of_events(spark, held, tmp_path / "held")
    assert checked(tmp_path, rows, left).counts == {"lost": 1}


def test_ranges_of_numbers_are_merged_within_their_block(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deleted_numbers, "BLOCK", 8)
    events = [event for n in range(1, 21, 4) if n != 13 for event in life(f"m{n}", [*range(n, n + 4)], *DONE)]
    rows = rows_of_events(spark, events, tmp_path / "events")
    runs = merged(deleted_runs(rows))
    again = merged(runs.unionByName(deleted_runs(rows)).unionByName(runs))
    for found in (runs, again):
        told_runs = sorted((row["first_seq"], row["last_seq"], row["newest_us"]) for row in found.collect())
        assert told_runs == [(1, 7, 7), (8, 12, 12), (17, 20, 20)]
