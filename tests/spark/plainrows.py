"""The rows of a table, read without Spark, to be compared."""

import json
from collections import Counter
from datetime import date
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]

from postroom.pipeline.tables import Tables

Row = dict[str, Any]
Rows = Counter[str]


def records(tables: Tables, name: str) -> list[Row]:
    """Every row with its columns in the order of the table, its partition included."""
    names = tables.schema(name).names
    return [
        {column: {**row, **day}.get(column) for column in names}
        for file in tables.files(name)
        for day in [{key: value and date.fromisoformat(value) for key, value in file.partition.items()}]
        for row in pq.ParquetFile(tables.folder / name / file.path).read().to_pylist()
    ]


def rows_of(tables: Tables, name: str) -> Rows:
    """Every row as JSON, its partition included, and how often it is there."""
    return Counter(json.dumps(row, sort_keys=True, default=str) for row in records(tables, name))


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
