"""The pipeline on a disk that is full: each command says so in one sentence, and loses nothing.

`disk-pipeline`: `run`, `stream` and `retain` meet it half way, and are simply given again when there is room.
"""

import time
from pathlib import Path

from postroom.pipeline.generator.generate import generate
from postroom.pipeline.ingest.segments import sealed_segments
from postroom.pipeline.tables import Tables
from postroom.pipeline.times import DAY_US
from tests.crash.ledger import Tally
from tests.crash.pipelinejob import Plan
from tests.crash.pipelining import compare, finished, look, scratch
from tests.crash.tasks import Tick
from tests.smalldisk import filled, mounted
from tests.spark.commands import Done, in_its_own_process
from tests.spark.plainrows import all_rows, records
from tests.spark.stories import BAD_LINES, write_segment

MESSAGES = 1_500
FULL = "No space left on device"
LEFT_TO_RUN, LEFT_TO_RETAIN = 400_000, 30_000  # bytes: enough to begin


def run_full(times: int, seed: int, tick: Tick = lambda _: None) -> Tally:
    """Compared with what two commands make that nothing disturbed."""
    tally = Tally()
    with scratch() as folder, mounted(folder / "disk") as disk:
        events, tables = folder / "events", Tables(disk / "tables")
        generate(events, MESSAGES, seed)
        meets(disk, LEFT_TO_RUN, tables, tally, "run", "--events", events)
        # Beside lines that are no events, all others are read the careful way, from copies on this disk.
        write_segment(events, len(sealed_segments(events)) + 1, BAD_LINES)
        meets(disk, LEFT_TO_RUN, tables, tally, "stream", "--events", events)
        finished(Plan(str(folder / "calm"), str(events), ["run"]), folder)
        calm = Tables(folder / "calm")
        if not records(calm, "bronze_rejects"):
            tally.breaks("nothing was read the careful way")
        expect(0, in_its_own_process("run", "--events", events, "--tables", tables.folder), tally)
        compare(all_rows(calm), all_rows(tables), tally)

        times_us = sorted(row["last_us"] for row in records(calm, "silver_messages"))
        keep = ("--keep-days", (time.time_ns() // 1000 - times_us[len(times_us) // 2]) // DAY_US)
        meets(disk, LEFT_TO_RETAIN, tables, tally, "retain", *keep)
        for each in (tables, calm):
            expect(0, in_its_own_process("retain", "--tables", each.folder, *keep), tally)
        compare(all_rows(calm), all_rows(tables), tally)
        if not 0 < len(records(tables, "silver_messages")) < len(times_us):
            tally.breaks("retain kept all messages, or none")
    tick(times)
    return tally


def meets(disk: Path, left: int, tables: Tables, tally: Tally, job: str, *words: object) -> None:
    """A command on a full disk ends with one sentence, and what it leaves is whole."""
    with filled(disk, left):
        done = in_its_own_process(job, "--tables", tables.folder, *words)
        expect(1, done, tally, FULL)
        look(tables, tally)
    tally.count(f"full_in_{job}")


def expect(code: int, done: Done, tally: Tally, sentence: str = "") -> None:
    """How it has to end; that something went wrong is said once, in its last line."""
    said = done.stderr.splitlines() or [""]
    traces = [line for line in said if "Exception" in line or "\tat " in line or "Traceback" in line]
    if done.code != code or sentence not in said[-1] or traces:
        tally.breaks(f"it ended with {done.code}, and not {code}: {done.stderr[-2000:]}")
