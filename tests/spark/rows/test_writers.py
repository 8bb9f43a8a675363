"""What every writer of the log promises, and that the connector gets the lines that delta-rs writes.

Data files are only named here: no writer opens them. The tests of `delta-spark` run where POSTROOM_DELTA_JAR
names the jar of Delta's connector for the installed version of Spark.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from postroom.errors import InvalidMessage, InvalidSetting, TableChanged
from postroom.pipeline.delta import delta_log, delta_spark
from postroom.pipeline.delta.delta_log import LOG, MAINTENANCE, Change, DeltaRs, Txn, delta_schema
from postroom.pipeline.delta.delta_spark import Line, actions_of, is_overtaken
from postroom.pipeline.delta.storage import Storage
from postroom.pipeline.delta.tables import WRITERS, Staged, Tables
from postroom.pipeline.generator.generate import generate
from postroom.pipeline.jobs import Pipeline
from tests.spark.commands import Commands
from tests.spark.conftest import DELTA_JAR

COLUMNS = StructType().add("ts_us", "long").add("day", "date")
WIDER = StructType().add("ts_us", "long").add("day", "date").add("mood", "string")
STATS = {"numRecords": 3, "minValues": {"ts_us": 1}, "maxValues": {"ts_us": 3}, "nullCount": {"ts_us": 0}}
DAYS = ("2025-01-01", None)


def staged(load: str, columns: StructType = COLUMNS) -> Staged:
    """Two files, in a known and an unknown partition, whose names have to be escaped."""
    adds = [
        AddAction(
            f"day={day}/{load} 1%.parquet", 10, {"day": day}, 1_700_000_000_000, True, json.dumps(STATS)
        )
        for day in DAYS
    ]
    return Staged(columns, ("day",), adds)


def lines_of(tables: Tables, version: int) -> list[Line]:
    """The actions of a commit without the fields that are NULL."""
    text = (tables.folder / "t" / LOG / f"{version:020d}.json").read_text()
    return [without_nulls(json.loads(line)) for line in text.splitlines()]


def without_nulls(line: Line) -> Line:
    return {
        kind: {name: value for name, value in facts.items() if value is not None}
        for kind, facts in line.items()
    }


def info_of(tables: Tables, version: int) -> Any:
    return next(line["commitInfo"] for line in lines_of(tables, version) if "commitInfo" in line)


@pytest.fixture(params=WRITERS if DELTA_JAR else WRITERS[:1])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    made = Tables(tmp_path / "tables", writer=request.param)
    if request.param == "delta-spark":
        made.open_in(request.getfixturevalue("spark"))
    return made


# ---- what every writer promises ------------------------------------------------------------------------


def test_a_commit_has_files_and_transactions_and_the_name_of_its_operation(tables: Tables) -> None:
    tables.commit("t", staged("a"), txns=[Txn("x", 1), Txn("y", 2)], base=-1)
    table_id, first = tables.table_id("t"), tables.files("t")
    tables.commit("t", staged("b"), first[:1], txns=[Txn("x", 2), Txn("y", 3)], base=0)
    tables.mark("t", [Txn("x", 3)], base=1)
    tables.commit("t", Staged(COLUMNS, ("day",), []), first[1:], txns=[Txn(MAINTENANCE, 1)])
    tables.commit("t", staged("c", WIDER))
    last = tables.version("t")
    assert {file.path for file in tables.files("t")} == {
        f"day={day}/{load} 1%.parquet" for day in DAYS for load in "bc"
    }
    assert [tables.last_txn("t", app) for app in ("x", "y", MAINTENANCE)] == [3, 3, 1]
    names = [info_of(tables, version)["userMetadata"] for version in (0, 1, 2, 3, last)]
    assert names == ["WRITE", "MERGE", "PROGRESS", "DELETE", "WRITE"]
    assert tables.schema("t").names == WIDER.names
    assert tables.row_count("t") == 12
    assert tables.table_id("t") == table_id


def test_an_overwrite_removes_files_and_columns_and_keeps_the_id(tables: Tables) -> None:
    tables.commit("t", staged("a", WIDER))
    table_id = tables.table_id("t")
    tables.commit("t", staged("b"), txns=[Txn("x", 1)], base=0, mode="overwrite")
    assert {file.path for file in tables.files("t")} == {f"day={day}/b 1%.parquet" for day in DAYS}
    assert (tables.schema("t").names, tables.table_id("t")) == (COLUMNS.names, table_id)
    commit = tables.read_commit("t", 1)
    assert commit is not None
    assert commit.removed == {f"day={day}/a 1%.parquet" for day in DAYS}


def whole(load: str) -> Staged:
    """A file of a table without partitions."""
    add = AddAction(f"{load}.parquet", 10, {}, 1_700_000_000_000, True, json.dumps(STATS))
    return Staged(COLUMNS, (), [add])


def test_an_overwrite_changes_the_partitions_and_keeps_the_id(tables: Tables) -> None:
    tables.commit("t", staged("a", WIDER), txns=[Txn("x", 1)])
    table_id = tables.table_id("t")
    with pytest.raises(InvalidMessage, match="is partitioned by day, not by nothing as now"):
        tables.commit("t", whole("b"))
    tables.commit("t", whole("b"), txns=[Txn("x", 2)], base=0, mode="overwrite")
    assert (tables.table_id("t"), tables.partitions("t")) == (table_id, [])
    assert tables.schema("t").names == COLUMNS.names
    assert ([file.path for file in tables.files("t")], tables.last_txn("t", "x")) == (["b.parquet"], 2)
    tables.commit("t", staged("c", WIDER), base=tables.version("t"), mode="overwrite")
    assert (tables.table_id("t"), tables.partitions("t")) == (table_id, ["day"])
    added, removed = tables.changed("t", 0)
    assert {file.path for file in added} == {f"day={day}/c 1%.parquet" for day in DAYS}
    assert {file.path for file in removed} == {f"day={day}/a 1%.parquet" for day in DAYS}


def test_partitions_are_not_changed_after_another_writer_has_changed_rows(tables: Tables) -> None:
    tables.commit("t", staged("a"))
    Tables(tables.storage).commit("t", staged("b"))
    with pytest.raises(TableChanged):
        tables.commit("t", whole("c"), base=0, mode="overwrite")
    assert (tables.partitions("t"), len(tables.files("t"))) == (["day"], 4)


def test_what_another_writer_commits_while_partitions_change_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """delta-rs changes partitions by a commit of its own, and another writer may be faster than the next."""
    tables, emptied = Tables(tmp_path), delta_log._emptied
    tables.commit("t", staged("a"))

    def overtaken(*what: Any) -> DeltaTable:
        delta = emptied(*what)
        Tables(tables.storage).commit("t", whole("b"))
        return delta

    monkeypatch.setattr(delta_log, "_emptied", overtaken)
    with pytest.raises(TableChanged):
        tables.commit("t", whole("c"), base=0, mode="overwrite")
    assert [file.path for file in tables.files("t")] == ["b.parquet"]


def test_rows_are_refused_after_another_writer_has_changed_rows(tables: Tables) -> None:
    other = Tables(tables.storage)
    tables.commit("t", staged("a"))
    other.commit("t", staged("b"))
    with pytest.raises(TableChanged):
        tables.commit("t", staged("c"), base=0)
    tables.commit("t", staged("d"))  # without a base
    assert (tables.version("t"), len(tables.files("t"))) == (2, 6)


def test_a_table_that_another_writer_has_just_created_is_no_new_one(tables: Tables) -> None:
    assert tables.version("t") == -1
    tables.pin()
    assert not tables.exists("t")
    Tables(tables.storage).commit("t", staged("a"))
    with pytest.raises(TableChanged):
        tables.commit("t", staged("b"), base=-1)


def test_a_new_column_of_another_writer_lets_a_commit_through(tables: Tables) -> None:
    tables.commit("t", staged("a"))
    DeltaTable(tables.folder / "t").alter.add_columns(delta_schema(WIDER).fields[2:])
    tables.commit("t", staged("b"), tables.files("t")[:1], base=0)
    assert tables.version("t") == 2
    assert tables.schema("t").names == WIDER.names


def test_a_deleted_table_is_created_again(tables: Tables) -> None:
    for _ in range(3):
        tables.commit("t", staged("a"))
    shutil.rmtree(tables.folder / "t")
    tables.forget("t")
    tables.commit("t", staged("b"), base=-1)
    assert {file.path for file in tables.files("t")} == {f"day={day}/b 1%.parquet" for day in DAYS}


# ---- the connector -------------------------------------------------------------------------------------


@pytest.mark.skipif(DELTA_JAR is None, reason="no test of delta-spark runs without POSTROOM_DELTA_JAR")
def test_the_connector_does_not_try_again_by_itself(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer commits after the connector has read the last version and before it writes its own."""
    tables, other = Tables(tmp_path / "tables", writer="delta-spark"), Tables(tmp_path / "tables")
    tables.open_in(spark)
    tables.commit("t", staged("a"))
    operation, overtakes = delta_spark._operation, ["b", "c"]

    def late(spark: SparkSession, change: Change) -> Any:
        if overtakes and change.operation == "WRITE":
            other.commit("t", staged(overtakes.pop()))
        return operation(spark, change)

    monkeypatch.setattr(delta_spark, "_operation", late)
    with pytest.raises(TableChanged):
        tables.commit("t", staged("d"), base=0)
    assert tables.version("t") == 1
    tables.commit("t", staged("e"))  # without a base
    assert info_of(tables, 3)["readVersion"] == 2
    assert (tables.version("t"), len(tables.files("t")), overtakes) == (3, 8, [])
    assert spark.conf.get("spark.databricks.delta.maxCommitAttempts", "1") != "0"  # in the caller's session


