"""A disk that is full while a job writes. `make crash` fills it for commands of every kind."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postroom.errors import Unavailable
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.spark.session import spark_errors
from tests.smalldisk import filled
from tests.smalldisk import small_disk as small_disk  # noqa: PLC0414 - a fixture
from tests.spark.conftest import TablesOf
from tests.spark.plainrows import all_rows, rows_of

LEFT = 400_000  # bytes: enough to begin


def test_a_job_succeeds_again_after_a_full_disk(
    spark: SparkSession, tables_of: TablesOf, small_disk: Path
) -> None:
    events, undisturbed = tables_of()
    tables = Tables(small_disk / "tables")
    job = Pipeline(spark, tables, gold={})
    with filled(small_disk, LEFT):
        with pytest.raises((Unavailable, OSError), match="No space left on device"), spark_errors():
            job.run(events)
        for name, rows in all_rows(tables).items():  # whatever is there is whole
            assert rows.total() == sum(file.rows for file in tables.files(name)), name
    job.run(events)
    assert {name: rows_of(undisturbed, name) for name in tables.names()} == all_rows(tables)
    assert "silver_spans" in tables.names()
