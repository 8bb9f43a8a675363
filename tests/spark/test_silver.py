import random
import shutil
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.generate import generate
from postroom.pipeline.jobs import Pipeline, sealed_segments
from postroom.pipeline.tables import Tables
from postroom.pipeline.transforms import silver, spans
from tests.spark.conftest import TablesOf
from tests.spark.oracle import expected, oracle, rows_of
from tests.spark.test_bronze import line, write_segment

TABLES = ("events", "messages", "attempts", "spans")


def contents(spark: SparkSession, tables: Tables) -> dict[str, list[tuple[object, ...]]]:
    return {name: rows_of(tables.read(spark, f"silver_{name}")) for name in TABLES}


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_what_the_oracle_says(
    spark: SparkSession, tables_of: TablesOf, name: str, faults: bool
) -> None:
    folder, tables = tables_of(1500, 11, faults)
    columns, rows = expected(oracle(folder), name)
    found = tables.read(spark, f"silver_{name}")
    assert [column for column in found.columns if column != "end_code"] == columns
    assert rows_of(found, columns) == rows


def test_late_repeated_and_shuffled_lines_end_in_the_same_tables(
    spark: SparkSession, tables_of: TablesOf, tmp_path: Path
) -> None:
    """All lines of a history, a third of them twice, thrown together and taken in two runs."""
    folder, tables = tables_of(1500, 11)
    rng = random.Random(4)
    lines = [text for segment in sealed_segments(folder) for text in segment.path.read_bytes().splitlines()]
    lines += rng.sample(lines, len(lines) // 3)
    rng.shuffle(lines)
    other = Tables(tmp_path / "tables")
    job = Pipeline(spark, other, gold={})
    for number in range(2):
        write_segment(tmp_path / "events", number + 1, lines[number::2])
        job.run(tmp_path / "events")
    assert contents(spark, other) == contents(spark, tables)


def test_a_message_that_changes_leaves_the_files_of_others_alone(spark: SparkSession, tmp_path: Path) -> None:
    hour_us = 3_600_000_000
    old = [
        line(event_id=f"s#{n}", seq=n, ts_us=n, contract="engine", message_id=f"m{n}", kind=kind)
        for n, kind in ((1, "created"), (2, "cancelled"), (3, "created"))
    ]
    old[1] = line(event_id="s#2", seq=2, ts_us=2, contract="engine", message_id="m1", kind="cancelled")
    now = line(event_id="s#4", seq=4, ts_us=3 * hour_us, contract="engine", message_id="m4", kind="created")
    write_segment(tmp_path / "events", 1, [*old, now])
    tables = Tables(tmp_path / "tables")
    job = Pipeline(spark, tables, gold={})
    job.run(tmp_path / "events")
    before = {file.path for file in tables.files("silver_messages")}
    assert len(before) == 2  # what is settled has files of its own
    end = line(
        event_id="s#5", seq=5, ts_us=3 * hour_us + 1, contract="engine", message_id="m4", kind="cancelled"
    )
    write_segment(tmp_path / "events", 2, [end])
    job.run(tmp_path / "events")
    assert len(before & {file.path for file in tables.files("silver_messages")}) == 1
    outcomes = tables.read(spark, "silver_messages").select("message_id", "outcome").collect()
    assert dict(map(tuple, outcomes)) == {"m1": "cancelled", "m3": "open", "m4": "cancelled"}


def test_children_that_come_before_their_parent_find_their_place(spark: SparkSession, tmp_path: Path) -> None:
    def created(n: int, message_id: str, parent: str | None) -> bytes:
        named = {} if parent is None else {"parent_message_id": parent}
        return line(event_id=f"s#{n}", seq=n, message_id=message_id, type=f"t{n}", **named)

    tables = Tables(tmp_path / "tables")
    job = Pipeline(spark, tables, gold={})

    def after(number: int, *lines: bytes) -> dict[str, tuple[str, int, str]]:
        write_segment(tmp_path / "events", number, list(lines))
        job.run(tmp_path / "events")
        places = tables.read(spark, "silver_spans").select("message_id", *spans.PLACE).collect()
        return {row[0]: tuple(row[1:]) for row in places}

    assert after(1, created(1, "leaf", "twig"), created(2, "other", None)) == {
        "leaf": ("twig", 1, "?;t1"),
        "other": ("other", 0, "t2"),
    }
    assert after(2, created(3, "twig", "trunk"))["leaf"] == ("trunk", 2, "?;t3;t1")
    in_a_circle = created(6, "a", "b"), created(7, "b", "a")
    assert after(3, created(4, "trunk", None), created(5, "bud", "leaf"), *in_a_circle) == {
        "leaf": ("trunk", 2, "t4;t3;t1"),
        "twig": ("trunk", 1, "t4;t3"),
        "trunk": ("trunk", 0, "t4"),
        "bud": ("trunk", 3, "t4;t3;t1;t5"),
        "other": ("other", 0, "t2"),
        "a": (None, None, None),
        "b": (None, None, None),
    }


def test_a_replay_opens_a_message_again(spark: SparkSession, tmp_path: Path) -> None:
    kinds = ["created", "enqueued", "dequeued", "dead_letter", "replayed"]
    lines = [
        line(event_id=f"s#{n}", seq=n, ts_us=n, contract="tasks", message_id="m", kind=kind)
        for n, kind in enumerate(kinds, 1)
    ]
    done = line(event_id="s#9", seq=9, ts_us=9, contract="tasks", message_id="m", kind="execution_completed")
    tables = Tables(tmp_path / "tables")
    found = []
    for number, batch in enumerate((lines[:4], lines[4:], [done]), 1):
        write_segment(tmp_path / "events", number, batch)
        Pipeline(spark, tables, gold={}).run(tmp_path / "events")
        row = tables.read(spark, "silver_messages").first()
        assert row is not None
        found.append((row["outcome"], row["finished_us"], row["total_us"], row["queue_us"]))
    assert found == [("dead_letter", 4, 3, 1), ("open", None, None, 1), ("completed", 9, 8, 1)]


def test_what_the_stream_still_says_is_taken_out(spark: SparkSession, tmp_path: Path) -> None:
    said = [
        line(event_id="s#1", payload='{"to":"ada@example.com"}', error="password=hunter2!"),
        line(event_id="s#2", seq=2, payload="enc:ada@example.com"),
    ]
    write_segment(tmp_path / "events", 1, said)
    tables = Tables(tmp_path / "tables")
    Pipeline(spark, tables, gold={}).run(tmp_path / "events")
    rows = tables.read(spark, "silver_events").orderBy("seq").select("payload", "error").collect()
    assert [tuple(row) for row in rows] == [
        ('{"to":"<email>"}', "password=<redacted>"),
        ("enc:ada@example.com", None),
    ]


# ---- plans -------------------------------------------------------------------------------------------


def plan_of(df: DataFrame) -> str:
    return str(df._jdf.queryExecution().executedPlan().toString())


@pytest.mark.parametrize("fold", [silver.messages, silver.attempts])
def test_a_fold_has_one_shuffle_and_no_python(spark: SparkSession, tables_of: TablesOf, fold: object) -> None:
    _, tables = tables_of(1500, 11)
    events = tables.read(spark, "silver_events")
    before = tables.read(spark, "silver_messages" if fold is silver.messages else "silver_attempts")
    for df in (fold(events), fold(events, before)):  # type: ignore[operator]
        plan = plan_of(df)
        assert plan.count("Exchange ") == 1
        assert "Python" not in plan
        assert "Window" not in plan


def test_wide_rows_are_not_shuffled_to_find_repeats(spark: SparkSession, tables_of: TablesOf) -> None:
    _, tables = tables_of(1500, 11)
    rows = tables.read(spark, "bronze_events").withColumn("row", F.xxhash64("event_id", "segment"))
    plan = plan_of(silver.once(rows, silver.repeats(rows, rows.limit(0))))
    shuffles = [text for text in plan.splitlines() if "Exchange hashpartitioning" in text]
    assert len(shuffles) == 1
    assert "BroadcastHashJoin" in plan


def test_a_backfill_makes_the_same_tables(spark: SparkSession, tables_of: TablesOf, tmp_path: Path) -> None:
    _, tables = tables_of(1500, 11)
    shutil.copytree(tables.folder, tmp_path / "tables")
    copy = Tables(tmp_path / "tables")
    Pipeline(spark, copy, gold={}).backfill()
    assert contents(spark, copy) == contents(spark, tables)
    assert copy.version("silver_messages") == tables.version("silver_messages") + 1


def test_generated_histories_differ(tmp_path: Path) -> None:
    """The oracle would be pleased with nothing at all."""
    assert generate(tmp_path / "events", 50, 1).events > 100
