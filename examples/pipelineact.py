"""The last act of the demo: Spark loads the audit stream into tables, and a report is made from them.

The tables must contain every event of the stream. The report is one file that a browser shows offline.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

POSTROOM = str(Path(sys.executable).with_name("postroom"))
SPARK_S = 20  # for a few hundred events on two idle cores; most of it is the start of the JVM

Show = Callable[..., None]


def act_pipeline(folder: Path, show: Show, report: Path, events: int) -> bool:
    """Make tables and a report; returns whether the tables hold all `events` of the stream."""
    print("\nAct 6: the same stream as Spark tables, and a report\n")
    print(
        f"  Spark starts a JVM and makes 20 tables: about {SPARK_S} seconds on two idle cores, more on a\n"
        "  busy machine. The report needs no Spark.",
        flush=True,
    )
    stream, tables = str(folder / "audit"), str(folder / "tables")
    show(folder, "postroom", "pipeline", "run", "--events", stream, "--tables", tables)
    show(folder, "postroom", "pipeline", "report", "--tables", tables, "--out", str(report))
    rows = {row["table"]: row for row in told("status", "--tables", tables, "--events", stream)}
    behind = rows["segments"]["behind"]
    print(
        f"\n  events in the stream {events}, in the tables {rows['silver_events']['rows']}, "
        f"messages {rows['silver_messages']['rows']}, tables {len(rows) - 1}, segments left {behind}"
    )
    print(f"\nThe report: {report.as_uri()}")
    return bool(rows["silver_events"]["rows"] == events and behind == 0)


def told(*words: str) -> list[dict[str, Any]]:
    """The JSON lines that a pipeline command prints."""
    done = subprocess.run([POSTROOM, "pipeline", *words], check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]
