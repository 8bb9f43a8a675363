"""Expectations of the tables: what has to hold of their rows, and how often it may not.

Rule 1: an expectation counts the rows that break it. It is breached when their share exceeds `most`.
Rule 2: everything is computed from one version of each table, by DuckDB.
Rule 3: a breach is kept as an event of OpenLineage, in a file of its own next to the tables, because nothing
        can be appended to a file of an object store. Its name begins with its time, so that names sort by it.
"""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from postroom.errors import InvalidSetting
from postroom.pipeline.delta.storage import Storage
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.query.database import Database, name_in_sql, text_in_sql
from postroom.pipeline.times import MICROS_PER_S

REJECTS: Final = "bronze_rejects"
BREACHES: Final = "_breaches"  # a folder below the tables, which ignore names that begin with `_`
BREACH_EVENTS_MAX: Final = 1_000  # newest events that are kept
Kind = Literal["not_null", "unique", "known_values", "freshness", "reject_rate"]


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One expectation of a table."""

    table: str
    kind: Kind
    columns: tuple[str, ...] = ()
    """`not_null`: none of them is NULL. `unique`: no two rows are equal in all of them. `known_values`: the
    column has one of `values`, or NULL. `freshness`: the newest time of the column, in µs."""
    values: tuple[str, ...] = ()
    most: float = 0.0
    """The largest share of broken rows, from 0 to 1; of `freshness` the largest age in seconds."""


class Measured(msgspec.Struct, frozen=True):
    """An expectation, and what was found."""

    table: str
    kind: Kind
    columns: tuple[str, ...]
    rows: int
    broken: int
    """Rows that break it; of `freshness` the age in seconds."""
    most: float
    holds: bool
    sentence: str


EXPECTATIONS: Final = (
    Expectation("bronze_events", "reject_rate", most=0.01),
    Expectation("silver_events", "not_null", ("event_id", "seq", "ts_us", "kind", "contract", "source")),
    Expectation("silver_events", "unique", ("event_id",)),
    Expectation("silver_messages", "not_null", ("message_id", "first_us", "outcome")),
    Expectation("silver_messages", "unique", ("message_id",)),
    Expectation(
        "silver_messages",
        "known_values",
        ("outcome",),
        ("cancelled", "completed", "dead_letter", "expired", "open", "quarantined"),
    ),
    Expectation("silver_attempts", "unique", ("message_id", "attempt")),
    Expectation("silver_spans", "unique", ("message_id",)),
)
"""What holds of the tables of every stream."""


def read_expectations(file: Path) -> list[Expectation]:
    """The expectations of a TOML file: tables `[[expect]]` with the fields of `Expectation`."""
    try:
        found = tomllib.loads(file.read_text("utf-8"))
        return msgspec.convert(found.get("expect", []), list[Expectation])
    except OSError as error:
        raise InvalidSetting(f"cannot read {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise InvalidSetting(f"{file} has no expectations: {error}") from None


def measure(tables: Tables, expected: Iterable[Expectation], now_us: int) -> list[Measured]:
    """Measure expectations of existing tables, in their order."""
    wanted = list(expected)
    for one in wanted:
        _need_columns(tables, one)
    names = {one.table for one in wanted if one.kind != "reject_rate"}
    database = Database(tables, sorted(names), with_partitions=True)
    return [_measured(tables, database, one, now_us) for one in wanted]


def breaches(measured: Sequence[Measured]) -> list[Measured]:
    return [one for one in measured if not one.holds]


def _need_columns(tables: Tables, one: Expectation) -> None:
    unknown = set(one.columns) - set(tables.schema(one.table).names)
    if unknown:
        raise InvalidSetting(f"table {one.table} has no column {min(unknown)} that could be expected")
    wanted = {"reject_rate": 0, "freshness": 1, "known_values": 1}.get(one.kind, len(one.columns) or 1)
    if len(one.columns) != wanted:
        raise InvalidSetting(f"{one.kind} of {one.table} needs {wanted} column{'s' * (wanted != 1)}")


def _measured(tables: Tables, database: Database, one: Expectation, now_us: int) -> Measured:
    rows = tables.row_count(one.table)
    if one.kind == "reject_rate":
        broken = tables.row_count(REJECTS)
        rows += broken
    elif one.kind == "freshness":
        newest_us = _number(database, f"max({name_in_sql(one.columns[0])})", one.table)
        age_s = max(0, now_us - newest_us) // MICROS_PER_S
        said = f"the newest {one.columns[0]} is {age_s:,} s old"
        return _verdict(one, rows, age_s, holds=rows > 0 and age_s <= one.most, said=said)
    else:
        broken = _number(database, _broken_rows(one), one.table)
    share = broken / rows if rows else 0.0
    return _verdict(one, rows, broken, holds=share <= one.most, said=" ".join(_said(one, broken, rows)))


def _verdict(one: Expectation, rows: int, broken: int, *, holds: bool, said: str) -> Measured:
    return Measured(one.table, one.kind, one.columns, rows, broken, one.most, holds, f"{one.table}: {said}")


def _said(one: Expectation, broken: int, rows: int) -> Iterator[str]:
    yield f"{broken:,} of {rows:,}"
    yield {
        "not_null": f"rows have no {' or no '.join(one.columns)}",
        "unique": f"rows repeat another row's {' and '.join(one.columns)}",
        "known_values": f"rows have an unknown {one.columns[0] if one.columns else ''}",
        "reject_rate": "lines were rejected",
    }[one.kind]


def _broken_rows(one: Expectation) -> str:
    """SQL for the number of rows that break an expectation."""
    columns = [name_in_sql(name) for name in one.columns]
    if one.kind == "not_null":
        return f"count(*) FILTER (WHERE {' OR '.join(f'{column} IS NULL' for column in columns)})"
    if one.kind == "unique":
        distinct = f"SELECT DISTINCT {', '.join(columns)} FROM {name_in_sql(one.table)}"  # noqa: S608 - quoted names
        return f"count(*) - (SELECT count(*) FROM ({distinct}))"  # noqa: S608 - the same
    values = ", ".join(map(text_in_sql, one.values))
    return f"count(*) FILTER (WHERE {columns[0]} NOT IN ({values}))"


def _number(database: Database, expression: str, table: str) -> int:
    [row] = database.rows(f"SELECT {expression} AS n FROM {name_in_sql(table)}")  # noqa: S608 - quoted names
    return int(row["n"] or 0)


def keep_breach(storage: Storage, event: Mapping[str, Any]) -> str:
    """Write the event of a breach next to the tables; returns its path. Deletes the oldest events."""
    name = f"{event['eventTime'].replace(':', '')}-{event['run']['runId']}.json"
    path = f"{BREACHES}/{name}"
    storage.write(path, json.dumps(event).encode() + b"\n")
    known = sorted(file.path for file in storage.files(BREACHES, deep=False))
    for oldest in known[:-BREACH_EVENTS_MAX]:
        storage.delete(oldest)
    return path
