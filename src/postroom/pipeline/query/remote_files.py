"""The files of a table at an address, as an Arrow dataset that DuckDB scans.

Arrow's own scanner waits for its threads while it holds the GIL, and these need the GIL to call a file system
that is written in Python. Both would wait indefinitely. So files are opened and read by Python threads, which
release the GIL while they wait.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.dataset as ds  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyspark.sql.pandas.types import to_arrow_schema

from postroom.pipeline.delta.arrow_files import as_nullable, with_columns
from postroom.pipeline.delta.delta_log import DataFile
from postroom.pipeline.delta.tables import Tables

READ_AHEAD: Final = 4  # files in memory at a time


class RemoteFiles(ds.FileSystemDataset):  # type: ignore[misc]
    """The rows of one version of a table, each with the values of its partition."""

    def __init__(self, tables: Tables, name: str) -> None:
        schema = to_arrow_schema(as_nullable(tables.schema(name)), timezone="UTC")
        parquet, files = ds.ParquetFileFormat(), tables.storage.fs
        self.partitions = {f"{name}/{file.path}": file.partition for file in tables.files(name)}
        fragments = [
            parquet.make_fragment(f"{name}/{file.path}", files, _partition_of(file, schema))
            for file in tables.files(name)
        ]
        super().__init__(fragments, schema, parquet, files)

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None) -> "Scan":  # noqa: A002 - of Arrow
        names = self.schema.names if columns is None else columns
        return Scan(self, pa.schema([self.schema.field(name) for name in names]), filter)


class Scan:
    """One reading of some columns of the rows for which a condition holds."""

    def __init__(self, dataset: RemoteFiles, schema: pa.Schema, condition: Any) -> None:
        self._dataset = dataset
        self._schema = schema
        self._condition = condition

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self._schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """Files whose partition contradicts the condition are not opened."""
        paths = [fragment.path for fragment in self._dataset.get_fragments(self._condition)]
        with ThreadPoolExecutor(READ_AHEAD) as pool:
            begun: deque[Future[pa.Table]] = deque()
            try:
                for path in paths:
                    begun.append(pool.submit(self._rows, path))
                    if len(begun) == READ_AHEAD:
                        yield from begun.popleft().result().to_batches()
                while begun:
                    yield from begun.popleft().result().to_batches()
            finally:
                for future in begun:
                    future.cancel()

    def _rows(self, path: str) -> pa.Table:
        """A condition may be about columns that are not asked for, so all of them are read for it."""
        schema = self._schema if self._condition is None else self._dataset.schema
        with pq.ParquetFile(path, filesystem=self._dataset.filesystem, pre_buffer=True) as file:
            read = file.read(columns=[name for name in schema.names if name in file.schema_arrow.names])
        rows = with_columns(read, self._dataset.partitions[path], schema)
        return rows if self._condition is None else rows.filter(self._condition).select(self._schema.names)


def _partition_of(file: DataFile, schema: pa.Schema) -> ds.Expression:
    """The partition values of a file, as a condition that holds for all of its rows."""
    condition = ds.scalar(True)  # noqa: FBT003 - a value
    for column, text in file.partition.items():
        value = pa.scalar(text, pa.string()).cast(schema.field(column).type)
        condition &= ds.field(column).is_null() if text is None else ds.field(column) == value
    return condition
