"""Two drivers on the same tables, each a process with a JVM of its own, above the size of small data.

`drivers-pipeline`: `run` beside `run`, `retain`, `backfill` and `tables --compact`, at a path and behind a
mount of `viewfs:`. In every second pair, on average, the first driver is killed while both write. A driver
that ends by itself ends with 0, or says that it has to be started again. After one more run every row equals
that of an undisturbed one, and only a killed load leaves a folder, which no reader sees.
"""

import json
import os
import signal
import subprocess
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from random import Random
from typing import Final, Literal

from msgspec.structs import replace

from postroom.audit.layout import STREAM
from postroom.pipeline.delta.tables import LOAD, Tables
from tests.crash.ledger import Tally
from tests.crash.pipelinejob import LAKE, Plan
from tests.crash.pipelining import compare, driver, finished, generated, look, put, scratch
from tests.crash.tasks import Tick
from tests.spark.clusterjob import KEEP_DAYS
from tests.spark.plainrows import all_rows

MESSAGES = 4_500  # about 11 MB of segments
DAY_US = 86_400_000_000
Beside = Literal["run", "retain", "backfill", "compact"]
PAIRS: Final[tuple[tuple[Beside, bool], ...]] = tuple(
    product(("run", "retain", "backfill", "compact"), (False, True))
)
"""What runs beside `run`, and whether the tables are behind a mount."""
SENTENCES = ("another writer changed table", "run the pipeline first")
"""What a driver says that has to be started again."""


def run_pairs(times: int, seed: int, tick: Tick = lambda _: None) -> Tally:
    """Every pair."""
    tally = Tally()
    rng = Random(f"drivers-pipeline/{seed}")
    with scratch() as folder:
        history = History(folder, MESSAGES, rng.randrange(2**31))
        for number, (beside, is_mounted) in enumerate(PAIRS):
            history.pair(number, beside, is_mounted=is_mounted, is_killed=bool(rng.randrange(2)), tally=tally)
            tick(1)
    return tally


class History:
    """Two deliveries of one stream, and its tables without a disturbance."""

    def __init__(self, folder: Path, messages: int, seed: int, *, by_spark: bool = False) -> None:
        self.folder = folder
        self.by_spark = by_spark
        segments = generated(folder / "whole", messages, seed, faults=False)
        self.half, self.whole = folder / "half", folder / "whole"
        put(self.half, segments[: len(segments) * 2 // 3])
        for events in (self.half, self.whole):
            (events / STREAM).write_text("drivers\n")
        self.now_us = first_day_us(segments) + (KEEP_DAYS + 1) * DAY_US
        self.calm = Plan(
            str(folder / "calm"), str(self.whole), ["run", "retain", "run"], self.now_us, by_spark=by_spark
        )
        finished(self.calm, folder)
        self.expected = all_rows(Tables(folder / "calm"))

    def pair(self, number: int, beside: Beside, *, is_mounted: bool, is_killed: bool, tally: Tally) -> None:
        """Two drivers at once, the second delivery between them, and the rows afterwards."""
        tables = self.folder / f"{number}" / "tables"
        tables.mkdir(parents=True)
        place, mount = str(tables), ""
        if is_mounted:
            place, mount = f"viewfs:///{LAKE}/tables", tables.parent.as_uri()
        first = replace(self.calm, tables=place, events=str(self.half), jobs=["run"], mount=mount)
        finished(first, self.folder)
        plans = [
            replace(first, events=str(self.whole)),
            replace(first, events=str(self.whole), jobs=[beside]),
        ]
        with ExitStack() as stack:
            both = [stack.enter_context(driver(plan, tables.parent)) for plan in plans]
            for process in both:
                assert process.stdout is not None
                process.stdout.readline()  # both have begun
            if is_killed:
                os.killpg(both[0].pid, signal.SIGKILL)
            for process in both[is_killed:]:
                judge(process, tables.parent, tally)
        tally.count("kills" if is_killed else "undisturbed")
        look(Tables(tables), tally)
        finished(replace(first, events=str(self.whole), jobs=["run", "retain", "run"]), self.folder)
        compare(self.expected, all_rows(Tables(tables)), tally)
        left = [path for path in tables.glob(f"*/{LOAD}-*") if path.is_dir()]
        if left and not is_killed:
            tally.breaks(f"{beside} beside run left {left[0].name}")


def judge(process: "subprocess.Popen[str]", folder: Path, tally: Tally) -> None:
    """A driver ends with 0, or with a sentence that says what to do."""
    process.communicate()
    said = (folder / "errors").read_text().splitlines()[-1:] if process.returncode else []
    if process.returncode and not any(sentence in "".join(said) for sentence in SENTENCES):
        tally.breaks(f"a driver ended with {process.returncode}: {''.join(said)[-300:]}")
    tally.count("started_again" if process.returncode else "ended_with_0")


def first_day_us(segments: list[Path]) -> int:
    """The midnight before the first event."""
    first_us = min(json.loads(path.read_bytes().splitlines()[0])["ts_us"] for path in segments)
    return int(first_us - first_us % DAY_US)
