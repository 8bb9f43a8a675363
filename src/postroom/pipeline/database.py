"""The tables of a folder as views of a DuckDB database in memory, for commands that need no JVM.

Rule 1: a view has the files of one version of its table, and every column that the table's log names. Columns
        that an older file lacks are NULL; so are partition columns, which exist only in folder names.
Rule 2: DuckDB writes nothing but spill files, in the folder for temporary files.
"""

import tempfile
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import duckdb
from pyspark.sql.types import ArrayType, DataType, StructType

from postroom.errors import Unavailable
from postroom.pipeline.session import first_sentence, table_errors

if TYPE_CHECKING:
    from postroom.pipeline.tables import Tables

SETTINGS: Final = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
CHUNK_ROWS: Final = 10_000  # in memory as Python values at a time
_GLOBS: Final = str.maketrans({"[": "[[]", "*": "[*]", "?": "[?]"})


class Database:
    """Runs SQL over the tables that it was opened with."""

    def __init__(self, tables: "Tables", names: Iterable[str]) -> None:
        self._con = duckdb.connect(config={**SETTINGS, "temp_directory": tempfile.gettempdir()})
        for name in names:
            with table_errors(name):
                self._con.execute(f'CREATE VIEW "{name}" AS {_rows_of(tables, name)}')

    def rows(self, query: str, **values: Any) -> list[dict[str, Any]]:
        """All rows of a query, by column name."""
        return list(self.each(query, **values))

    def each(self, query: str, **values: Any) -> Iterator[dict[str, Any]]:
        """The rows of a query, fetched in chunks."""
        found = self._executed(query, values)
        names = [column[0] for column in found.description or ()]
        while chunk := found.fetchmany(CHUNK_ROWS):
            for row in chunk:
                yield dict(zip(names, row, strict=True))

    def execute(self, query: str) -> None:
        """Run a statement, such as one that creates a temporary table."""
        self._executed(query, {})

    def _executed(self, query: str, values: dict[str, Any]) -> duckdb.DuckDBPyConnection:
        try:
            return self._con.execute(query, values or None)
        except (duckdb.IOException, duckdb.InvalidInputException, duckdb.OutOfMemoryException) as error:
            raise Unavailable(f"the tables cannot be read: {first_sentence(str(error))}") from None


def _rows_of(tables: "Tables", name: str) -> str:
    """A query for all rows of a table. A table without files still has its columns."""
    schema = tables.schema(name)
    columns = ", ".join(f'NULL::{_type(field.dataType)} AS "{field.name}"' for field in schema.fields)
    none = f"SELECT {columns} WHERE false"
    paths = [str(tables.folder / name / file.path) for file in tables.files(name)]
    if not paths:
        return none
    listed = ", ".join(_quoted(path.translate(_GLOBS)) for path in paths)
    reader = f"read_parquet([{listed}], union_by_name = true, hive_partitioning = false)"
    return f"{none} UNION ALL BY NAME SELECT * FROM {reader}"  # noqa: S608 - paths of our own, quoted


def _type(kind: DataType) -> str:
    """The DuckDB name of a type."""
    if isinstance(kind, ArrayType):
        return f"{_type(kind.elementType)}[]"
    if isinstance(kind, StructType):
        return f"STRUCT({', '.join(f'{_name(field.name)} {_type(field.dataType)}' for field in kind.fields)})"
    return kind.simpleString()


def _name(name: str) -> str:
    return f'"{name}"'


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
