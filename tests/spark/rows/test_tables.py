import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datafusion
import deltalake
import duckdb
import polars as pl
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.errors import InvalidMessage, TableChanged, Unavailable
from postroom.pipeline.delta.delta_log import LOG, MAINTENANCE, Txn, path_below
from postroom.pipeline.delta.storage import Storage
from postroom.pipeline.delta.tables import Split, StagedFiles, Tables
from tests.spark.conftest import TablesOf
from tests.spark.plainrows import counted, rows_of
from tests.spark.stories import Story


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables(tmp_path / "tables")


def numbers(spark: SparkSession, start: int, end: int) -> DataFrame:
    """Rows of three days, one of them unknown."""
    day = F.when(
        F.col("id") % 3 > 0, F.date_add(F.lit("2025-01-01").cast("date"), (F.col("id") % 3).cast("int"))
    )
    name = F.format_string("m%03d", "id").alias("message_id")
    return spark.range(start, end).select(name, F.col("id").alias("ts_us"), day.alias("day"))


def by_parity() -> Split:
    return Split((F.col("ts_us") % 2).cast("int"), range(2))


def ids(df: DataFrame) -> list[int]:
    return sorted(row["ts_us"] for row in df.select("ts_us").collect())


def test_rows_come_back_with_their_partition(spark: SparkSession, tables: Tables) -> None:
    rows = numbers(spark, 0, 9)
    tables.append("t", rows, partition_by=("day",))
    found = tables.read(spark, "t")
    assert found.schema == rows.schema or found.columns == rows.columns
    assert sorted(map(repr, found.collect())) == sorted(map(repr, rows.collect()))
    assert {file.partition["day"] for file in tables.files("t")} == {None, "2025-01-02", "2025-01-03"}
    assert sum(file.rows for file in tables.files("t")) == 9


def test_other_programs_read_the_table_as_it_is(spark: SparkSession, tables: Tables) -> None:
    tables.append("t", numbers(spark, 0, 9), partition_by=("day",))
    tables.swap("t", numbers(spark, 20, 30), tables.files("t")[:1], partition_by=("day",))
    want = ids(tables.read(spark, "t"))
    folder = str(tables.folder / "t")
    assert sorted(pl.read_delta(folder)["ts_us"]) == want
    assert sorted(deltalake.DeltaTable(folder).to_pyarrow_table()["ts_us"].to_pylist()) == want


def test_small_tables_in_process_equal_those_of_spark(spark: SparkSession, tables: Tables) -> None:
    rows = numbers(spark, 0, 9)
    with tables.small():
        tables.swap("t", rows, (), partition_by=("day",), split=by_parity())
        tables.append("t", numbers(spark, 9, 12).withColumn("mood", F.lit("calm")), partition_by=("day",))
        small = sorted(map(repr, tables.read(spark, "t").collect()))
        assert tables.read(spark, "t")._jdf.inputFiles().__len__() == 0  # Spark opens no file
        numbered = tables.read_with_row(spark, "t", tables.files("t"))
        assert len({row["row"] for row in numbered.collect()}) == 12
        urls = {row["file"] for row in tables.read_with_file(spark, "t", tables.files("t")).collect()}
    assert urls == {str(tables.folder / "t" / file.path) for file in tables.files("t")}
    assert small == sorted(map(repr, tables.read(spark, "t").collect()))
    by_spark = tables.read_with_file(spark, "t", tables.files("t")).select("file").distinct().collect()
    assert {path_below("t", row["file"]) for row in by_spark} == {file.path for file in tables.files("t")}
    assert {file.partition["day"] for file in tables.files("t")} == {None, "2025-01-02", "2025-01-03"}
    split = [file for file in tables.files("t") if file.path.endswith(("-0.parquet", "-1.parquet"))]
    assert (len(split), sum(file.rows for file in split)) == (6, 9)
    assert min(file.low["ts_us"] for file in split) == 0
    assert max(file.high["message_id"] for file in split) == "m008"


