import random
import shutil
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline import paths
from postroom.pipeline.delta import file_index
from postroom.pipeline.delta.file_groups import HOURS_FROM
from postroom.pipeline.delta.joins import with_join_hint
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.generator.generate import generate
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.ingest.redaction import redacted
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.silver import events as of_events
from postroom.pipeline.silver import span_tree, spans
from postroom.pipeline.silver import tables as silver
from postroom.pipeline.silver.tables import SILVER
from tests.spark.comparison import differing
from tests.spark.conftest import TablesOf
from tests.spark.oracle import expected, oracle, stored
from tests.spark.plainrows import all_rows
from tests.spark.realhistory import RealHistory
from tests.spark.segmentfiles import sealed_segments
from tests.spark.stories import BAD_LINES, NOW_US, Chapter, Story, write_segment
from tests.spark.stories import GOLD as STORY_GOLD

TABLES = ("events", "messages", "attempts", "spans")
MESSAGES = 700  # of several days


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_what_the_oracle_says(tables_of: TablesOf, name: str, faults: bool) -> None:
    folder, tables = tables_of(faults=faults)
    columns, rows = expected(oracle(folder), name)
    assert rows
    own = [column for column in tables.schema(f"silver_{name}").names if column != "end_code"]
    assert own == columns
    assert stored(tables, f"silver_{name}", columns) == rows


