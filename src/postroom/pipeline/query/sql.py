"""Queries of `sql`: DuckDB answers them over the files of the tables.

Rule 1: only a single SELECT statement is executed, with SHOW, DESCRIBE and SUMMARIZE, which DuckDB parses as
        such. It names tables of the folder, its own WITH names, and table functions of an allow-list.
Rule 2: the database is a second barrier. It lies in memory, opens only the files of the named tables, and its
        settings are locked before the query runs.
Rule 3: a row is printed as Spark's `to_json` prints it.
"""

from collections.abc import Callable, Collection, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from math import isfinite
from typing import Any, Final, NamedTuple

import duckdb
import msgspec

from postroom.errors import InvalidMessage
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.query.database import Database
from postroom.pipeline.spark.session import first_sentence

AST_NODES_MAX: Final = 100_000  # of a parsed query
TABLE_FUNCTIONS: Final = frozenset({"generate_series", "range", "unnest"})
"""Table functions that compute with their arguments alone."""
SHOWN: Final = frozenset({'"tables"', '"all_tables"'})
"""The subjects of SHOW, apart from a table."""


class ParsedQuery(NamedTuple):
    """The names in a query."""

    tables: frozenset[str]
    """Lower-case names, except names of WITH clauses."""
    lists_tables: bool


def answers(tables: Tables, query: str) -> Iterator[str]:
    """The rows of a query over the tables, each as JSON."""
    tables.require_tables()
    known = {name.lower(): name for name in tables.names()}
    parsed = parse(query)
    unknown = parsed.tables - known.keys()
    if unknown:
        raise InvalidMessage(f"there is no table {min(unknown)} in this folder")
    wanted = known.values() if parsed.lists_tables else [known[name] for name in sorted(parsed.tables)]
    database = Database(tables, wanted, with_partitions=True)
    database.seal()
    try:
        yield from map(_as_json, database.each_named(query))
    except duckdb.Error as error:
        raise InvalidMessage(f"DuckDB refuses it: {first_sentence(str(error))}") from None


# ---- what a query may contain ----------------------------------------------------------------------------


def parse(query: str) -> ParsedQuery:
    """The names in a query. Raises unless it is one SELECT that reads tables and nothing else."""
    with duckdb.connect() as con:
        [[text]] = con.execute("SELECT json_serialize_sql(?)", [query]).fetchall()
    tree = msgspec.json.decode(text)
    if tree["error"]:
        if tree["error_type"] == "not implemented":
            raise InvalidMessage(
                "sql answers queries over the tables and changes nothing: this is not a SELECT"
            )
        raise InvalidMessage(f"DuckDB refuses it: {first_sentence(tree['error_message'])}")
    if len(tree["statements"]) != 1:
        raise InvalidMessage("sql answers one query at a time")
    walk = _Walk()
    walk.all(tree["statements"][0])
    return ParsedQuery(frozenset(walk.tables - walk.aliases), walk.lists_tables)


class _Walk:
    """One walk over a parsed query and the queries within it."""

    def __init__(self) -> None:
        self.tables: set[str] = set()
        self.aliases: set[str] = set()  # names of WITH clauses
        self.lists_tables = False

    def all(self, tree: Any) -> None:
        left, seen = [tree], 0
        while left:
            part = left.pop()
            seen += 1
            if seen > AST_NODES_MAX:
                raise InvalidMessage(f"the query has more than {AST_NODES_MAX:,} parts")
            if isinstance(part, dict):
                self._node(part)
                left += part.values()
            elif isinstance(part, list):
                left += part

    def _node(self, node: dict[str, Any]) -> None:
        match node.get("type"):
            case "BASE_TABLE":
                self._table(node)
            case "TABLE_FUNCTION":
                name = node["function"]["function_name"]
                if name.lower() not in TABLE_FUNCTIONS:
                    raise InvalidMessage(
                        f"sql does not know a table function {name}, or it may not be called here"
                    )
            case "SHOW_REF" if node["query"] is None:
                if node["table_name"] not in SHOWN:
                    raise InvalidMessage("sql shows tables and their columns, and nothing else")
                self.lists_tables = True
        for entry in node.get("cte_map", {}).get("map", ()):
            self.aliases.add(entry["key"].lower())

    def _table(self, node: dict[str, Any]) -> None:
        parts = [part for part in (node["catalog_name"], node["schema_name"], node["table_name"]) if part]
        if len(parts) != 1 or node.get("at_clause") is not None:
            raise InvalidMessage(f"{'.'.join(parts)} is not a table of this folder")
        self.tables.add(parts[0].lower())


# ---- rows as JSON ------------------------------------------------------------------------------------------


def _as_json(row: tuple[Collection[str], tuple[Any, ...]]) -> str:
    """A row as an object. Columns of one name stay, as with Spark."""
    names, values = row
    fields = (f"{_encode(name)}:{_encode(_plain(value))}" for name, value in zip(names, values, strict=True))
    return f"{{{','.join(fields)}}}"


_encoder: Final = msgspec.json.Encoder(decimal_format="number")


def _encode(value: object) -> str:
    return _encoder.encode(value).decode()


def _plain(value: Any) -> Any:
    """A value in the form of Spark's `to_json`."""
    convert = _FORMS.get(type(value))
    return value if convert is None else convert(value)


def _moment(value: datetime) -> str:
    text = value.isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z" if value.tzinfo else text


_NOT_FINITE: Final = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
_FORMS: Final[dict[type, Callable[[Any], Any]]] = {
    dict: lambda value: {str(name): _plain(inner) for name, inner in value.items()},
    list: lambda value: [_plain(inner) for inner in value],
    tuple: lambda value: [_plain(inner) for inner in value],
    float: lambda value: value if isfinite(value) else _NOT_FINITE[str(value)],
    datetime: _moment,
    date: date.isoformat,
    time: time.isoformat,
    timedelta: str,
    Decimal: lambda value: value if value.is_finite() else str(value),
}
