"""Summaries of logs have what `deltalake` says, and logs that they do not understand are left to it."""

import json
from pathlib import Path

import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction
from pyspark.sql.types import StructType

from postroom.pipeline.delta import delta_log
from postroom.pipeline.delta.delta_log import LAST_CHECKPOINT, LOG, Txn, log_file
from postroom.pipeline.delta.log_summaries import LogSummary, SummarizedTables, summary_of
from postroom.pipeline.delta.tables import StagedFiles, Tables

SCHEMA = StructType().add("ts_us", "long").add("day", "string")


def add(number: int, rows: int = 10) -> AddAction:
    stats = json.dumps({"numRecords": rows, "minValues": {}, "maxValues": {}, "nullCount": {}})
    path = f"day=a%2520b/part-{number}.parquet"
    return AddAction(path, 1, {"day": "a b"}, 0, data_change=True, stats=stats)


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables(tmp_path)


def put(tables: Tables, *numbers: int, replaced: int | None = None, **txns: int) -> None:
    """Commit files with these numbers, in place of another one."""
    old = [file for file in tables.files("t") if file.path.endswith(f"-{replaced}.parquet")]
    assert bool(old) == (replaced is not None)
    staged = StagedFiles(SCHEMA, ("day",), [add(number, 10 + number) for number in numbers])
    tables.commit("t", staged, old, txns=[Txn(*pair) for pair in txns.items()])


def by_deltalake(tables: Tables) -> tuple[int, int, list[int]]:
    fresh = Tables(tables.storage)
    return fresh.version("t"), fresh.row_count("t"), [fresh.last_txn("t", name) for name in ("a", "b", "c")]


def by_summary(tables: Tables) -> tuple[int, int, list[int]]:
    found = summary_of(tables.storage, "t")
    assert found is not None
    return found.version, found.rows, [found.txns.get(name, -1) for name in ("a", "b", "c")]


def test_a_summary_is_what_deltalake_says_after_every_commit(tables: Tables) -> None:
    assert summary_of(tables.storage, "t") is None
    for step in range(8):
        put(tables, 2 * step, 2 * step + 1, replaced=2 * step - 2 if step else None, a=step, b=7)
        if step in (2, 5):
            DeltaTable(tables.folder / "t").create_checkpoint()
        assert by_summary(tables) == by_deltalake(tables), step
    assert by_summary(tables) == (7, sum(10 + n for n in (*range(1, 16, 2), 14)), [7, 7, -1])


def test_summarized_tables_open_no_table(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tables, 1, a=3)
    monkeypatch.setattr(delta_log, "DeltaTable", None)
    found = SummarizedTables(tables.storage)
    assert (found.version("t"), found.row_count("t"), found.last_txn("t", "a")) == (0, 11, 3)
    assert found.last_txn("t", "b") == -1


@pytest.mark.parametrize(
    "action",
    [
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7}},
        {"add": {"path": "x", "partitionValues": {}, "size": 1, "dataChange": True}},
        {"add": {"path": "x", "partitionValues": {}, "size": 1, "dataChange": True, "stats": "{}"}},
    ],
)
def test_a_commit_that_is_not_understood_is_left_to_deltalake(
    tables: Tables, action: dict[str, object]
) -> None:
    put(tables, 1)
    assert summary_of(tables.storage, "t") == LogSummary(0, 11, {})
    (tables.folder / "t" / log_file(1)).write_text(json.dumps(action))
    assert summary_of(tables.storage, "t") is None


@pytest.mark.parametrize(
    "noted", ['{"version":0,"size":9,"parts":2}', '{"version":7,"size":9}', '{"size":9}', "{"]
)
def test_another_kind_of_checkpoint_is_left_to_deltalake(tables: Tables, noted: str) -> None:
    put(tables, 1)
    DeltaTable(tables.folder / "t").create_checkpoint()
    assert summary_of(tables.storage, "t") is not None
    (tables.folder / "t" / LOG / LAST_CHECKPOINT).write_text(noted)
    assert summary_of(tables.storage, "t") is None
