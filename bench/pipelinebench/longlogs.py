"""What the driver spends on the logs and the segments of a long history.

The files of the logs do not exist, as nobody opens them. The segments are empty, and a chain lists them.

python bench/pipelinebench/longlogs.py DAYS

Prints one JSON object: seconds and peak memory of a run that finds nothing new; and the CPU seconds and peak
memory of the same process when it does what a run with new rows does with the logs: a commit to every table,
after its inputs and its own files were found.
`segments_cpu_s` is the search for new segments, which both do. `open_cpu_s` and `commit_cpu_s` are one
opening of `silver_events`, which has half of the files, and one commit to it, by delta-rs.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from datetime import date, timedelta
from pathlib import Path

from deltalake.transaction import AddAction

from postroom.audit.chain import NO_HASH, ChainEntry, chain_line
from postroom.audit.layout import CHAIN, segment_name
from postroom.pipeline.delta.delta_log import Txn
from postroom.pipeline.delta.log_summaries import SummarizedTables
from postroom.pipeline.delta.storage import Storage
from postroom.pipeline.delta.tables import StagedFiles, Tables
from postroom.pipeline.follow.refresh import FORM_ID
from postroom.pipeline.gold.tables import FORM, GOLD
from postroom.pipeline.ingest import bronze
from postroom.pipeline.ingest.segments import SegmentStream, ingest_txns
from postroom.pipeline.jobs import nothing_new
from postroom.pipeline.silver.tables import SILVER

FILES_A_DAY = 1_000  # of all tables: 100,000 in 100 days
SEGMENTS_A_DAY = FILES_A_DAY // 2  # as many as files of bronze
FIRST = date(2025, 1, 1)
FIRST_US = 1_735_689_600_000_000
DAY_US = 86_400_000_000
NO_BYTES = hashlib.sha256().hexdigest()


def add(day: int, n: int, column: str) -> AddAction:
    name = (FIRST + timedelta(days=day)).isoformat()
    low = {"message_id": f"{day:04}-{n:04}", "ts_us": (day * FILES_A_DAY + n) * 1_000}
    stats = {"numRecords": 10_000, "minValues": low, "maxValues": low, "nullCount": dict.fromkeys(low, 0)}
    path = f"{column}={name}/part-{day:016x}{n:016x}-00000-12345678-1234-1234-1234-123456789012.c000.parquet"
    return AddAction(path, 1 << 20, {column: name}, 0, data_change=True, stats=json.dumps(stats))


def write_segments(folder: Path, days: int) -> None:
    """The segments of all days, and their chain."""
    lines, head = [], NO_HASH
    for n in range(1, days * SEGMENTS_A_DAY + 1):
        sealed_us = FIRST_US + (n - 1) * DAY_US // SEGMENTS_A_DAY
        path = folder / segment_name(n, NO_BYTES, sealed_us)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        line, head = chain_line(entry(n, path.relative_to(folder).as_posix(), sealed_us, head))
        lines.append(line)
    (folder / CHAIN).write_bytes(b"".join(lines))


def entry(n: int, name: str, sealed_us: int, prev: str) -> ChainEntry:
    return ChainEntry(
        n=n,
        name=name,
        events=0,
        bytes=0,
        sha256=NO_BYTES,
        prev=prev,
        min_ts_us=sealed_us,
        max_ts_us=sealed_us,
        sealed_us=sealed_us,
        sources={"tasks:tasks-0123456789abcdef": (n, n)},
        index=NO_BYTES,
    )


def write_logs(tables: Tables, stream: SegmentStream, days: int) -> None:
    """Half of the files are bronze, half are silver events. The other tables are empty."""
    adds = {
        column: [add(day, n, column) for day in range(days) for n in range(FILES_A_DAY // 2)]
        for column in ("date", "day")
    }
    last = stream.segments()[-1]
    staged = StagedFiles(bronze.ROWS, bronze.PARTITIONS, adds["date"])
    tables.commit("bronze_events", staged, txns=ingest_txns(stream.ingest_id, last))
    schema = bronze.ROWS.add("day", "date")
    for name, table in (SILVER | GOLD).items():
        txns = [Txn(source, 0) for source in table.inputs] + [Txn(FORM_ID, FORM)]
        files = adds["day"] if name == "silver_events" else []
        tables.commit(name, StagedFiles(schema, ("day",), files), txns=txns)
    for name in ("bronze_events", "silver_events"):
        tables._require(name).create_checkpoint()  # noqa: SLF001 - as after a hundred commits


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="postroom-log-") as folder:
        write_segments(Path(folder) / "events", int(sys.argv[1]))
        stream, tables = SegmentStream(Path(folder) / "events"), Tables(Path(folder) / "tables")
        write_logs(tables, stream, int(sys.argv[1]))
        child = [sys.executable, __file__, "read", folder]
        subprocess.run(child, check=True)


def read(folder: Path) -> None:
    began, cpu = time.perf_counter(), time.process_time()
    found = nothing_new(Tables(folder / "tables"), [SegmentStream(folder / "events")])
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    peak = peak_bytes()
    rows = None if found is None else sum(found.rows.values())
    began = time.process_time()
    SegmentStream(folder / "events").pending(SummarizedTables(Storage(folder / "tables")))
    segments_cpu = time.process_time() - began
    began = time.process_time()
    follow(Tables(folder / "tables"))
    run_cpu = time.process_time() - began
    run = {"segments_cpu_s": segments_cpu, "run_cpu_s": run_cpu, "run_bytes": peak_bytes()}
    one = dict(zip(("open_cpu_s", "commit_cpu_s"), one_table(Tables(folder / "tables")), strict=True))
    print(json.dumps({"s": took, "cpu_s": cpu, "bytes": peak, "rows": rows, **run, **one}))


def one_table(tables: Tables) -> tuple[float, float]:
    """The CPU seconds of one opening of `silver_events`, and of one commit to it."""
    began = time.process_time()
    tables.exists("silver_events")
    opened = time.process_time()
    tables.mark("silver_events", [Txn("one", 1)])
    return opened - began, time.process_time() - opened


def peak_bytes() -> int:
    """Not `ru_maxrss`: a process inherits that of the process that has started it."""
    [high] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(high.split()[1]) << 10


def follow(tables: Tables) -> None:
    """Commit progress to every table, as a run does that computes no rows."""
    tables.mark("bronze_events", [Txn("new", 1)])
    for name, table in (SILVER | GOLD).items():
        pinned = tables.pinned()
        for source in table.inputs:
            pinned.changed(source, pinned.last_txn(name, source))
        pinned.listing(name).overlapping("ts_us", 0, 1)
        pinned.mark(name, [Txn(source, pinned.version(source)) for source in table.inputs])


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read(Path(sys.argv[2]))
    else:
        main()