class Compared(DeltaRs):
    """delta-rs, which writes what the connector would be given."""

    def __init__(self) -> None:
        self.lines: list[list[Line]] = []

    def create(self, storage: Storage, name: str, change: Change) -> None:
        self.lines.append(actions_of(change))
        super().create(storage, name, change)

    def write(self, storage: Storage, name: str, delta: DeltaTable, change: Change) -> bool:
        self.lines.append(actions_of(change, delta))
        return super().write(storage, name, delta, change)


def test_the_connector_gets_the_lines_that_delta_rs_writes(tmp_path: Path) -> None:
    tables, compared = Tables(tmp_path / "tables"), Compared()
    tables._writer = compared
    tables.commit("t", staged("a"), txns=[Txn("x", 1), Txn("y", 2)])
    tables.commit("t", staged("b"), tables.files("t")[:1], txns=[Txn("x", 2)])
    tables.mark("t", [Txn("x", 3)])
    tables.commit("t", Staged(COLUMNS, ("day",), []), tables.files("t")[:1])
    tables.commit("t", staged("c", WIDER))
    tables.commit("t", staged("d"), mode="overwrite")
    tables.commit("t", whole("e"), mode="overwrite")
    assert len(compared.lines) == 8  # delta-rs adds a column, and tries again
    *_, repartitioned = compared.lines  # which delta-rs does in two commits
    ends = [[line for line in repartitioned if ("add" in line) is is_last] for is_last in (False, True)]
    wanted = [*compared.lines[:4], compared.lines[4][:1], *compared.lines[5:7], *ends]
    for version, lines in enumerate(wanted):
        logged = [line for line in lines_of(tables, version) if "commitInfo" not in line]
        assert sorted(map(comparable, lines)) == sorted(map(comparable, logged)), version
    assert [next(iter(line)) for line in compared.lines[0]] == [
        *("protocol", "metaData", "add", "add", "txn", "txn")
    ]


