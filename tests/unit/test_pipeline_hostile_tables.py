"""Folders of tables that somebody else has made: names and logs that try to reach beyond them."""

import json
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from deltalake import write_deltalake
from pyspark.sql.types import StructType

from postroom.errors import InvalidMessage
from postroom.pipeline.delta.delta_log import Txn
from postroom.pipeline.delta.log_summaries import SummarizedTables
from postroom.pipeline.delta.storage import Storage
from postroom.pipeline.delta.tables import StagedFiles, Tables
from postroom.pipeline.query.database import Database

ROWS = pa.table({"n": pa.array([1, 2], pa.int64())})
STATEMENT = 'x" AS SELECT 1 AS a; CREATE TABLE made AS SELECT 42; --'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tables"
    write_deltalake(folder / "numbers", ROWS)
    return folder


def test_a_folder_whose_name_is_a_statement_is_not_a_table(folder: Path) -> None:
    assert Tables(folder).names() == ["numbers"]
    (folder / "numbers").rename(folder / STATEMENT)
    assert Tables(folder).names() == []
    assert not Tables(folder).exists(STATEMENT)


@pytest.mark.parametrize("name", ["../outside", "..", "/outside"])
def test_a_table_outside_of_the_folder_is_not_a_table(folder: Path, tmp_path: Path, name: str) -> None:
    write_deltalake(tmp_path / "outside", ROWS)
    assert not Tables(folder).exists(name)


@pytest.mark.parametrize("path", ["{outside}", "../../outside.parquet", "%2e%2e/%2e%2e/outside.parquet"])
def test_a_log_cannot_name_a_file_outside_of_its_table(folder: Path, tmp_path: Path, path: str) -> None:
    outside = tmp_path / "outside.parquet"
    pq.write_table(ROWS, outside)
    log = folder / "numbers" / "_delta_log" / f"{0:020}.json"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if "add" in line:
            line["add"]["path"] = path.format(outside=outside)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InvalidMessage, match="names a file outside of its folder"):
        Database(Tables(folder), ["numbers"])


def change_protocol(folder: Path, protocol: dict[str, object], **settings: str) -> None:
    """Write a commit of another engine that changes the protocol and the settings of a table."""
    log = folder / "numbers" / "_delta_log"
    lines = [json.loads(line) for line in (log / f"{0:020}.json").read_text().splitlines()]
    [table] = [line for line in lines if "metaData" in line]
    if "delta.columnMapping.mode" in settings:
        schema = json.loads(table["metaData"]["schemaString"])
        schema["fields"][0]["metadata"] = {
            "delta.columnMapping.id": 1,
            "delta.columnMapping.physicalName": "n",
        }
        table["metaData"]["schemaString"] = json.dumps(schema)
    table["metaData"]["configuration"] |= settings
    actions = [{"protocol": protocol}, table]
    (log / f"{1:020}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))


FEATURES: list[tuple[str, dict[str, object], dict[str, str]]] = [
    (
        "deletionVectors",
        {"minReaderVersion": 3, "minWriterVersion": 7}
        | {f"{who}Features": ["deletionVectors"] for who in ("reader", "writer")},
        {"delta.enableDeletionVectors": "true"},
    ),
    (
        "columnMapping",
        {"minReaderVersion": 2, "minWriterVersion": 5},
        {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "1"},
    ),
]


@pytest.mark.parametrize(("feature", "protocol", "settings"), FEATURES)
def test_a_table_with_a_reader_feature_is_not_read(
    folder: Path, feature: str, protocol: dict[str, object], settings: dict[str, str]
) -> None:
    known = Tables(folder)
    before = known.files("numbers")
    change_protocol(folder, protocol, **settings)
    for tables in (known, Tables(folder), SummarizedTables(Storage(folder))):
        with pytest.raises(InvalidMessage, match=f"table numbers cannot be read: it uses {feature}"):
            tables.row_count("numbers")
    with pytest.raises(InvalidMessage, match=feature):
        Database(known, ["numbers"])
    with pytest.raises(InvalidMessage, match=feature):
        known.commit("numbers", StagedFiles(StructType(), (), []), before, base=0)


OBLIGATIONS: list[tuple[str, dict[str, object], dict[str, str]]] = [
    ("rowTracking", {"minWriterVersion": 7, "writerFeatures": ["rowTracking", "domainMetadata"]}, {}),
    ("changeDataFeed", {"minWriterVersion": 4}, {"delta.enableChangeDataFeed": "true"}),
    ("checkConstraints", {"minWriterVersion": 3}, {"delta.constraints.few": "n < 3"}),
]


@pytest.mark.parametrize(("feature", "protocol", "settings"), OBLIGATIONS)
def test_a_table_with_a_writer_feature_is_read_and_not_written(
    folder: Path, feature: str, protocol: dict[str, object], settings: dict[str, str]
) -> None:
    change_protocol(folder, {"minReaderVersion": 1, **protocol}, **settings)
    tables = Tables(folder)
    assert len(list(Database(tables, ["numbers"]).each("SELECT * FROM numbers"))) == 2
    refused = f"table numbers cannot be written: it uses .*{feature}"
    with pytest.raises(InvalidMessage, match=refused):
        tables.mark("numbers", [Txn("me", 1)])
    with pytest.raises(InvalidMessage, match=refused):
        tables.compact("numbers")
    assert tables.version("numbers") == 1