def test_tables_equal_the_oracle_for_late_repeated_and_hostile_lines(
    spark: SparkSession, real_history: RealHistory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All lines of two histories, a third of them twice, thrown together, and taken in two runs.

    One history is generated, the other one is real. The first run gets most of the first days and a few later
    lines, so the second finds days that changed, days that did not, and messages that it knows half of. Every
    table is compared, gold included. The first run takes itself for a small one, and the second for one too
    large to read files in the driver and to send ids to everybody.
    """
    generate(tmp_path / "generated", MESSAGES, seed=4)
    rng = random.Random(4)
    segments = sealed_segments(tmp_path / "generated")
    lines = [text for segment in segments for text in segment.path.read_bytes().splitlines()]
    lines += real_history.lines()
    write_segment(tmp_path / "clean", 1, lines)
    lines += rng.sample(lines, len(lines) // 3)
    rng.shuffle(lines)
    days = [day_of(text) for text in lines]
    middle = sorted(days)[len(days) // 2]
    early = [rng.random() < (0.98 if day < middle else 0.1) for day in days]
    tables = Tables(tmp_path / "tables")
    for number, wanted in enumerate((True, False), 1):
        if not wanted:
            monkeypatch.setattr(paths, "SMALL_BYTES", 0)
            monkeypatch.setattr(file_index, "BROADCAST_IDS_MAX", 0)
            monkeypatch.setattr(span_tree, "BROADCAST_NODES_MAX", 0)
        chosen = [text for text, is_early in zip(lines, early, strict=True) if is_early == wanted]
        write_segment(tmp_path / "events", number, [*BAD_LINES, *chosen])
        Pipeline(spark, tables).run(tmp_path / "events")
    assert tables.row_count("bronze_rejects") == 2 * sum(bad != b"" for bad in BAD_LINES)
    assert tables.row_count("bronze_events") == len(lines)
    assert {*SILVER, *GOLD} < set(tables.names())
    assert differing(tables, tmp_path / "clean") == []


def day_of(text: bytes) -> int:
    return int(msgspec.json.decode(text)["ts_us"]) // 86_400_000_000


# ---- stories -------------------------------------------------------------------------------------------


def held_in(chapter: Chapter, tables: Tables, message_id: str) -> str:
    """The file of a message."""
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    [path] = [
        file.path
        for file in chapter.files["silver_messages"]
        if message_id
        in pq.read_table(tables.folder / "silver_messages" / file.path, columns=["message_id"])[0].to_pylist()
    ]
    return path


def test_a_message_that_changes_leaves_files_of_other_messages_alone(story: Story) -> None:
    first, second, *_ = story.chapters
    quiet = {held_in(chapter, story.tables, "quiet") for chapter in (first, second)}
    [path] = quiet  # the files of finished messages are not rewritten
    assert path.endswith(f"-{HOURS_FROM}.parquet")  # by the day, as there are few events an hour
    assert held_in(first, story.tables, "busy") not in quiet
    assert held_in(second, story.tables, "busy") not in {file.path for file in first.files["silver_messages"]}
    outcomes = {row["message_id"]: row["outcome"] for row in second.rows["silver_messages"]}
    assert (outcomes["quiet"], outcomes["late"], outcomes["busy"]) == ("cancelled", "open", "cancelled")


def test_children_that_come_before_their_parent_find_their_place(story: Story) -> None:
    def places(chapter: Chapter) -> dict[str, tuple[Any, ...]]:
        names = {"leaf", "other", "twig", "trunk", "bud", "a", "b"}
        rows = [row for row in chapter.rows["silver_spans"] if row["message_id"] in names]
        return {row["message_id"]: tuple(row[name] for name in spans.PLACE) for row in rows}

    assert places(story.chapters[0]) == {"leaf": ("twig", 1, "?;t1"), "other": ("other", 0, "t2")}
    assert places(story.chapters[1])["leaf"] == ("trunk", 2, "?;t3;t1")
    assert places(story.chapters[2]) == {
        "leaf": ("trunk", 2, "t4;t3;t1"),
        "twig": ("trunk", 1, "t4;t3"),
        "trunk": ("trunk", 0, "t4"),
        "bud": ("trunk", 3, "t4;t3;t1;t5"),
        "other": ("other", 0, "t2"),
        "a": (None, None, None),
        "b": (None, None, None),
    }


def test_a_replay_opens_a_message_again(story: Story) -> None:
    rows = [chapter.row("silver_messages", message_id="again") for chapter in story.chapters[:3]]
    found = [(row["outcome"], row["finished_us"], row["total_us"], row["queue_us"]) for row in rows]
    assert found == [
        ("dead_letter", NOW_US + 4, 3, 1),
        ("open", None, None, 1),
        ("completed", NOW_US + 6, 5, 1),
    ]


def test_what_the_stream_still_says_is_taken_out(story: Story) -> None:
    rows = [story.chapters[0].row("silver_events", event_id=f"talk#{n}") for n in (1, 2)]
    assert [(row["payload"], row["error"]) for row in rows] == [
        ('{"to":"<email>"}', "password=<redacted>"),
        ("enc:ada@example.com", None),
    ]


def test_a_gold_table_by_day_builds_only_what_changed(story: Story) -> None:
    first, second, *_ = story.chapters
    said = {row["day"]: row["messages"] for row in second.rows["gold_per_day"]}
    days = [row["day"] for row in second.rows["silver_messages"]]
    assert said == {day: days.count(day) for day in days}
    assert set(said) == {date(1970, 1, 1), date(1970, 1, 6), date(1970, 1, 7)}
    assert second.rows["gold_total"] == [{"messages": len(days)}]
    kept = {file.path for file in first.files["gold_per_day"]} & {
        file.path for file in second.files["gold_per_day"]
    }
    assert [path.split("/")[0] for path in kept] == ["day=1970-01-01"]


# ---- plans -------------------------------------------------------------------------------------------


def plan_of(df: DataFrame) -> str:
    return str(df._jdf.queryExecution().executedPlan().toString())


def test_tasks_compute_projections_of_local_rows(spark: SparkSession) -> None:
    """The optimizer, which does not use generated code here, would take far longer for many columns."""
    df = spark.sql("SELECT a + 1 FROM VALUES (1), (2) AS rows(a)")
    assert "Project" in str(df._jdf.queryExecution().optimizedPlan().toString())


@pytest.mark.parametrize("fold", [silver.messages, silver.folded_attempts])
def test_a_fold_has_one_shuffle_and_no_python(spark: SparkSession, tables_of: TablesOf, fold: object) -> None:
    _, tables = tables_of()
    events = tables.read(spark, "silver_events")
    before = tables.read(spark, "silver_messages" if fold is silver.messages else "silver_attempts")
    for df in (fold(events), fold(events, before)):  # type: ignore[operator]
        plan = plan_of(df)
        assert plan.count("Exchange ") == 1
        assert "hashpartitioning(message_id" in plan  # one organization that is large is not one large task
        assert "Python" not in plan
        assert "Window" not in plan


def test_wide_rows_are_not_shuffled_to_find_repeats(spark: SparkSession, tables_of: TablesOf) -> None:
    _, tables = tables_of()
    rows = tables.read(spark, "bronze_events").withColumn("row", F.xxhash64("event_id", "segment"))
    none = rows.limit(0)
    suspects = of_events.suspects(rows, none)
    repeated = of_events.repeats(of_events.ranked(rows, suspects, {}), of_events.ranked(none, suspects, {}))
    plan = plan_of(of_events.once(rows, repeated)).splitlines()
    shuffled = [below for text, below in pairwise(plan) if "Exchange hashpartitioning" in text]
    # Of every row the hash of its id; of those whose hash is not the only one, the id and its place.
    assert [text.partition("output=")[2].count(",") for text in shuffled] == [2, 1]
    assert "BroadcastHashJoin" in plan[0]


@pytest.mark.parametrize(("few", "join"), [(True, "BroadcastHashJoin"), (False, "SortMergeJoin")])
def test_the_join_strategy_depends_on_row_counts_and_not_on_file_sizes(
    spark: SparkSession, tables_of: TablesOf, few: bool, join: str
) -> None:
    """These are small, and Spark by itself would send them in either case."""
    _, tables = tables_of()
    rows = tables.read(spark, "silver_messages")
    ids = rows.select("message_id")
    assert join in plan_of(rows.join(with_join_hint(ids, few=few), "message_id", "left_semi"))


def test_rows_that_say_nothing_to_redact_are_not_copied_for_python(
    spark: SparkSession, tables_of: TablesOf
) -> None:
    _, tables = tables_of()
    rows = tables.read(spark, "bronze_events")
    silent, told = plan_of(of_events.events(rows, redacted("medium"))).split("ArrowEvalPython")
    assert "isnull(payload" in silent
    assert "isnotnull(payload" in told
    assert "Python" not in plan_of(of_events.events(rows, redacted("none")))


def test_a_backfill_makes_the_same_tables(spark: SparkSession, story: Story, tmp_path: Path) -> None:
    shutil.copytree(story.tables.folder, tmp_path / "tables")
    copy = Tables(tmp_path / "tables")
    Pipeline(spark, copy, gold=STORY_GOLD).backfill()
    assert all_rows(copy) == all_rows(story.tables)
    assert copy.version("silver_messages") == story.tables.version("silver_messages") + 1