def comparable(line: Line) -> str:
    """Without the times and the id that each writer makes up by itself."""
    facts = {kind: dict(facts) for kind, facts in without_nulls(line).items()}
    for made_up in ("id", "createdTime", "deletionTimestamp"):
        for each in facts.values():
            if made_up in each:
                each[made_up] = type(each[made_up]).__name__
    if "schemaString" in facts.get("metaData", {}):
        facts["metaData"]["schemaString"] = json.loads(facts["metaData"]["schemaString"])
    return json.dumps(facts, sort_keys=True)


@pytest.mark.parametrize(
    ("messages", "is_conflict"),
    [
        (["[DELTA_MAX_COMMIT_RETRIES_EXCEEDED] This commit has failed as it has been tried 1 times"], True),
        (["[DELTA_CONCURRENT_APPEND] ConcurrentAppendException: Files were added"], True),
        (["a wrapper", "[DELTA_CONCURRENT_WRITE] A concurrent transaction has written new data"], True),
        (["[DELTA_METADATA_CHANGED] The metadata of the Delta table has been changed"], True),
        (["[DELTA_MULTIPLE_SOURCE_ROW] no DELTA_CONCURRENT_APPEND"], False),
        (["java.io.IOException: No space left on device"], False),
        ([], False),
    ],
)
def test_a_commit_is_tried_again_only_after_a_commit_of_another_writer(
    messages: list[str], is_conflict: bool
) -> None:
    assert is_overtaken(messages) is is_conflict


# ---- refusals ------------------------------------------------------------------------------------------


def test_a_writer_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="'delta' is no writer of tables: it is delta-rs or delta-spark"):
        Tables(tmp_path, writer="delta")


def test_the_connector_needs_a_session(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="needs a session: give the tables to a Pipeline"):
        Tables(tmp_path, writer="delta-spark").commit("t", staged("a"))


@pytest.mark.skipif(DELTA_JAR is not None, reason="the session has Delta's connector")
def test_a_session_without_the_connector_is_refused_before_any_work(
    spark: SparkSession, commands: Commands, tmp_path: Path
) -> None:
    tables = Tables(tmp_path / "tables", writer="delta-spark")
    with pytest.raises(InvalidSetting, match=f"add its jar for Spark {spark.version}, or use"):
        Pipeline(spark, tables)
    generate(tmp_path / "events", 10, 1)
    words = ("--tables", tmp_path / "tables", "--writer", "delta-spark")
    done = commands("run", "--events", tmp_path / "events", *words)
    assert done.code != 0
    assert done.stderr.splitlines()[-1].endswith(
        f"add its jar for Spark {spark.version}, or use the writer delta-rs"
    )
    assert not list(tmp_path.glob("tables/*/_delta_log"))


@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
def test_a_spark_connect_client_is_refused(connect: str, commands: Commands, tmp_path: Path) -> None:
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    client: Any = ConnectSession(connect)
    try:
        with pytest.raises(
            InvalidSetting, match="commits in the JVM of the driver, and a Spark Connect client"
        ):
            Pipeline(client, Tables(tmp_path / "tables", writer="delta-spark"))
    finally:
        client.client.close()
    words = ("--tables", tmp_path / "tables", "--writer", "delta-spark", "--remote", connect)
    for command in (("run", "--events", tmp_path), ("retain", "--keep-days", 1), ("backfill",)):
        done = commands(*command, *words)
        assert (done.code, "--writer delta-spark has no --remote" in done.stderr) == (2, True)
