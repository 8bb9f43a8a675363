"""The speed of the pipeline on Spark, with DuckDB and Polars beside it on the same files.

python bench/bench_pipeline.py [--events 5000000] [--scale 1.0] [--batches 20] [--repeats 3] [--only PART]

Parts: bronze, fold, gold, stream, increment, growth, cold, answer, small, driver. `increment` adds a million
events to `--batches` of a million each. `--scale` shrinks these and the 20 million of `growth`; `cold` and
`answer` always have a million, `small` has 500, and `driver` reads logs without events. Each time is printed
with the CPU seconds of all cores, and the time that the host has stolen.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import duckdb
from figures import Figure, Goal, Report, machine, readable, run
from pipelinebench import peers
from pipelinebench.histories import Piece, add, history, pieces
from pipelinebench.spending import Spent, median, spent, spent_by

from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.ingest.bronze_writer import write_segments
from postroom.pipeline.ingest.segments import SegmentStream
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.schedule import run_in_order
from postroom.pipeline.silver import tables as silver
from postroom.pipeline.spark.class_archive import CACHE
from postroom.pipeline.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from postroom.pipeline.follow.refresh import Table

EVENTS = 5_000_000
MILLION = 1_000_000
LONG = 20 * MILLION
BATCHES, REPEATS = 20, 3
MICROS_PER_S = 1_000_000
TABLES_AT_ONCE = 3
FOLD_MAX, FOLD_STRETCH = 5.0, 3.5  # times DuckDB
BRONZE_MAX = 4.0
BRONZE_PER_S = 120_000
STREAM_PER_S = 100_000
INCREMENT_MAX = 1.15
GROWTH_MAX = 1.3
COLD_S_MAX = 90.0
SMALL_EVENTS = 500
DRIVER_DAYS = (1, 10, 100)
DRIVER_S_MAX, DRIVER_BYTES_MAX = 3.0, 500e6
SMALL_S_MAX, SMALL_CPU_S_MAX = 15.0, 30.0
COMMAND = [sys.executable, "-m", "postroom.cli.main", "pipeline"]
QUERY = "SELECT outcome, count(*) AS n FROM silver_messages GROUP BY outcome"


class Bench:
    """The folder of a run, its session, and the sizes."""

    def __init__(
        self,
        folder: Path,
        *,
        events: int = EVENTS,
        scale: float = 1.0,
        batches: int = BATCHES,
        repeats: int = REPEATS,
        spark: "SparkSession | None" = None,
        gold: "Mapping[str, Table]" = GOLD,
    ) -> None:
        """`gold` are the gold tables of `increment`."""
        self.folder = folder
        self.events = events
        self.scale = scale
        self.batches = batches
        self.repeats = repeats
        self.gold = gold
        self._spark = spark
        self._built: Tables | None = None

    @property
    def spark(self) -> "SparkSession":
        if self._spark is None:
            self._spark = spark_session()
        return self._spark

    def stop(self) -> None:
        if self._spark is not None:
            self._spark.stop()
            self._spark = None

    def built(self) -> Tables:
        """The bronze and silver tables of the history, built once."""
        if self._built is None:
            self._built = Tables(self.folder / "built")
            Pipeline(self.spark, self._built, gold={}).run(history(self.folder, self.events))
        return self._built

    def event_files(self) -> list[Path]:
        tables = self.built()
        return [tables.folder / "silver_events" / file.path for file in tables.files("silver_events")]

    def turns(
        self, *works: Callable[[Path], object], check: Callable[[Path], None] = lambda _: None
    ) -> list[list[Spent]]:
        """The time of each work in each repeat. They alternate, each with a new folder for its output.

        The output is checked after the clock has stopped.
        """
        takes: list[list[Spent]] = [[] for _ in works]
        for _ in range(self.repeats):
            for work, taken in zip(works, takes, strict=True):
                with tempfile.TemporaryDirectory(dir=self.folder) as out:
                    taken.append(spent(partial(work, Path(out))))
                    check(Path(out))
        return takes


# ---- beside DuckDB and Polars ---------------------------------------------------------------------------


def compared(
    name: str, events: int, takes: list[list[Spent]], goals: list[Goal], *, stretch: float | None = None
) -> Iterator[Figure]:
    """Ours beside DuckDB, and Polars where it was measured. Spark compiles code during its first take."""
    ours, ducks, *others = takes
    cold, warm = ours[0], median(ours[1:] or ours)
    duck = median(ducks)
    beside = f"DuckDB {duck}" + "".join(f"; Polars {median(other)}" for other in others)
    ratio = warm.wall_s / duck.wall_s
    yield Figure(f"{name}, warm", warm.wall_s, f"s, {warm.cores()}", beside, ratio, goals)
    if stretch is not None:
        yield Figure(f"{name}, warm, stretch", ratio, "times DuckDB", goals=[Goal("value", "<=", stretch)])
    yield Figure(f"{name}, first take", cold.wall_s, f"s, {cold.cores()}")
    yield Figure(
        f"{name}, rate", events / warm.wall_s, "events/s", f"DuckDB {readable(events / duck.wall_s)}"
    )


def to_bronze(bench: Bench) -> Iterator[Figure]:
    folder = history(bench.folder, bench.events).absolute()
    stream = SegmentStream(folder)
    segments = stream.segments()
    paths = [folder / segment.name for segment in segments]

    def ours(out: Path) -> None:
        tables = Tables(out)
        tables.commit("bronze_events", write_segments(bench.spark, tables, stream, segments).staged)

    takes = bench.turns(
        ours,
        lambda out: peers.duckdb_bronze(paths, out / "lines"),
        lambda out: peers.polars_bronze(paths, out / "lines.parquet"),
    )
    *figures, rate = compared("JSON to bronze", bench.events, takes, [Goal("ratio", "<=", BRONZE_MAX)])
    yield from figures
    goals = [Goal("value", ">=", BRONZE_PER_S)]
    yield Figure(rate.name, rate.value, rate.unit, rate.against, goals=goals)


def fold(bench: Bench) -> Iterator[Figure]:
    files = bench.event_files()
    tables = bench.built()

    def ours(out: Path) -> None:
        folded = silver.messages(tables.read(bench.spark, "silver_events"))
        Tables(out).append("messages", folded, partition_by=("day",))

    def duck(out: Path) -> None:
        with duckdb.connect() as con:
            peers.duckdb_fold(con, files, out / "messages.parquet")

    known: list[dict[str, tuple[int, int]]] = []

    def same(out: Path) -> None:
        known.append(peers.outcomes(sorted(out.rglob("*.parquet"))))
        if known[0] != known[-1]:
            raise SystemExit(f"the folds differ: {known[0]} and {known[-1]}")

    takes = bench.turns(
        ours, duck, lambda out: peers.polars_fold(files, out / "messages.parquet"), check=same
    )
    yield from compared(
        "fold, one row a message", bench.events, takes, [Goal("ratio", "<=", FOLD_MAX)], stretch=FOLD_STRETCH
    )


def fold_and_gold(bench: Bench) -> Iterator[Figure]:
    files = bench.event_files()
    events = bench.built()

    def ours(out: Path) -> None:
        tables = Tables(out)

        def read(name: str) -> "DataFrame":
            return (events if name == "silver_events" else tables).read(bench.spark, name)

        def make(name: str) -> None:
            if name == "silver_messages":
                tables.append(name, silver.messages(read("silver_events")), partition_by=("day",))
            else:
                table = GOLD[name]
                # As the jobs do when every event has the type of its message.
                inputs = table.inputs if table.change is None else table.inputs[:1]
                tables.append(name, table.build(*map(read, inputs)), partition_by=table.partition_by)

        run_in_order(
            {"silver_messages": (), **{name: GOLD[name].inputs for name in peers.SUMS}}, make, TABLES_AT_ONCE
        )

    takes = bench.turns(ours, partial(peers.duckdb_gold, files))
    yield from compared(
        f"fold and {len(peers.SUMS)} gold tables", bench.events, takes, [Goal("ratio", "<=", FOLD_MAX)]
    )


# ---- ours alone -----------------------------------------------------------------------------------------


def stream(bench: Bench) -> Iterator[Figure]:
    """From the start of the stream to the commit of bronze. The folds have figures of their own."""
    events = history(bench.folder, bench.events)
    rates, wholes = [], []
    for _ in range(bench.repeats):
        with tempfile.TemporaryDirectory(dir=bench.folder) as out:
            taken = _Ingested()
            job = Pipeline(bench.spark, Tables(Path(out)), gold={}, progress=taken.report)
            wholes.append(spent(partial(job.stream, events)))
            rates.append(bench.events / taken.wall_s)
            peers.need_exact(Path(out) / "silver_events", events)
    rate = sorted(rates)[len(rates) // 2]
    beside = f"with the folds: {median(wholes)}"
    yield Figure("streaming ingest", rate, "rows/s", beside, goals=[Goal("value", ">=", STREAM_PER_S)])


class _Ingested:
    """Measures bronze by the progress of a stream: bronze is committed when silver begins."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self.wall_s = 0.0
        self._ingesting_since: float | None = self._begun

    def report(self, text: str) -> None:
        now = time.perf_counter()
        if text.startswith("silver_events") and self._ingesting_since is not None:
            self.wall_s += now - self._ingesting_since
            self._ingesting_since = None
        elif text.startswith("bronze") and self._ingesting_since is None:
            self._ingesting_since = now


