"""The progress, columns and files of the tables, read from their logs. No Spark is started."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from postroom.pipeline.ingest.segments import (
    PendingSegments,
    last_ingested,
    pending_segments,
    sealed_segments,
)
from postroom.pipeline.session import table_errors
from postroom.pipeline.silver.tables import SILVER
from postroom.pipeline.tables import Tables, rows_of


def status_of(folder: Path, events: Path | None = None) -> Iterator[dict[str, Any]]:
    """A row for each table, and one for the segments if their folder is given."""
    tables = Tables(folder)
    if events is None:
        tables.require_tables()
    else:
        yield _segments(folder, events)
    for name in tables.names():
        with table_errors(name):
            yield _row(tables, name)


def _row(tables: Tables, name: str) -> dict[str, Any]:
    files = tables.files(name)
    return {
        "table": name,
        "version": tables.version(name),
        "rows": rows_of(files),
        "files": len(files),
        "bytes": sum(file.size for file in files),
        "behind": _behind(tables, name),
    }


def new_segments(folder: Path, events: Path) -> PendingSegments:
    """The segments that the next run finds."""
    return pending_segments(events, last_ingested(Tables(folder), events))


def _segments(folder: Path, events: Path) -> dict[str, Any]:
    segments = sealed_segments(events)
    pending = new_segments(folder, events)
    return {
        "table": "segments",
        "version": max((segment.number for segment in segments), default=0),
        "rows": None,
        "files": len(segments),
        "bytes": sum(segment.size for segment in segments),
        "behind": len(pending.ready) + len(pending.waiting),
        "missing": pending.gaps,
    }


def _behind(tables: Tables, name: str) -> int | None:
    """The number of commits of its source that a table has not read; None for bronze and gold."""
    if name not in SILVER or not tables.exists(source := SILVER[name].source):
        return None
    return tables.version(source) - tables.last_txn(name, source)


def columns_of(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each column of each table."""
    tables = Tables(folder)
    tables.require_tables()
    for name in tables.names():
        with table_errors(name):
            fields = tables.schema(name).fields
        for field in fields:
            yield {"table": name, "column": field.name, "type": field.dataType.simpleString()}


def keep_house(folder: Path, *, compact: bool, vacuum: bool, progress: Callable[[str], None]) -> None:
    """Merge small files, and delete those that no version needs."""
    tables = Tables(folder)
    tables.require_tables()
    with tables.lock():
        for name in tables.names():
            with table_errors(name):
                if compact:
                    progress(f"{name}: {tables.compact(name)} files joined")
                if vacuum:
                    progress(f"{name}: {len(tables.vacuum(name))} files deleted")
