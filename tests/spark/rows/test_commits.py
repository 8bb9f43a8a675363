"""Commits to the log of a table. Data files are only named here: no commit opens them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction
from pyspark.sql.types import StructType

from postroom.errors import InvalidMessage, TableChanged
from postroom.pipeline.delta import delta_log
from postroom.pipeline.delta.delta_log import LOG, MAINTENANCE, Txn, delta_schema
from postroom.pipeline.delta.tables import StagedFiles, Tables

COLUMNS = StructType().add("ts_us", "long").add("day", "date")
WIDER = StructType().add("ts_us", "long").add("day", "date").add("mood", "string")
STATS = {"numRecords": 3, "minValues": {"ts_us": 1}, "maxValues": {"ts_us": 3}, "nullCount": {"ts_us": 0}}
DAYS = ("2025-01-01", None)


def staged(load: str, columns: StructType = COLUMNS) -> StagedFiles:
    """Two files, in a known and an unknown partition, whose names have to be escaped."""
    adds = [
        AddAction(
            f"day={day}/{load} 1%.parquet", 10, {"day": day}, 1_700_000_000_000, True, json.dumps(STATS)
        )
        for day in DAYS
    ]
    return StagedFiles(columns, ("day",), adds)


def operation_of(tables: Tables, version: int) -> Any:
    """The operation that a commit names in its metadata."""
    text = (tables.folder / "t" / LOG / f"{version:020d}.json").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return next(line["commitInfo"]["userMetadata"] for line in lines if "commitInfo" in line)


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables(tmp_path / "tables")


def test_a_commit_has_files_and_transactions_and_the_name_of_its_operation(tables: Tables) -> None:
    tables.commit("t", staged("a"), txns=[Txn("x", 1), Txn("y", 2)], base=-1)
    table_id, first = tables.table_id("t"), tables.files("t")
    tables.commit("t", staged("b"), first[:1], txns=[Txn("x", 2), Txn("y", 3)], base=0)
    tables.mark("t", [Txn("x", 3)], base=1)
    tables.commit("t", StagedFiles(COLUMNS, ("day",), []), first[1:], txns=[Txn(MAINTENANCE, 1)])
    tables.commit("t", staged("c", WIDER))
    last = tables.version("t")
    assert {file.path for file in tables.files("t")} == {
        f"day={day}/{load} 1%.parquet" for day in DAYS for load in "bc"
    }
    assert [tables.last_txn("t", app) for app in ("x", "y", MAINTENANCE)] == [3, 3, 1]
    names = [operation_of(tables, version) for version in (0, 1, 2, 3, last)]
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


def whole(load: str) -> StagedFiles:
    """A file of a table without partitions."""
    add = AddAction(f"{load}.parquet", 10, {}, 1_700_000_000_000, True, json.dumps(STATS))
    return StagedFiles(COLUMNS, (), [add])


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


def test_a_table_that_another_writer_has_just_created_is_not_new(tables: Tables) -> None:
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
