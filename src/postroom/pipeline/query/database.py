"""The tables of a folder as views of a DuckDB database in memory, for commands that need no JVM.

Rule 1: a view has the files of one version of its table, and every column that the table's log names. Columns
        that an older file lacks are NULL.
Rule 2: DuckDB's own reader reads files of this machine. Their partition columns are NULL, unless they are
        asked for: their values exist only in the log, and a view then has a part for each of them.
Rule 3: files at an address are read as an Arrow dataset, through the same storage as the log. So they need no
        extension of DuckDB, no second set of credentials, and no Hadoop.
Rule 4: DuckDB writes nothing but spill files, in a folder of its own that it creates for them and deletes. A
        sealed database may still read that folder, so it is not the folder for all temporary files.
"""

import tempfile
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import duckdb
from pyspark.sql.types import ArrayType, DataType, StructType

from postroom.errors import Unavailable
from postroom.pipeline.delta.delta_log import DataFile
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.query.remote_files import RemoteFiles
from postroom.pipeline.spark.session import first_sentence, table_errors

SETTINGS: Final = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
NULL_ORDER: Final = "nulls_first_on_asc_last_on_desc"  # as in Spark
CHUNK_ROWS: Final = 10_000  # in memory as Python values at a time
_GLOBS: Final = str.maketrans({"[": "[[]", "*": "[*]", "?": "[?]"})


class Database:
    """Runs SQL over the tables that it was opened with."""

    def __init__(self, tables: Tables, names: Iterable[str], *, with_partitions: bool = False) -> None:
        spill = Path(tempfile.gettempdir()) / f"postroom-{uuid.uuid4().hex}"
        self._con = duckdb.connect(config={**SETTINGS, "temp_directory": str(spill)})
        self._paths: list[str] = []
        for name in names:
            self.open(tables, name, with_partitions=with_partitions)

    def open(self, tables: Tables, name: str, *, with_partitions: bool = False) -> None:
        """Add the view of a table."""
        with table_errors(name):
            if tables.storage.local is None:
                self._con.register(name, RemoteFiles(tables, name))
                return
            rows = _rows_of(tables, name, with_partitions=with_partitions)
            self._con.execute(f"CREATE VIEW {name_in_sql(name)} AS {rows}")
            self._paths += _paths_of(tables, name, tables.files(name))

    def seal(self) -> None:
        """Let later statements open the files of the tables and nothing else, and change no setting."""
        self._con.execute(f"SET default_null_order = '{NULL_ORDER}'")
        self._con.execute(f"SET allowed_paths = [{', '.join(map(text_in_sql, self._paths))}]")
        self._con.execute("SET enable_external_access = false")
        self._con.execute("SET lock_configuration = true")

    def select(self, name: str, table: str, conditions: Iterable[str]) -> None:
        """Copy the rows of a view for which all conditions hold. Each is parsed as a single expression."""
        rows = self._con.view(table)
        for condition in conditions:
            rows = rows.filter(condition)
        with _reading():
            rows.create(name)

    def rows(self, query: str) -> list[dict[str, Any]]:
        """The rows of a query, each as a dictionary from column name to value."""
        return list(self.each(query))

    def each(self, query: str) -> Iterator[dict[str, Any]]:
        """The rows of a query, fetched in chunks."""
        for names, row in self.each_named(query):
            yield dict(zip(names, row, strict=True))

    def each_named(self, query: str) -> Iterator[tuple[list[str], tuple[Any, ...]]]:
        """Rows, each with the names of its columns. Names may repeat."""
        found = self._executed(query)
        names = [column[0] for column in found.description or ()]
        while chunk := found.fetchmany(CHUNK_ROWS):
            for row in chunk:
                yield names, row

    def define(self, name: str, query: str) -> None:
        """Let later queries read the rows of this one, which runs once, by a name."""
        self.execute(f"CREATE OR REPLACE TEMP TABLE {name_in_sql(name)} AS {query}")

    def execute(self, query: str) -> None:
        """Run a statement, such as one that creates a temporary table."""
        self._executed(query)

    def _executed(self, query: str) -> duckdb.DuckDBPyConnection:
        with _reading():
            return self._con.execute(query)


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (duckdb.IOException, duckdb.InvalidInputException, duckdb.OutOfMemoryException) as error:
        raise Unavailable(f"the tables cannot be read: {first_sentence(str(error))}") from None


def _rows_of(tables: Tables, name: str, *, with_partitions: bool) -> str:
    """A query for all rows of a table. A table without files still has its columns."""
    schema = tables.schema(name)
    columns = ", ".join(
        f"NULL::{_type(field.dataType)} AS {name_in_sql(field.name)}" for field in schema.fields
    )
    parts = [f"SELECT {columns} WHERE false"]
    partitions: dict[tuple[tuple[str, str | None], ...], list[DataFile]] = defaultdict(list)
    for file in tables.files(name):
        partitions[tuple(file.partition.items()) if with_partitions else ()].append(file)
    for values, files in partitions.items():
        listed = ", ".join(text_in_sql(path.translate(_GLOBS)) for path in _paths_of(tables, name, files))
        known = "".join(
            f", {_literal(value)}::{_type(schema[column].dataType)} AS {name_in_sql(column)}"
            for column, value in values
        )
        parts.append(
            f"SELECT *{known} FROM read_parquet([{listed}], union_by_name = true, hive_partitioning = false)"  # noqa: S608 - paths of our own, quoted
        )
    return " UNION ALL BY NAME ".join(parts)


def _paths_of(tables: Tables, name: str, files: Sequence[DataFile]) -> list[str]:
    return [str(tables.folder / name / file.path) for file in files]


def _type(kind: DataType) -> str:
    """The DuckDB name of a type."""
    if isinstance(kind, ArrayType):
        return f"{_type(kind.elementType)}[]"
    if isinstance(kind, StructType):
        fields = (f"{name_in_sql(field.name)} {_type(field.dataType)}" for field in kind.fields)
        return f"STRUCT({', '.join(fields)})"
    return kind.simpleString()


def name_in_sql(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(value: str | None) -> str:
    return "NULL" if value is None else text_in_sql(value)


def text_in_sql(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