def by_duckdb(tables: Tables, name: str) -> pa.Table:
    """Through Arrow: DuckDB's own reader of Delta is an extension that it downloads, which no test does."""
    with duckdb.connect() as connection:
        connection.register("t", deltalake.DeltaTable(tables.folder / name).to_pyarrow_dataset())
        return connection.sql("SELECT * FROM t").to_arrow_table()


def by_polars(tables: Tables, name: str) -> pa.Table:
    return pl.read_delta(str(tables.folder / name)).to_arrow()


def by_datafusion(tables: Tables, name: str) -> pa.Table:
    context = datafusion.SessionContext()
    context.register_table("t", deltalake.DeltaTable(tables.folder / name))
    return context.sql("SELECT * FROM t").to_arrow_table()


@pytest.mark.parametrize("read", [by_duckdb, by_polars, by_datafusion])
def test_duckdb_polars_and_datafusion_read_every_row_of_every_table(
    tables_of: TablesOf, story: Story, read: Callable[[Tables, str], pa.Table]
) -> None:
    """With what is in none of the small ones: decimals, lists of structs, lines that were not UTF-8."""
    for tables in (tables_of(faults=True)[1], story.tables):
        for name in tables.names():
            found = read(tables, name)
            assert set(found.column_names) == set(tables.schema(name).names), name
            assert counted(found.to_pylist()) == rows_of(tables, name), name
    cost = read(tables_of(faults=True)[1], "gold_cost")["cost_usd"]
    assert (pa.types.is_decimal(cost.type), cost.null_count) == (True, 0)


