"""What the driver spends on the log of a long history. The files of the log do not exist: nobody opens them.

python bench/pipelinebench/longlogs.py DAYS

Prints one JSON object: seconds and peak memory of a run that finds nothing new.
"""

import json
import subprocess
import sys
import tempfile
import time
from datetime import date, timedelta
from pathlib import Path

from deltalake.transaction import AddAction

from postroom.pipeline.delta_log import Txn
from postroom.pipeline.gold.declaration import GoldTable
from postroom.pipeline.gold.tables import FORM, FORM_ID, GOLD
from postroom.pipeline.ingest import bronze
from postroom.pipeline.ingest.segments import EventStream, ingest_txns
from postroom.pipeline.jobs import nothing_new
from postroom.pipeline.silver.declaration import SilverTable
from postroom.pipeline.silver.tables import SILVER
from postroom.pipeline.tables import Staged, Tables

FILES_A_DAY = 1_000  # of all tables: 100,000 in 100 days
FIRST = date(2025, 1, 1)


def add(day: int, n: int, column: str) -> AddAction:
    name = (FIRST + timedelta(days=day)).isoformat()
    low = {"message_id": f"{day:04}-{n:04}", "ts_us": (day * FILES_A_DAY + n) * 1_000}
    stats = {"numRecords": 10_000, "minValues": low, "maxValues": low, "nullCount": dict.fromkeys(low, 0)}
    path = f"{column}={name}/part-{day:016x}{n:016x}-00000-12345678-1234-1234-1234-123456789012.c000.parquet"
    return AddAction(path, 1 << 20, {column: name}, 0, data_change=True, stats=json.dumps(stats))


def write_logs(tables: Tables, stream: EventStream, days: int) -> None:
    """Half of the files are bronze, half are silver events. The other tables are empty."""
    adds = {
        column: [add(day, n, column) for day in range(days) for n in range(FILES_A_DAY // 2)]
        for column in ("date", "day")
    }
    [last] = stream.segments()
    staged = Staged(bronze.ROWS, bronze.PARTITIONS, adds["date"])
    tables.commit("bronze_events", staged, txns=ingest_txns(stream.ingest_id, last))
    schema = bronze.ROWS.add("day", "date")
    every: dict[str, SilverTable | GoldTable] = {**SILVER, **GOLD}
    for name, table in every.items():
        txns = [Txn(source, 0) for source in table.inputs] + [Txn(FORM_ID, FORM)]
        files = adds["day"] if name == "silver_events" else []
        tables.commit(name, Staged(schema, ("day",), files), txns=txns)
    for name in ("bronze_events", "silver_events"):
        tables._require(name).create_checkpoint()  # noqa: SLF001 - as after a hundred commits


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="postroom-log-") as folder:
        place = Path(folder) / "events" / "date=2025-01-01" / "hour=00"
        place.mkdir(parents=True)
        (place / "00000001-e3b0c44298fc.jsonl").touch()
        stream, tables = EventStream(Path(folder) / "events"), Tables(Path(folder) / "tables")
        write_logs(tables, stream, int(sys.argv[1]))
        child = [sys.executable, __file__, "read", folder]
        subprocess.run(child, check=True)


def read(folder: Path) -> None:
    began, cpu = time.perf_counter(), time.process_time()
    found = nothing_new(Tables(folder / "tables"), [EventStream(folder / "events")])
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    # Not `ru_maxrss`: a process inherits that of the process that has started it.
    [high] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    peak = int(high.split()[1]) << 10
    rows = None if found is None else sum(found.rows.values())
    print(json.dumps({"s": took, "cpu_s": cpu, "bytes": peak, "rows": rows}))


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read(Path(sys.argv[2]))
    else:
        main()
