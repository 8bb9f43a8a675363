"""Files of small tables, read and written in this process through Arrow.

Rule 1: the rows are those that Spark would read or write. A column that an older file lacks is NULL; values
        of partition columns come from the log.
Rule 2: only small tables are handled here. Opening a file costs Spark far more than reading a few rows: it
        sends its Hadoop settings to each task, and Hadoop starts a program for each file and folder that it
        creates, to set its mode.
"""

import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

FILE: Final = "file"  # the column with the URL of the file of a row
ROW: Final = "row"  # the column with the number of a row
NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
KEPT: Final = " ,;@!~()+$&"  # characters that Spark does not escape in the name of a folder
COMPRESSION: Final = "zstd"
COMPRESSION_LEVEL: Final = 1  # nearly as small as the default, for less CPU

File = tuple[str, pq.ParquetFile, Mapping[str, str | None]]
"""The address of a file, the file, and its partition."""


def read_rows(files: Iterable[File], schema: StructType) -> pa.Table:
    """The rows of files, in their order: the columns of a table, their `FILE` and their number (`ROW`)."""
    columns = to_arrow_schema(as_nullable(schema), timezone="UTC")
    known = columns.append(pa.field(FILE, pa.string()))
    parts = [
        with_columns(file.read(), {**partition, FILE: address}, known) for address, file, partition in files
    ]
    rows = pa.concat_tables(parts) if parts else known.empty_table()
    return rows.append_column(ROW, pa.array(range(len(rows)), pa.int64()))


def with_columns(rows: pa.Table, partition: Mapping[str, str | None], columns: pa.Schema) -> pa.Table:
    """The rows of a file with the columns of its table."""

    def values(field: pa.Field) -> Any:
        if field.name in partition:
            return pa.array([partition[field.name]] * len(rows), pa.string()).cast(field.type)
        if field.name in rows.column_names:
            return rows[field.name].cast(field.type)
        return pa.nulls(len(rows), field.type)

    return pa.Table.from_arrays([values(field) for field in columns], schema=columns)


def as_nullable(schema: StructType) -> StructType:
    """The same columns, in which every value may be NULL, as Spark reads them from files."""
    return StructType.fromJson(_nullable(schema.jsonValue()))


def _nullable(part: Any) -> Any:
    if isinstance(part, dict):
        flags = {"nullable": True, "containsNull": True, "valueContainsNull": True}
        return {name: flags.get(name, _nullable(value)) for name, value in part.items()}
    return [_nullable(each) for each in part] if isinstance(part, list) else part


def files_of(
    rows: pa.Table,
    *,
    partition_by: Sequence[str],
    split_by: Sequence[str],
    dictionary: Iterable[str],
    statistics: Iterable[str],
) -> Iterator[tuple[list[str], list[str], bytes]]:
    """A file for each value of the `split_by` and `partition_by` columns: its folders, its split, its bytes.

    These columns are not stored. `dictionary` and `statistics` name the columns that have them.
    """
    keys = (*split_by, *partition_by)
    stored = rows.drop_columns(list(keys))
    names = set(stored.column_names)
    for values, chosen in _groups(rows, keys):
        data = io.BytesIO()
        pq.write_table(
            stored.take(chosen),
            data,
            compression=COMPRESSION,
            compression_level=COMPRESSION_LEVEL,
            use_dictionary=sorted(names.intersection(dictionary)),
            write_statistics=sorted(names.intersection(statistics)),
        )
        texts = [NO_VALUE if value is None else quote(str(value), safe=KEPT) for value in values]
        folders = [f"{key}={text}" for key, text in zip(keys, texts, strict=True)]
        yield folders[len(split_by) :], [str(value) for value in values[: len(split_by)]], data.getvalue()


def _groups(rows: pa.Table, keys: Sequence[str]) -> Iterable[tuple[tuple[Any, ...], list[int]]]:
    """The row numbers of each combination of key values."""
    if not keys:
        return [((), list(range(len(rows))))] if len(rows) else []
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, values in enumerate(zip(*(rows[key].to_pylist() for key in keys), strict=True)):
        groups[values].append(number)
    return groups.items()
