"""Two drivers on the same tables, each a process with its own JVM. `make crash` has all pairs, above 8 MB."""

import os
import signal
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postroom.pipeline import paths
from postroom.pipeline.delta.tables import LOAD, Tables
from postroom.pipeline.generator.generate import generate
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.status import keep_house
from tests.crash.ledger import Tally
from tests.crash.pipelinedrivers import judge
from tests.crash.pipelinejob import LAKE, Plan
from tests.crash.pipelining import driver
from tests.spark.comparison import differing
from tests.spark.plainrows import all_rows

FEW = ["gold_flow", "gold_depth"]


def test_killed_driver_and_the_one_beside_it_leave_the_rows_of_the_oracle(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark writes all files, behind a mount. What a killed load has left is not seen."""
    generate(tmp_path / "events", 120, 4)
    place = f"viewfs:///{LAKE}/tables"
    plan = Plan(place, str(tmp_path / "events"), ["run"], mount=tmp_path.as_uri(), gold=FEW, by_spark=True)
    tally = Tally()
    with driver(plan, tmp_path) as killed, driver(plan, tmp_path) as other:
        for process in (killed, other):
            assert process.stdout is not None
            process.stdout.readline()  # both have begun
        os.killpg(killed.pid, signal.SIGKILL)
        judge(other, tmp_path, tally)
    assert tally.ok, tally.broken
    monkeypatch.setattr(paths, "SMALL_BYTES", 0)
    tables = Tables(tmp_path / "tables")
    left = tables.folder / "silver_messages" / f"{LOAD}-killed" / "day=2025-01-05"
    left.mkdir(parents=True)
    (left / "part-0.parquet").write_bytes(b"half a file")
    Pipeline(spark, tables, gold={name: GOLD[name] for name in FEW}).run(tmp_path / "events")
    assert differing(tables, tmp_path / "events") == []
    before = all_rows(tables)
    keep_house(tables, compact=True, vacuum=True, progress=lambda _: None)
    assert all_rows(tables) == before
    assert left.exists()  # it may be of a running job, and is deleted after a week


def test_vacuum_deletes_what_killed_loads_left(tmp_path: Path, spark: SparkSession) -> None:
    tables = Tables(tmp_path)
    tables.append("t", spark.range(3).toDF("n"))
    left = tmp_path / "t" / f"{LOAD}-killed" / "part-0.parquet"
    left.parent.mkdir()
    left.write_bytes(b"half a file")
    week_ago_s = left.stat().st_mtime - 8 * 86_400
    os.utime(left, (week_ago_s, week_ago_s))
    assert [Path(path).name for path in tables.vacuum("t")] == [left.name]
    assert not left.exists()
    assert tables.row_count("t") == 3
