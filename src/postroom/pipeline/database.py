"""The tables of a folder as views of a DuckDB database in memory, for commands that need no JVM.

Rule 1: a view has the files of one version of its table, and every column that the table's log names. What an
        older file lacks is NULL; so are partition columns, which stand in the names of folders.
Rule 2: nothing is written but what DuckDB spills, and that goes to the folder for temporary files.
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
CHUNK_ROWS: Final = 10_000  # in memory as Python values
_GLOBS: Final = str.maketrans({"[": "[[]", "*": "[*]", "?": "[?]"})


class Database:
    """Answers SQL over the tables that it was opened with."""

    def __init__(self, tables: "Tables", names: Iterable[str]) -> None:
        self._con = duckdb.connect(config={**SETTINGS, "temp_directory": tempfile.gettempdir()})
        for name in names:
            with table_errors(name):
                self._con.execute(f'CREATE VIEW "{name}" AS {_rows_of(tables, name)}')

    def rows(self, query: str, **values: Any) -> list[dict[str, Any]]:
        """Every row of a query, by the names of its columns."""
        return list(self.each(query, **values))

    def each(self, query: str, **values: Any) -> Iterator[dict[str, Any]]:
        """The same, a few at a time, for results that are many."""
        found = self._executed(query, values)
        names = [column[0] for column in found.description or ()]
        while chunk := found.fetchmany(CHUNK_ROWS):
            for row in chunk:
                yield dict(zip(names, row, strict=True))

    def execute(self, query: str) -> None:
        """Make a table or a view of this database."""
        self._executed(query, {})

    def _executed(self, query: str, values: dict[str, Any]) -> duckdb.DuckDBPyConnection:
        try:
            return self._con.execute(query, values or None)
        except (duckdb.IOException, duckdb.InvalidInputException, duckdb.OutOfMemoryException) as error:
            raise Unavailable(f"the tables cannot be read: {first_sentence(str(error))}") from None


def _rows_of(tables: "Tables", name: str) -> str:
    """A query for all rows of a table; one without rows has its columns as well."""
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
    """The type of a column in the words of DuckDB."""
    if isinstance(kind, ArrayType):
        return f"{_type(kind.elementType)}[]"
    if isinstance(kind, StructType):
        return f"STRUCT({', '.join(f'{_name(field.name)} {_type(field.dataType)}' for field in kind.fields)})"
    return kind.simpleString()


def _name(name: str) -> str:
    return f'"{name}"'


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
