"""What a gold table does when its input changes. That all of them do it right, shuffled lines show."""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.delta.delta_log import DataFile, path_below
from postroom.pipeline.delta.tables import Split, Tables
from postroom.pipeline.follow.columns import day_of
from postroom.pipeline.follow.merge import Sums
from postroom.pipeline.follow.recompute import Hours
from postroom.pipeline.follow.refresh import Refresh, Replacement, Table
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.times import HOUR_US, MINUTE_US
from tests.spark.plainrows import records


def each(rows: DataFrame) -> DataFrame:
    counted = rows.select("day", "hour_us", F.lit(1).cast("bigint").alias("n"), F.col("value").alias("total"))
    return counted.withColumns({"total": F.col("total").cast("bigint"), "mean": F.lit(None).cast("double")})


WAY: dict[str, Sums | Hours] = {
    "sums": Sums(("day", "hour_us"), ("n", "total"), shares=(("mean", "total", "n"),)),
    "each": Sums(("day", "hour_us"), ("n", "total"), shares=(("mean", "total", "n"),), each=each),
    "scattered": Sums(
        ("day", "hour_us"), ("n", "total"), shares=(("mean", "total", "n"),), each=each, scattered=True
    ),
    "hours": Hours(lambda: F.col("hour_us"), ("message_id", "value")),
    "extremes": Sums(("day", "hour_us"), ("n", "total"), largest=("mean",)),
}


def build(rows: DataFrame) -> DataFrame:
    summed = rows.groupBy("day", "hour_us").agg(F.count("*").alias("n"), F.sum("value").alias("total"))
    return summed.withColumn("mean", F.col("total") / F.col("n"))


class Input:
    """Rows of three hours on two days, three files each, what was made of them, and one exchanged since."""

    def __init__(self, spark: SparkSession, folder: Path, make: Callable[[DataFrame], DataFrame]) -> None:
        self.spark = spark
        self.tables = Tables(folder)
        rng = random.Random(1)
        rows = [
            [(f"m{day}{lot}{n}", n % 3 * HOUR_US, rng.randrange(9), day) for n in range(6)]
            for day in (1, 2)
            for lot in range(3)
        ]
        for lot in rows:
            self._put(lot)
        made = make(self.tables.read(spark, "silver_messages"))
        self.tables.append("gold_sum", made, partition_by=("day",))
        self.version = self.tables.version("silver_messages")
        self.old = self._exchange()
        [self.new], _ = self.tables.changed("silver_messages", self.version)

    def copied_to(self, folder: Path) -> Tables:
        shutil.copytree(self.tables.folder, folder, dirs_exist_ok=True)
        return Tables(folder)

    def _put(self, rows: list[tuple[str, int, int, int]], *removed: DataFile) -> None:
        columns = "message_id string, hour_us long, value int, day int"
        frame = self.spark.createDataFrame(rows, columns).coalesce(1)
        self.tables.swap("silver_messages", frame, removed, partition_by=("day",))

    def _exchange(self) -> DataFile:
        """A file of the second day for one in which hour 0 is gone, 1 as it was, and 2 another."""
        old = next(file for file in self.tables.files("silver_messages") if file.partition["day"] == "2")
        rows = self.tables.read(self.spark, "silver_messages", [old]).collect()
        kept = [
            (row.message_id, row.hour_us, row.value + (row.hour_us == 2 * HOUR_US), row.day)
            for row in rows
            if row.hour_us
        ]
        self._put(kept, old)
        return old


