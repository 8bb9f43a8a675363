"""The same job on a cluster of two workers, whose Python has no postroom."""

from pathlib import Path

from pyspark.sql import SparkSession

from tests.spark.cluster import do_on_workers, standalone_in
from tests.spark.conftest import TablesOf
from tests.spark.plainrows import all_rows, rows_of


def test_two_workers_without_postroom_make_the_same_tables(
    spark: SparkSession, tables_of: TablesOf, tmp_path: Path
) -> None:
    """Bronze and silver; `make crash` has every job, and compares every table of a larger history."""
    events, here = tables_of()
    with standalone_in(spark, tmp_path) as master:
        made = all_rows(do_on_workers(master, tmp_path, f"silver:{events}").tables)
    assert set(made) == {name for name in here.names() if name.startswith(("bronze_", "silver_"))}
    assert made == {name: rows_of(here, name) for name in made}