def cold(bench: Bench) -> Iterator[Figure]:
    """The whole command, from the start of Python to the end of the JVM: without and with the archive."""
    events = history(bench.folder, MILLION)
    bench.stop()
    for name in ("cold", "cold, prepared"):
        with own_cache(bench):
            if name != "cold":
                made = spent_by([*COMMAND, "prepare"])
                yield Figure("postroom pipeline prepare", made.wall_s, "s", made.cores())
            takes = []
            for _ in range(bench.repeats):
                with tempfile.TemporaryDirectory(dir=bench.folder) as out:
                    paths = ["--events", str(events), "--tables", f"{out}/tables"]
                    takes.append(spent_by([*COMMAND, "run", *paths]))
        taken = median(takes)
        yield Figure(
            f"postroom pipeline run, 1M events, {name}",
            taken.wall_s,
            "s",
            taken.cores(),
            goals=[Goal("value", "<", COLD_S_MAX)],
        )


def answer(bench: Bench) -> Iterator[Figure]:
    """From a query to its rows, with the start of Python."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder:
        events = history(bench.folder, MILLION)
        bench.stop()
        spent_by([*COMMAND, "run", "--events", str(events), "--tables", folder])
        command = [*COMMAND, "sql", "--tables", folder, QUERY]
        taken = median([spent_by(command) for _ in range(bench.repeats)])
        yield Figure("postroom pipeline sql, 1M events", taken.wall_s, "s", taken.cores())


def small(bench: Bench) -> Iterator[Figure]:
    """The whole command over a few events, which is start and planning: without the archive."""
    events = history(bench.folder, SMALL_EVENTS)
    bench.stop()
    takes = []
    with own_cache(bench):
        for _ in range(bench.repeats):
            with tempfile.TemporaryDirectory(dir=bench.folder) as out:
                takes.append(
                    spent_by([*COMMAND, "run", "--events", str(events), "--tables", f"{out}/tables"])
                )
    taken = median(takes)
    name = f"postroom pipeline run, {SMALL_EVENTS} events"
    yield Figure(name, taken.wall_s, "s", goals=[Goal("value", "<=", SMALL_S_MAX)])
    yield Figure(f"{name}, CPU", taken.cpu_s, "CPU s", goals=[Goal("value", "<=", SMALL_CPU_S_MAX)])


@contextmanager
def own_cache(bench: Bench) -> Iterator[None]:
    """An empty cache for the archive of classes."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as folder, patch.dict(os.environ, {CACHE: folder}):
        yield