def test_files_with_fewer_rows_than_were_written_are_not_committed(
    spark: SparkSession, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Storage.files
    monkeypatch.setattr(Storage, "files", lambda *where: found(*where)[1:])  # as if a file were not listed
    with pytest.raises(Unavailable, match="rows, and 9 were written: nothing was committed"):
        tables.append("t", numbers(spark, 0, 9), partition_by=("day",))
    assert not tables.exists("t")


def test_a_swap_is_one_commit_with_its_transactions(spark: SparkSession, tables: Tables) -> None:
    assert (tables.version("t"), tables.last_txn("t", "job"), tables.files("t")) == (-1, -1, [])
    tables.append("t", numbers(spark, 0, 3), txns=[Txn("job", 1)])
    tables.swap("t", numbers(spark, 3, 6), tables.files("t"), txns=[Txn("job", 7), Txn("other", 2)])
    assert (tables.version("t"), tables.last_txn("t", "job"), tables.last_txn("t", "other")) == (1, 7, 2)
    assert ids(tables.read(spark, "t")) == [3, 4, 5]
    added, removed = tables.changed("t", 0)
    assert len(added) == len(tables.files("t"))
    assert [file.path for file in removed] == [file.path for file in tables.files("t", 0)]
    tables.mark("t", [Txn("job", 8)])
    assert (tables.version("t"), tables.last_txn("t", "job")) == (2, 8)
    assert tables.changed("t", 1) == ([], [])


def test_the_log_names_what_a_commit_did(spark: SparkSession, tables: Tables) -> None:
    for start in (0, 3):
        tables.append("t", numbers(spark, start, start + 3).coalesce(1), partition_by=("day",))
    tables.swap("t", numbers(spark, 6, 9), tables.files("t")[:1], partition_by=("day",))
    tables.mark("t", [Txn("job", 1)])
    assert tables.compact("t") > 0
    nothing = StagedFiles(tables.schema("t"), ("day",), [])
    tables.commit("t", nothing, tables.files("t")[:1], txns=[Txn(MAINTENANCE, 1)])
    log = reversed(deltalake.DeltaTable(tables.folder / "t").history())
    named = [(commit["operation"], commit.get("userMetadata")) for commit in log]
    ours = [("WRITE", name) for name in ("WRITE", "WRITE", "MERGE", "PROGRESS")]
    assert named == [("CREATE TABLE", "WRITE"), *ours[1:], ("OPTIMIZE", None), ("WRITE", "DELETE")]


def test_replace_leaves_nothing_of_before(spark: SparkSession, tables: Tables) -> None:
    tables.append("t", numbers(spark, 0, 9), partition_by=("day",))
    tables.replace("t", tables.read(spark, "t").where("ts_us > 6"), partition_by=("day",))
    assert ids(tables.read(spark, "t")) == [7, 8]
    tables.replace("t", numbers(spark, 0, 0), partition_by=("day",))
    assert ids(tables.read(spark, "t")) == []


def test_rows_are_split_into_files_and_the_column_is_gone(spark: SparkSession, tables: Tables) -> None:
    rows = numbers(spark, 0, 9).where("day IS NOT NULL").coalesce(1)
    tables.swap("t", rows, (), partition_by=("day",), split=by_parity())
    assert tables.read(spark, "t").columns == ["message_id", "ts_us", "day"]
    parities = [(file.low["ts_us"] % 2, file.high["ts_us"] % 2) for file in tables.files("t")]
    assert set(parities) == {(0, 0), (1, 1)}
    assert ids(tables.read(spark, "t")) == [1, 2, 4, 5, 7, 8]


def test_the_log_tells_what_a_file_can_hold(spark: SparkSession, tables: Tables) -> None:
    tables.append("t", numbers(spark, 10, 20).coalesce(1))
    (file,) = tables.files("t")
    assert (file.low["message_id"], file.high["message_id"]) == ("m010", "m019")
    assert (file.low["ts_us"], file.high["ts_us"], file.rows) == (10, 19, 10)


def test_a_new_column_reads_null_in_old_rows(spark: SparkSession, tables: Tables) -> None:
    tables.append("t", numbers(spark, 0, 2))
    tables.append("t", numbers(spark, 2, 3).withColumn("mood", F.lit("calm")))
    found = tables.read(spark, "t").select("ts_us", "mood").collect()
    assert sorted(map(tuple, found)) == [(0, None), (1, None), (2, "calm")]


def test_a_table_with_other_partitions_is_refused(spark: SparkSession, tables: Tables) -> None:
    rows = spark.range(2).withColumn("day", F.lit("2026-01-01"))
    tables.append("t", rows)
    sentence = "table t of an earlier version is partitioned by nothing, not by day as now: delete its folder"
    with pytest.raises(InvalidMessage, match=sentence):
        tables.replace("t", rows, partition_by=("day",))
    assert tables.version("t") == 0


def test_uncommitted_files_are_invisible_and_vacuum_deletes_them(spark: SparkSession, tables: Tables) -> None:
    tables.append("t", numbers(spark, 0, 3))
    tables.stage("t", numbers(spark, 3, 6))
    assert ids(tables.read(spark, "t")) == [0, 1, 2]
    files = set((tables.folder / "t").rglob("*.parquet"))
    gone = tables.vacuum("t", keep_hours=0)
    assert len(gone) == len(files) - len(tables.files("t")) > 0
    assert ids(tables.read(spark, "t")) == [0, 1, 2]


def test_vacuum_leaves_a_reader_of_the_last_days_its_files(spark: SparkSession, tables: Tables) -> None:
    tables.append("t", numbers(spark, 0, 3))
    reader = tables.read(spark, "t")
    tables.replace("t", numbers(spark, 3, 6))
    assert tables.vacuum("t") == []
    assert ids(reader) == [0, 1, 2]


def test_compaction_changes_files_and_no_rows(spark: SparkSession, tables: Tables) -> None:
    for start in (0, 10, 20):
        tables.append("t", numbers(spark, start, start + 10), partition_by=("day",))
    before = ids(tables.read(spark, "t"))
    assert tables.compact("t") > 0
    assert len(tables.files("t")) == 3
    assert ids(tables.read(spark, "t")) == before
    tables.append("t", numbers(spark, 30, 31), partition_by=("day",))
    assert ids(tables.read(spark, "t")) == [*before, 30]


def compact_elsewhere(tables: Tables, name: str) -> None:
    """As another program does, which knows nothing of the writer lock."""
    metrics = deltalake.DeltaTable(tables.folder / name).optimize.compact()
    assert metrics["numFilesRemoved"] > 1


def test_commit_is_refused_when_replaced_files_were_compacted(spark: SparkSession, tables: Tables) -> None:
    for start in (0, 10, 20):
        tables.append("t", numbers(spark, start, start + 10).coalesce(1))
    base, first = tables.version("t"), tables.files("t")[:1]
    staged = tables.stage("t", tables.read(spark, "t", first))
    compact_elsewhere(tables, "t")
    with pytest.raises(TableChanged, match="another writer changed table t after it was read"):
        tables.commit("t", staged, first, base=base)
    assert ids(tables.read(spark, "t")) == list(range(30))
    again = tables.files("t")
    tables.swap("t", numbers(spark, 0, 5), again, base=tables.version("t"))
    assert ids(tables.read(spark, "t")) == list(range(5))


def test_a_compaction_is_not_a_change_of_rows(spark: SparkSession, tables: Tables) -> None:
    for start in (0, 10, 20):
        tables.append("t", numbers(spark, start, start + 10).coalesce(1))
    seen = tables.version("t")
    compact_elsewhere(tables, "t")
    assert tables.changed("t", seen) == ([], [])
    assert tables.changed("t", seen - 1)[0] == tables.files("t")  # a row of it was not seen so far
    tables.append("t", numbers(spark, 30, 31))
    added, removed = tables.changed("t", seen)
    assert (ids(tables.read(spark, "t", added)), removed) == ([30], [])
    [joined] = tables.files("t", seen + 1)
    tables.swap("t", numbers(spark, 40, 41), [joined])
    added, removed = tables.changed("t", seen)
    assert ids(tables.read(spark, "t", added)) == [30, 40]
    assert [file.path for file in removed] == [joined.path]


def test_without_the_log_of_a_compaction_its_rows_go_and_come_again(
    spark: SparkSession, tables: Tables
) -> None:
    for start in (0, 10):
        tables.append("t", numbers(spark, start, start + 10).coalesce(1))
    seen, before = tables.version("t"), tables.files("t")
    compact_elsewhere(tables, "t")
    deltalake.DeltaTable(tables.folder / "t").create_checkpoint()
    tables.append("t", numbers(spark, 20, 21).coalesce(1))
    (tables.folder / "t" / LOG / f"{seen + 1:020d}.json").unlink()
    added, removed = tables.changed("t", seen)
    assert {file.path for file in added} == {file.path for file in tables.files("t")}
    assert {file.path for file in removed} == {file.path for file in before}


def test_a_load_survives_the_end_and_the_failure_of_another_one(
    spark: SparkSession, tables: Tables, tmp_path: Path
) -> None:
    """Hadoop's committer deletes all temporary files in the folder of its job."""
    began, over = tmp_path / "began", tmp_path / "over"

    def held(times: pa.Array) -> pa.Array:
        began.touch()
        while not over.exists():
            time.sleep(0.01)
        return times

    wait: Callable[..., Column] = F.arrow_udf(held, "long")  # type: ignore[attr-defined]
    slow = numbers(spark, 0, 3).coalesce(1).withColumn("ts_us", wait("ts_us"))
    with ThreadPoolExecutor() as pool:
        load = pool.submit(tables.append, "t", slow)
        try:
            while not began.exists():
                assert not load.done()
                time.sleep(0.01)
            tables.append("t", numbers(spark, 3, 5))
            with pytest.raises(Exception, match="DIVIDE_BY_ZERO"):
                tables.append("t", numbers(spark, 5, 6).withColumn("ts_us", F.expr("ts_us div (ts_us - 5)")))
        finally:
            over.touch()
        load.result()
    assert rows_of(tables, "t").total() == 5
    assert {path.name for path in (tables.folder / "t").iterdir() if path.is_dir()} == {LOG}


def test_a_missing_table_is_named(spark: SparkSession, tables: Tables) -> None:
    assert tables.names() == []
    with pytest.raises(InvalidMessage, match="there is no table t in"):
        tables.read(spark, "t")


def test_a_local_session_writes_no_files_of_checksums(spark: SparkSession, tmp_path: Path) -> None:
    """A table would leave them behind, and each costs the start of a program."""
    spark.range(1).write.parquet(str(tmp_path / "rows"))
    assert {path.suffix for path in (tmp_path / "rows").iterdir()} == {".parquet"}
