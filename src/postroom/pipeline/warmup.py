"""Makes the archive of classes: runs the commands in one JVM, which writes the classes that it loaded.

Rule: an archive gets its name when it is complete. A process that is killed before changes nothing.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any, Final

import msgspec
from pyspark.sql import SparkSession

from postroom.errors import Unavailable
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.generator.generate import generate
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.spark.class_archive import cache, found, making_archive, name_of
from postroom.pipeline.spark.session import DRIVER_OPTIONS, SETTINGS, spark_errors, spark_session
from postroom.system.atomic import make_folder
from postroom.system.lock import alone

MESSAGES: Final = 50  # of the history; its size has no effect on the classes
WRITE_TIMEOUT_S: Final = 300.0
MAKING: Final = "making"  # a folder of the cache
LOCK: Final = "making.lock"

Work = Callable[[SparkSession, Path], None]
"""Loads the classes of the commands, with files in a folder."""


class PreparedArchive(msgspec.Struct, frozen=True):
    """An archive, and whether it was made just now."""

    archive: str
    bytes: int
    is_new: bool
    seconds: float


def as_commands_do(spark: SparkSession, folder: Path) -> None:
    """Run `run` on a tiny history."""
    generate(folder / "events", MESSAGES, 1)
    Pipeline(spark, Tables(folder / "tables")).run(folder / "events")


def prepare(
    work: Work, *, anew: bool = False, progress: Callable[[str], None] = lambda _: None
) -> PreparedArchive:
    """Make the archive of this Java and this Spark, if there is none. Ends the session of this process."""
    began = time.monotonic()
    target = None if anew else found()
    is_new = target is None
    if target is None:
        with _alone():
            target = _made(work, progress)
    return PreparedArchive(str(target), target.stat().st_size, is_new, time.monotonic() - began)


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock of the cache. Files of a killed process are deleted."""
    make_folder(cache(), "os")
    with alone(cache() / LOCK, f"another command makes an archive in {cache()}: wait until it is done"):
        shutil.rmtree(cache() / MAKING, ignore_errors=True)
        (cache() / MAKING).mkdir()
        try:
            yield
        finally:
            shutil.rmtree(cache() / MAKING, ignore_errors=True)


def _made(work: Work, progress: Callable[[str], None]) -> Path:
    folder = cache() / MAKING
    made = folder / "made.jsa"
    progress("starting Spark, to see which classes it takes")
    _leave_behind(made, work, folder, progress)
    with made.open("rb") as file:
        os.fsync(file.fileno())
    earlier = set(cache().glob(name_of("*")))
    target = made.replace(cache() / name_of(made.stat().st_size))
    for path in earlier - {target}:
        path.unlink(missing_ok=True)  # a running JVM keeps its mapping
    return target


def _leave_behind(made: Path, work: Work, folder: Path, progress: Callable[[str], None]) -> None:
    spark = spark_session(conf={DRIVER_OPTIONS: SETTINGS[DRIVER_OPTIONS] + making_archive(made)})
    gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 - the only way to wait for the end of the JVM
    jvm: Popen[bytes] = gateway.proc
    try:
        with spark_errors():
            progress("a small history, from its lines to a query of its tables")
            work(spark, folder)
            progress("writing the archive")
            spark.stop()
        gateway.shutdown()
        jvm.communicate(timeout=WRITE_TIMEOUT_S)  # it ends when its input is closed
    except TimeoutExpired:
        pass  # reported below
    finally:
        jvm.kill()
        jvm.wait()
    if jvm.returncode != 0 or not made.exists():
        raise Unavailable(
            "this JVM wrote no archive of its classes: the disk may be full, some cannot, and none does if"
            " Spark has a folder of settings in its path; everything works without it"
        )