def increment(bench: Bench) -> Iterator[Figure]:
    """The last piece of a history, after all others and after none. Each piece had its own run."""
    count = bench.batches + 1
    size = int(MILLION * bench.scale) * count
    *before, last = pieces(history(bench.folder, size), bench.folder / "pieces", count)
    long, short = bench.folder / "long", bench.folder / "short"
    for folder in (long, short):
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run whose folder was kept
    job = Pipeline(bench.spark, Tables(long / "tables"), gold=bench.gold)
    known = 0
    for piece in before:
        add(piece, long / "events")
        known += piece.lines
        _ingest(job, long / "events", piece, known)
    for folder in (long, short):
        add(last, folder / "events")
    takes = [(_added(bench, long, known, last), _added(bench, short, 0, last)) for _ in range(bench.repeats)]
    on_long, on_none = (median(column) for column in zip(*takes, strict=True))
    yield Figure(
        f"{last.lines:,} events added to {known:,} of {len(before)} batches",
        on_long.wall_s,
        f"s, {on_long.cores()}",
        f"added to nothing: {on_none}",
        on_long.wall_s / on_none.wall_s,
        [Goal("ratio", "<=", INCREMENT_MAX)],
    )


def _added(bench: Bench, folder: Path, known: int, new: Piece) -> Spent:
    """The time to refresh a copy of the tables, which have `known` lines, with a new piece."""
    with tempfile.TemporaryDirectory(dir=bench.folder) as out:
        tables = Tables(Path(out) / "tables")
        if (folder / "tables").exists():
            shutil.copytree(folder / "tables", tables.folder, copy_function=os.link)
        job = Pipeline(bench.spark, tables, gold=bench.gold)
        return spent(partial(_ingest, job, folder / "events", new, known + new.lines))


