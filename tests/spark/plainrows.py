"""The rows of a table, read without Spark, to be compared."""

import json
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]

from postroom.pipeline.delta.delta_log import DataFile
from postroom.pipeline.delta.tables import Tables

Row = dict[str, Any]
Rows = Counter[str]
NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # how Spark calls the folder of the rows without one


def records(tables: Tables, name: str, files: list[DataFile] | None = None) -> list[Row]:
    """Every row, or those of some files, with its columns in the order of the table and its partition."""
    names = tables.schema(name).names
    return [
        {column: {**row, **day}.get(column) for column in names}
        for file in (tables.files(name) if files is None else files)
        for day in [{key: value and date.fromisoformat(value) for key, value in file.partition.items()}]
        for row in pq.ParquetFile(f"{name}/{file.path}", filesystem=tables.storage.fs).read().to_pylist()
    ]


def counted(rows: list[Row]) -> Rows:
    """Rows as JSON, and how often each is there."""
    return Counter(json.dumps(row, sort_keys=True, default=str) for row in rows)


def rows_of(tables: Tables, name: str) -> Rows:
    """Every row as JSON, its partition included, and how often it is there."""
    return counted(records(tables, name))


def rows_in(folder: Path) -> Rows:
    """The same of a table that has no log: all files that are there, in folders such as `day=2025-01-03`."""
    rows: Rows = Counter()
    for file in folder.rglob("*.parquet"):
        named = [part.partition("=") for part in file.relative_to(folder).parent.parts]
        days = {key: None if text == NO_PARTITION else date.fromisoformat(text) for key, _, text in named}
        rows += counted([{**row, **days} for row in pq.ParquetFile(file).read().to_pylist()])
    return rows


def all_rows(tables: Tables) -> dict[str, Rows]:
    """Those of every table."""
    return {name: rows_of(tables, name) for name in tables.names()}


def column(rows: Rows, name: str) -> set[Any]:
    """The values of a column, without NULL."""
    return {json.loads(row).get(name) for row in rows} - {None}


def plain(value: Any) -> Any:
    """Rows, lists and structs as tuples."""
    if isinstance(value, dict):
        return tuple(plain(part) for part in value.values())
    if isinstance(value, tuple | list):
        return tuple(plain(part) for part in value)
    return value
