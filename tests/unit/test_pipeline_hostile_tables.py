"""Folders of tables that somebody else has made: names and logs that try to reach beyond them."""

import json
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from deltalake import write_deltalake

from postroom.errors import InvalidMessage
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.query.database import Database

ROWS = pa.table({"n": pa.array([1, 2], pa.int64())})
STATEMENT = 'x" AS SELECT 1 AS a; CREATE TABLE made AS SELECT 42; --'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tables"
    write_deltalake(folder / "numbers", ROWS)
    return folder


def test_a_folder_whose_name_is_a_statement_is_no_table(folder: Path) -> None:
    assert Tables(folder).names() == ["numbers"]
    (folder / "numbers").rename(folder / STATEMENT)
    assert Tables(folder).names() == []
    assert not Tables(folder).exists(STATEMENT)


@pytest.mark.parametrize("name", ["../outside", "..", "/outside"])
def test_a_table_beside_the_folder_is_no_table(folder: Path, tmp_path: Path, name: str) -> None:
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
