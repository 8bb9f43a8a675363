"""The pipeline on a full disk: each command reports it in one sentence, and loses nothing.

`disk-pipeline`: `run`, `stream` and `retain` fail half way, and are run again when there is space.
`archive-pipeline`: so does `prepare`, and leaves no archive that a JVM would use. With space it makes an
archive, which the next JVM maps.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from postroom.pipeline import warmup
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.generator.generate import generate
from postroom.pipeline.spark import class_archive
from postroom.pipeline.times import DAY_US
from tests.crash.ledger import Tally
from tests.crash.pipelinejob import Plan
from tests.crash.pipelining import compare, finished, look, scratch
from tests.crash.tasks import Tick
from tests.smalldisk import BALLAST, filled, mounted
from tests.spark.commands import Done, in_its_own_process
from tests.spark.plainrows import all_rows, records
from tests.spark.segmentfiles import sealed_segments
from tests.spark.stories import BAD_LINES, write_segment

MESSAGES = 1_500
FULL = "No space left on device"
NO_ARCHIVE = "the disk may be full"
LEFT_TO_RUN, LEFT_TO_RETAIN, LEFT_TO_PREPARE = 400_000, 30_000, 2_000_000  # bytes: enough to start
START = """
from pathlib import Path
from postroom.pipeline.spark.session import spark_session
spark = spark_session("local[1]")
mapped = Path(f"/proc/{spark.sparkContext._gateway.proc.pid}/maps").read_text().splitlines()
print({line.split()[-1] for line in mapped if ".jsa" in line})
spark.stop()
"""
"""Makes a JVM print the archives that it has mapped."""


def run_full(times: int, seed: int, tick: Tick = lambda _: None) -> Tally:
    """The result is compared with that of two undisturbed commands."""
    tally = Tally()
    with scratch() as folder, mounted(folder / "disk") as disk:
        events, tables = folder / "events", Tables(disk / "tables")
        generate(events, MESSAGES, seed)
        meets(disk, LEFT_TO_RUN, tables, tally, "run", "--events", events)
        # Beside lines that are not events, all others are read the careful way, from copies on this disk.
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
    """A command on a full disk ends with one sentence, and leaves complete tables."""
    with filled(disk, left):
        done = in_its_own_process(job, "--tables", tables.folder, *words)
        expect(1, done, tally, FULL)
        look(tables, tally)
    tally.count(f"full_in_{job}")


def expect(code: int, done: Done, tally: Tally, sentence: str = "") -> None:
    """The expected end: the error is reported once, in the last line."""
    said = done.stderr.splitlines() or [""]
    traces = [line for line in said if "Exception" in line or "\tat " in line or "Traceback" in line]
    if done.code != code or sentence not in said[-1] or traces:
        tally.breaks(f"it ended with {done.code}, and not {code}: {done.stderr[-2000:]}")


def make_archive(times: int, _seed: int, tick: Tick = lambda _: None) -> Tally:
    tally = Tally()
    with scratch() as folder:
        prepare_without_room(folder / "disk", tally)
        prepare_with_room(folder / "a cache", tally)
    tick(times)
    return tally


def prepare_without_room(place: Path, tally: Tally) -> None:
    with mounted(place) as disk, filled(disk, LEFT_TO_PREPARE):
        expect(1, in_its_own_process("prepare", POSTROOM_CACHE=str(disk)), tally, NO_ARCHIVE)
        if {path.name for path in disk.iterdir()} - {BALLAST, warmup.LOCK}:
            tally.breaks(f"prepare left {sorted(disk.iterdir())}")
    tally.count("full_in_prepare")


def prepare_with_room(cache: Path, tally: Tally) -> None:
    """In a folder whose name has a space. An archive of another size, as after a crash, is removed."""
    cache.mkdir()
    stale = cache / class_archive.name_of(1)
    stale.write_bytes(b"of another size")
    expect(0, in_its_own_process("prepare", POSTROOM_CACHE=str(cache)), tally)
    made = [path.name for path in cache.iterdir() if path.name != warmup.LOCK]
    mapped = subprocess.run(
        [sys.executable, "-c", START],
        env={**os.environ, class_archive.CACHE: str(cache)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if len(made) != 1 or made[0] == stale.name or made[0] not in mapped:
        tally.breaks(f"prepare made {made}, and a JVM maps {mapped}")
    again = in_its_own_process("prepare", "--json", POSTROOM_CACHE=str(cache))
    expect(0, again, tally)
    if '"is_new":false' not in again.stdout:
        tally.breaks(f"a second prepare said {again.stdout}")
    tally.acknowledged += 1