def _ingest(job: Pipeline, events: Path, new: Piece, rows: int) -> None:
    """Ingest one piece, after which bronze has so many rows."""
    done = job.run(events)
    assert (done.segments, done.rows.get("bronze_events")) == (len(new.segments), rows), done


def growth(bench: Bench) -> Iterator[Figure]:
    """A whole run over a short and over a long history. The first one, which compiles, does not count."""
    short, long = int(MILLION * bench.scale), int(LONG * bench.scale)
    takes = {}
    for size in (short, short, long):
        events = history(bench.folder, size)
        with tempfile.TemporaryDirectory(dir=bench.folder) as out:
            job = Pipeline(bench.spark, Tables(Path(out)))
            takes[size] = spent(partial(job.run, events))
    per_event_us = {size: taken.wall_s / size * MICROS_PER_S for size, taken in takes.items()}
    yield Figure(
        f"an event of {long:,}, everything",
        per_event_us[long],
        f"µs; all {takes[long]}",
        f"of {short:,}: {readable(per_event_us[short])} µs; all {takes[short]}",
        per_event_us[long] / per_event_us[short],
        [Goal("ratio", "<=", GROWTH_MAX)],
    )


def driver(_: Bench) -> Iterator[Figure]:
    """What the driver spends on logs and segments, by the length of the history. No Spark starts."""
    script = Path(__file__).with_name("pipelinebench") / "longlogs.py"
    takes = {}
    for days in DRIVER_DAYS:
        done = subprocess.run([sys.executable, script, str(days)], check=True, capture_output=True, text=True)
        takes[days] = json.loads(done.stdout)
    short, long = min(takes), max(takes)
    limits = {"s": DRIVER_S_MAX, "cpu_s": DRIVER_S_MAX, "bytes": DRIVER_BYTES_MAX}
    for key, most in limits.items():
        yield Figure(
            f"nothing new, {long} days of 1,000 files",
            takes[long][key],
            key.replace("cpu_s", "CPU s"),
            f"{short} day: {readable(takes[short][key])}",
            takes[long][key] / takes[short][key],
            [Goal("value", "<=", most)],
        )
    parts = {
        "segments_cpu_s": "the search for new segments",
        "run_cpu_s": "logs of a run with new rows",
        "open_cpu_s": "one opening of silver_events",
        "commit_cpu_s": "one commit to silver_events",
    }
    for key, what in parts.items():
        yield Figure(
            f"{what}, {long} days of 1,000 files",
            takes[long][key],
            "CPU s",
            f"{short} day: {readable(takes[short][key])}",
            takes[long][key] / takes[short][key],
        )


PARTS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "bronze": to_bronze,
    "fold": fold,
    "gold": fold_and_gold,
    "stream": stream,
    "increment": increment,
    "growth": growth,
    "cold": cold,
    "answer": answer,
    "small": small,
    "driver": driver,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=EVENTS, help="in the history of the first parts")
    parser.add_argument("--scale", type=float, default=1.0, help="of the long history, 1 is 20 million")
    parser.add_argument("--batches", type=int, default=BATCHES, help="before the one that `increment` adds")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--only", action="append", choices=list(PARTS), help="may be repeated")
    parser.add_argument("--keep", type=Path, help="a folder for the histories, which stay")
    options = parser.parse_args()
    report = Report(f"The pipeline on {machine()}, {options.events:,} events")
    report.begin()
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        bench = Bench(
            options.keep or Path(folder),
            events=options.events,
            scale=options.scale,
            batches=options.batches,
            repeats=options.repeats,
        )
        try:
            for name in options.only or PARTS:
                for figure in PARTS[name](bench):
                    report.add(figure)
        finally:
            bench.stop()
    report.end()


if __name__ == "__main__":
    run(main)
