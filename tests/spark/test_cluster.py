"""The same job on a cluster of two workers, whose Python has no postroom."""

from pathlib import Path

from pyspark.sql import SparkSession

from postroom.pipeline.generate import generate
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.tables import Tables
from tests.spark.cluster import run_on_cluster
from tests.spark.plainrows import all_rows

MESSAGES, SEED = 100, 12


def test_two_workers_without_postroom_make_the_same_tables(spark: SparkSession, tmp_path: Path) -> None:
    """Bronze and silver of a small history; `make crash` compares every table of a larger one."""
    generate(tmp_path / "events", MESSAGES, SEED)
    local = Tables(tmp_path / "local")
    Pipeline(spark, local, gold={}).run(tmp_path / "events")
    made = run_on_cluster(tmp_path, tmp_path / "events", "silver")
    assert all_rows(made) == all_rows(local)
