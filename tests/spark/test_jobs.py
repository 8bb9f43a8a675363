import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.errors import InvalidMessage, Unavailable
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.tables import Tables
from postroom.pipeline.transforms.goldtable import GoldTable
from tests.spark.conftest import TablesOf
from tests.spark.test_bronze import line, write_segment
from tests.spark.test_silver import contents

DAY_US = 86_400_000_000
POSTROOM = str(Path(sys.executable).with_name("postroom"))


def per_day(messages: DataFrame) -> DataFrame:
    return messages.groupBy("day").agg(F.count("*").alias("messages"))


def total(messages: DataFrame) -> DataFrame:
    return messages.agg(F.count("*").alias("messages"))


GOLD = {
    "gold_per_day": GoldTable(per_day, ("silver_messages",), ("day",), "days"),
    "gold_total": GoldTable(total, ("gold_per_day",)),
}


def created(n: int, ts_us: int) -> bytes:
    return line(event_id=f"s#{n}", seq=n, ts_us=ts_us, contract="engine", message_id=f"m{n}")


def test_a_gold_table_by_day_builds_only_what_changed(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables(tmp_path / "tables")
    job = Pipeline(spark, tables, gold=GOLD)
    write_segment(tmp_path / "events", 1, [created(1, 1), created(2, 2), created(3, 5 * DAY_US)])
    job.run(tmp_path / "events")
    before = tables.files("gold_per_day")
    write_segment(tmp_path / "events", 2, [created(4, 5 * DAY_US + 1), created(5, 6 * DAY_US)])
    job.run(tmp_path / "events")
    days = tables.read(spark, "gold_per_day").collect()
    assert sorted((str(row["day"]), row["messages"]) for row in days) == [
        ("1970-01-01", 2),
        ("1970-01-06", 2),
        ("1970-01-07", 1),
    ]
    kept = {file.path for file in before} & {file.path for file in tables.files("gold_per_day")}
    assert [path.split("/")[0] for path in kept] == ["day=1970-01-01"]
    versions = {name: tables.version(name) for name in tables.names()}
    job.run(tmp_path / "events")
    assert {name: tables.version(name) for name in tables.names()} == versions


def test_a_second_writer_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    write_segment(tmp_path / "events", 1, [created(1, 1)])
    tables = Tables(tmp_path / "tables")
    with tables.lock(), pytest.raises(Unavailable, match="another job is writing the tables"):
        Pipeline(spark, tables, gold={}).run(tmp_path / "events")
    assert tables.names() == []


def test_a_folder_that_is_none_is_named(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(InvalidMessage, match="is not a folder of segments"):
        Pipeline(spark, Tables(tmp_path / "tables"), gold={}).run(tmp_path / "nowhere")


def test_a_stream_takes_turns_with_runs(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables(tmp_path / "tables")
    job = Pipeline(spark, tables, gold={})
    write_segment(tmp_path / "events", 1, [created(1, 1)])
    job.stream(tmp_path / "events")
    write_segment(tmp_path / "events", 2, [created(2, 2)])
    assert job.run(tmp_path / "events").segments == 1
    write_segment(tmp_path / "events", 3, [created(3, 3)])
    job.stream(tmp_path / "events")
    assert [row["seq"] for row in tables.read(spark, "bronze_events").orderBy("seq").collect()] == [1, 2, 3]
    assert tables.read(spark, "silver_messages").count() == 3


def kill_during(table: str, events: Path, tables: Path, after_s: float) -> None:
    """Start a run and kill it, and with it its JVM's reason to live, a moment after it began with a table."""
    command = [
        POSTROOM,
        "pipeline",
        "run",
        "--events",
        str(events),
        "--tables",
        str(tables),
        "--master",
        "local[1]",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    for text in process.stderr:
        if f"  {table}" in text:
            time.sleep(after_s)
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_a_killed_run_is_finished_by_the_next_one(
    spark: SparkSession, tables_of: TablesOf, tmp_path: Path
) -> None:
    events, undisturbed = tables_of(1500, 11)
    rng = random.Random()
    after_s = rng.random() * 3
    table = rng.choice(["bronze", "silver_events", "silver_messages", "silver_spans"])
    kill_during(table, events, tmp_path, after_s)
    tables = Tables(tmp_path)
    for name in tables.names():  # whatever is there is whole
        assert tables.read(spark, name).count() == sum(file.rows for file in tables.files(name))
    Pipeline(spark, tables, gold={}).run(events)
    assert contents(spark, tables) == contents(spark, undisturbed), (table, after_s)
