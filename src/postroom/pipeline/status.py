"""The progress, columns and files of the tables, read from their logs. No Spark is started here."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.ingest.segments import SegmentStream
from postroom.pipeline.silver.tables import SILVER
from postroom.pipeline.spark.session import table_errors


def status_of(tables: Tables, streams: Sequence[SegmentStream] = ()) -> Iterator[dict[str, Any]]:
    """A row for each table, and one for the segments of each given stream."""
    if not streams:
        tables.require_tables()
    for stream in streams:
        yield _segments(tables, stream)
    for name in tables.names():
        with table_errors(name):
            yield _row(tables, name)


def _row(tables: Tables, name: str) -> dict[str, Any]:
    files, behind = tables.listing(name), None
    if name in SILVER and tables.exists(source := SILVER[name].source):
        behind = tables.version(source) - tables.last_txn(name, source)
    return {
        "table": name,
        "version": tables.version(name),
        "rows": files.rows,
        "files": len(files),
        "bytes": files.bytes,
        "behind": behind,
    }


def _segments(tables: Tables, stream: SegmentStream) -> dict[str, Any]:
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
