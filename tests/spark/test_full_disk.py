"""A disk that is full: each job says so in one sentence, loses nothing, and goes on when there is room."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from postroom.pipeline.retain import DAY_US
from postroom.pipeline.tables import Tables
from tests.smalldisk import small_disk as small_disk  # noqa: PLC0414 - a fixture
from tests.spark.commands import Commands, Done, in_its_own_process
from tests.spark.conftest import TablesOf
from tests.spark.plainrows import all_rows, records

FULL = "No space left on device"
LEFT_TO_RUN, LEFT_TO_RETAIN = 400_000, 30_000  # bytes: enough to begin


@contextmanager
def filled(disk: Path, left: int) -> Iterator[None]:
    """While so many bytes are left."""
    there = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes(there.f_bavail * there.f_frsize - left))
    try:
        yield
    finally:
        (disk / "ballast").unlink()


def assert_one_sentence(done: Done) -> None:
    assert done.code == 1, done
    assert FULL in done.stderr.splitlines()[-1], done.stderr
    others = [line for line in done.stderr.splitlines()[:-1] if " s  " not in line]  # without the progress
    assert not [line for line in others if "Exception" in line or "\tat " in line], done.stderr


def assert_whole(tables: Tables) -> None:
    for name, rows in all_rows(tables).items():
        assert rows.total() == sum(file.rows for file in tables.files(name)), name


def test_jobs_that_meet_a_full_disk_are_simply_given_again(
    tables_of: TablesOf, commands: Commands, small_disk: Path
) -> None:
    events, undisturbed = tables_of()
    tables = Tables(small_disk / "tables")
    where = ("--tables", tables.folder, "--master", "local[2]", "--conf", "spark.sql.shuffle.partitions=2")
    with filled(small_disk, LEFT_TO_RUN):
        for call, job in ((commands, "run"), (in_its_own_process, "stream")):
            assert_one_sentence(call(job, "--events", events, *where))
            assert_whole(tables)
    assert commands("run", "--events", events, *where).code == 0
    assert all_rows(tables) == all_rows(undisturbed)

    times = sorted(row["last_us"] for row in records(tables, "silver_messages"))
    keep_days = (time.time_ns() // 1000 - times[len(times) // 2]) // DAY_US
    retain = ("retain", *where, "--keep-days", keep_days)
    with filled(small_disk, LEFT_TO_RETAIN):
        assert_one_sentence(commands(*retain))
        assert_whole(tables)
    assert commands(*retain).code == 0
    kept = [row["last_us"] for row in records(tables, "silver_messages")]
    assert 0 < len(kept) < len(times)
