"""The rows of a table, read without Spark, to be compared."""

import json
from collections import Counter
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]

from postroom.pipeline.tables import Tables

Rows = Counter[str]


def rows_of(tables: Tables, name: str) -> Rows:
    """Every row as JSON, its partition included, and how often it is there."""
    found: Rows = Counter()
    for file in tables.files(name):
        for row in pq.ParquetFile(tables.folder / name / file.path).read().to_pylist():
            found[json.dumps({**row, **file.partition}, sort_keys=True, default=str)] += 1
    return found


def column(rows: Rows, name: str) -> set[Any]:
    """The values of a column, without NULL."""
    return {json.loads(row).get(name) for row in rows} - {None}
