"""Commands that start in half the time: a JVM does what they do, and archives the classes that it took.

Rule: an archive has its name when it is complete. Whoever is killed half way has changed nothing.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, Final

import msgspec
from pyspark.sql import SparkSession

from postroom.errors import Unavailable
from postroom.pipeline.archive import cache, found, making_archive, name_of
from postroom.pipeline.check import check
from postroom.pipeline.generate import generate
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.report import write_report
from postroom.pipeline.session import DRIVER_OPTIONS, SETTINGS, spark_errors, spark_session
from postroom.pipeline.tables import Tables
from postroom.system.atomic import make_folder

MESSAGES: Final = 50  # of the history that it is made with: the classes count, and not the rows
WRITE_TIMEOUT_S: Final = 300.0
QUERY: Final = "SELECT outcome, count(*) AS n FROM silver_messages GROUP BY outcome ORDER BY n"

Work = Callable[[SparkSession, Path], None]
"""Something that takes the classes of commands, in a folder of its own."""


class Prepared(msgspec.Struct, frozen=True):
    """An archive, and whether it was made just now."""

    archive: str
    bytes: int
    is_new: bool
    seconds: float


def as_commands_do(spark: SparkSession, folder: Path) -> None:
    """What `run`, `sql`, `check` and `report` do, with a tiny history."""
    generate(folder / "events", MESSAGES, 1)
    job = Pipeline(spark, Tables(folder / "tables"))
    job.run(folder / "events")
    list(job.answers(QUERY))
    check(*(job.tables.read(spark, name) for name in ("bronze_events", "silver_events")))
    write_report(spark, job.tables, folder / "report.html", None)


def prepare(work: Work, *, anew: bool = False, progress: Callable[[str], None] = lambda _: None) -> Prepared:
    """Make the archive of this Java and this Spark, if there is none. It ends the session of this process."""
    began = time.monotonic()
    target = None if anew else found()
    is_new = target is None
    if target is None:
        target = _made(work, progress)
    return Prepared(str(target), target.stat().st_size, is_new, time.monotonic() - began)


def _made(work: Work, progress: Callable[[str], None]) -> Path:
    make_folder(cache(), "os")
    with tempfile.TemporaryDirectory(dir=cache()) as folder:
        made = Path(folder) / "made.jsa"
        progress("starting Spark, to see which classes it takes")
        _leave_behind(made, work, Path(folder), progress)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        earlier = list(cache().glob(name_of("*")))
        target = made.replace(cache() / name_of(made.stat().st_size))
    for path in {*earlier} - {target}:
        path.unlink(missing_ok=True)  # who runs with it keeps it until the end
    return target


def _leave_behind(made: Path, work: Work, folder: Path, progress: Callable[[str], None]) -> None:
    spark = spark_session(conf={DRIVER_OPTIONS: SETTINGS[DRIVER_OPTIONS] + making_archive(made)})
    gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 - nothing else ends a JVM and waits for it
    try:
        with spark_errors():
            progress("a small history, from its lines to a report")
            work(spark, folder)
    finally:
        spark.stop()
        progress("writing the archive")
        gateway.shutdown()
        gateway.proc.stdin.close()
    try:
        gateway.proc.wait(WRITE_TIMEOUT_S)
    except TimeoutExpired:
        gateway.proc.kill()
    if gateway.proc.returncode != 0 or not made.exists():
        raise Unavailable(
            "this JVM wrote no archive of its classes: some cannot, and none does if Spark has a folder of"
            " settings in its path; everything works without it"
        )