@pytest.fixture(scope="module")
def given(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Input:
    """What most tests begin with. Each has a copy."""
    return Input(spark, tmp_path_factory.mktemp("given"), build)


def followed(refresh: Refresh, version: int) -> Replacement:
    [source] = refresh.table.inputs
    now = {source: refresh.tables.version(source)}
    assert refresh.update(now, now) is None
    replacement = refresh.update({source: version}, now)
    assert replacement is not None
    return replacement


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("way", WAY)
def test_an_update_gives_the_same_rows_as_a_rebuild(
    spark: SparkSession, given: Input, tmp_path: Path, way: str, is_there: bool
) -> None:
    tables = given.copied_to(tmp_path)
    read: list[str] = []

    def watched(make: Callable[[DataFrame], DataFrame]) -> Callable[[DataFrame], DataFrame]:
        def made(rows: DataFrame) -> DataFrame:
            read.extend(path_below("silver_messages", url) for url in rows.inputFiles())
            return make(rows)

        return made

    chosen = WAY[way]
    if isinstance(chosen, Sums) and chosen.each is not None:
        chosen = replace(chosen, each=watched(chosen.each))
    table = Table(watched(build), ("silver_messages",), ("day",), chosen)
    refresh = Refresh(spark, tables, "gold_sum", table)
    if not is_there:  # it was removed after a week
        (tables.folder / "silver_messages" / given.old.path).unlink()
    with refresh.held:
        changed, replaced = followed(refresh, given.version)
        assert {file.partition["day"] for file in replaced} == {"2"}
        tables.swap("gold_sum", changed, replaced, partition_by=("day",))
    if way in ("sums", "each", "scattered") and is_there:
        assert set(read) == {given.old.path, given.new.path}  # and nothing of what stayed
    else:
        assert {path.partition("/")[0] for path in read} == {"day=2"}
    expected, _ = refresh.rebuild()
    assert Counter(tables.read(spark, "gold_sum").collect()) == Counter(expected.collect())


class Flows:
    """`gold_flow` with a file for each hour, and the `gold_depth` that follows it."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.tables = Tables(folder)
        self.hours: dict[int, list[tuple[int, str, int, int]]] = {}
        self.table = GOLD["gold_depth"]
        self.refresh = Refresh(spark, self.tables, "gold_depth", self.table)

    def put(self, hour: int, *moves: tuple[int, str, int, int]) -> None:
        """Replace the file of an hour: minute, queue, arrived, left."""
        self.hours[hour] = list(moves)
        low_us = hour * HOUR_US
        rows = [(low_us + minute * MINUTE_US, "o", queue, *n) for minute, queue, *n in moves]
        frame = self.spark.createDataFrame(
            rows, "minute_us long, org_id string, queue string, arrived long, left long"
        ).withColumn("day", day_of(F.col("minute_us")))
        gone: list[DataFile] = []
        if self.tables.exists("gold_flow"):
            gone = self.tables.listing("gold_flow").overlapping("minute_us", low_us, low_us + HOUR_US - 1)
        self.tables.swap("gold_flow", frame.coalesce(1), gone, partition_by=("day",))

    def follow(self, version: int) -> set[int] | None:
        """The hours whose files were replaced; None when no depth has changed."""
        now = {"gold_flow": self.tables.version("gold_flow")}
        with self.refresh.held:
            replacement = self.refresh.update({"gold_flow": version}, now)
            if replacement is None:
                return None
            rows, replaced = replacement
            hours = Split(F.floor(F.col("minute_us") / HOUR_US).cast("int"), range(99))
            self.tables.swap("gold_depth", rows, replaced, partition_by=("day",), split=hours)
        rebuilt, _ = self.refresh.rebuild()
        assert Counter(self.tables.read(self.spark, "gold_depth").collect()) == Counter(rebuilt.collect())
        return {hour for file in replaced for hour in {file.low["minute_us"] // HOUR_US}}


def test_a_running_total_is_rebuilt_until_it_is_as_before(spark: SparkSession, tmp_path: Path) -> None:
    """Three days, with a queue in which one message waits from the first day to the last."""
    flows = Flows(spark, tmp_path)
    with flows.tables.small():
        for hour, *moves in (
            (1, (0, "long", 1, 0), (5, "q", 2, 0)), (2, (0, "q", 0, 1)), (3, (9, "q", 0, 1)),
            (25, (7, "q", 3, 0)), (30, (7, "q", 0, 3)), (51, (3, "q", 1, 1)),
        ):  # fmt: skip
            flows.put(hour, *moves)
        rows, _ = flows.refresh.rebuild()
        hours = Split(F.floor(F.col("minute_us") / HOUR_US).cast("int"), range(99))
        flows.tables.swap("gold_depth", rows, [], partition_by=("day",), split=hours)

        def after(hour: int, *moves: tuple[int, str, int, int]) -> set[int] | None:
            version = flows.tables.version("gold_flow")
            flows.put(hour, *moves)
            return flows.follow(version)

        assert after(2, (0, "q", 0, 1)) is None
        assert after(2, (0, "q", 1, 2)) == {2}  # it is balanced within its hour
        assert after(25, (7, "q", 2, 0)) == {25, 30, 48, 51}  # until the end: one message fewer waits
        assert after(53, (0, "late", 4, 0)) == set()  # after all others: nothing is rewritten
        assert after(75, (0, "q", 1, 0)) == set()  # a new day begins with those that wait
        depths = {
            (row["minute_us"] // HOUR_US, row["queue"]): row["depth"]
            for row in records(flows.tables, "gold_depth")
        }
        assert {queue: depths[72, queue] for queue in ("long", "q", "late")} == {
            "long": 1,
            "q": -1,
            "late": 4,
        }


def test_files_of_other_hours_stay(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables(tmp_path)

    def put(hour: int, n: int) -> None:
        rows = [(hour * HOUR_US + at, "2025-01-01") for at in range(n)]
        frame = spark.createDataFrame(rows, "ts_us long, day string").coalesce(1)
        tables.append("silver_events", frame, partition_by=("day",))

    def count(rows: DataFrame) -> DataFrame:
        hour = (F.col("ts_us") - F.pmod("ts_us", F.lit(HOUR_US))).alias("hour_us")
        return rows.groupBy("day", hour).agg(F.count("*").alias("n"))

    way = Sums(("day", "hour_us"), ("n",), moment="hour_us")
    refresh = Refresh(spark, tables, "gold_sum", Table(count, ("silver_events",), ("day",), way))
    for hour in range(4):
        put(hour, hour + 1)
    rows, _ = refresh.rebuild()
    hours = Split((F.col("hour_us") / HOUR_US).cast("int"), range(4))
    tables.swap("gold_sum", rows, [], partition_by=("day",), split=hours)
    version = tables.version("silver_events")
    put(2, 5)
    with refresh.held:
        changed, replaced = followed(refresh, version)
        assert [file.low["hour_us"] // HOUR_US for file in replaced] == [2]
        tables.swap("gold_sum", changed, replaced, partition_by=("day",))
    found = {row["hour_us"] // HOUR_US: row["n"] for row in tables.read(spark, "gold_sum").collect()}
    assert found == {0: 1, 1: 2, 2: 8, 3: 4}


def test_rebuilding_hours_reads_only_files_of_those_hours(spark: SparkSession, tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    read: list[str] = []

    def put(hour: int, n: int) -> None:
        """Messages of an hour, the last of which ended in the next one."""
        rows = [
            (f"{hour}-{n}-{at}", hour * HOUR_US, (hour + at // n) * HOUR_US, "2025-01-01")
            for at in range(n + 1)
        ]
        frame = spark.createDataFrame(rows, "message_id string, first_us long, last_us long, day string")
        tables.append("silver_messages", frame.coalesce(1), partition_by=("day",))

    def longest(rows: DataFrame) -> DataFrame:
        read.extend(path_below("silver_messages", url) for url in rows.inputFiles())
        hour = F.col("first_us").alias("hour_us")
        return rows.groupBy("day", hour).agg(F.max(F.col("last_us") - F.col("first_us")).alias("longest_us"))

    way = Hours(lambda: F.col("first_us"), ("message_id",))
    refresh = Refresh(spark, tables, "gold_most", Table(longest, ("silver_messages",), ("day",), way))
    for hour in (0, 4, 8):
        put(hour, 2)
    rows, _ = refresh.rebuild()
    tables.append("gold_most", rows, partition_by=("day",))
    version = tables.version("silver_messages")
    put(4, 1)
    read.clear()
    with refresh.held:
        changed, replaced = followed(refresh, version)
        tables.swap("gold_most", changed, replaced, partition_by=("day",))
    of_4 = {file.path for file in tables.files("silver_messages") if file.low["first_us"] == 4 * HOUR_US}
    assert set(read) == of_4
    assert len(of_4) == 2
    found = sorted((row["hour_us"] // HOUR_US, row["longest_us"]) for row in records(tables, "gold_most"))
    assert found == [(0, HOUR_US), (4, HOUR_US), (8, HOUR_US)]


def test_whole_days_are_rebuilt_if_too_many_hours_change(
    spark: SparkSession, given: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = given.copied_to(tmp_path)
    refresh = Refresh(spark, tables, "gold_sum", Table(build, ("silver_messages",), ("day",), WAY["hours"]))
    monkeypatch.setattr("postroom.pipeline.follow.recompute.HOURS_MAX", 1)
    with refresh.held:
        changed, replaced = followed(refresh, given.version)
        assert len(changed.inputFiles()) == 3  # of the day, and nothing of what was made before
        tables.swap("gold_sum", changed, replaced, partition_by=("day",))
    expected, _ = refresh.rebuild()
    assert Counter(tables.read(spark, "gold_sum").collect()) == Counter(expected.collect())


def test_a_scattered_change_rewrites_only_the_files_that_it_affects(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Two files of every hour, and one of no hour: one row changes, and later another one of no hour."""
    tables = Tables(tmp_path)

    def put(name: str, hour: int | None, value: int, *removed: DataFile) -> None:
        moment = None if hour is None else hour * HOUR_US
        frame = spark.createDataFrame(
            [(name, moment, value, 1)], "goal_id string, hour_us long, value long, day int"
        )
        tables.swap("silver_spans", frame, removed, partition_by=("day",))

    def of_each(rows: DataFrame) -> DataFrame:
        return rows.select("day", "hour_us", "goal_id", "value")

    def total(rows: DataFrame) -> DataFrame:
        return way.summed(of_each(rows))

    way = Sums(("day", "hour_us", "goal_id"), ("value",), each=of_each, scattered=True)
    refresh = Refresh(spark, tables, "gold_sum", Table(total, ("silver_spans",), ("day",), way))
    for goal, hour in (("a", 0), ("b", 0), ("a", 1), ("b", 1), ("c", None)):
        version = tables.version("silver_spans")
        put(goal, hour, 1)
        added, _ = tables.changed("silver_spans", version)
        rows = total(tables.read(spark, "silver_spans", added))
        tables.append("gold_sum", rows, partition_by=("day",))
    for goal, hour, n_replaced in (("a", 1, 1), ("c", None, 1), ("d", 1, 0)):
        version = tables.version("silver_spans")
        put(goal, hour, 5)
        with refresh.held:
            changed, replaced = followed(refresh, version)
            assert len(replaced) == n_replaced
            tables.swap("gold_sum", changed, replaced, partition_by=("day",))
    expected, _ = refresh.rebuild()
    assert Counter(tables.read(spark, "gold_sum").collect()) == Counter(expected.collect())
