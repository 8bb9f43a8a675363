"""The progress, columns and files of the tables, read from their logs. No Spark is started here."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.ingest.segments import EventStream
from postroom.pipeline.silver.tables import SILVER
from postroom.pipeline.spark.session import table_errors


def status_of(tables: Tables, streams: Sequence[EventStream] = ()) -> Iterator[dict[str, Any]]:
    """A row for each table, and one for the segments of each given stream."""
    if not streams:
        tables.require_tables()
    for stream in streams:
        yield _segments(tables, stream)
    for name in tables.names():
        with table_errors(name):
            yield _row(tables, name)


def _row(tables: Tables, name: str) -> dict[str, Any]:
    files = tables.listing(name)
    return {
        "table": name,
        "version": tables.version(name),
        "rows": files.rows,
        "files": len(files),
        "bytes": files.bytes,
        "behind": _behind(tables, name),
    }


def _segments(tables: Tables, stream: EventStream) -> dict[str, Any]:
    segments = stream.segments()
    pending = stream.pending(tables)
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


def columns_of(tables: Tables) -> Iterator[dict[str, Any]]:
    """A row for each column of each table."""
    tables.require_tables()
    for name in tables.names():
        with table_errors(name):
            fields = tables.schema(name).fields
        for field in fields:
            yield {"table": name, "column": field.name, "type": field.dataType.simpleString()}


def keep_house(tables: Tables, *, compact: bool, vacuum: bool, progress: Callable[[str], None]) -> None:
    """Merge small files, and delete those that no version needs."""
    tables.require_tables()
    for name in tables.names():
        with table_errors(name):
            if compact:
                progress(f"{name}: {tables.compact(name)} files joined")
            if vacuum:
                progress(f"{name}: {len(tables.vacuum(name))} files deleted")
