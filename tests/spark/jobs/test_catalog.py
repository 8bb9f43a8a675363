"""Tables in Spark's own catalog. A stand-in has the place of Delta's connector, which no pip package has."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from postroom.pipeline.spark.session import CONNECTOR_SETTINGS
from tests.spark.commands import Commands

DATABASE = "lake_of_postroom"
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]  # workers lack it


class StandIn(DataSource):
    """Knows the columns of a Delta table. Spark hands a Python source no path from which to read rows."""

    @classmethod
    def name(cls) -> str:
        return "delta"

    def schema(self) -> StructType:
        table = DeltaTable(self.options["path"].removeprefix("file:"))
        return StructType.fromJson(json.loads(table.schema().to_json()))


@pytest.fixture
def database(spark: SparkSession) -> Iterator[str]:
    yield DATABASE
    spark.sql(f"DROP DATABASE IF EXISTS {DATABASE} CASCADE")


def test_tables_and_plain_views_stand_in_the_catalog(
    spark: SparkSession, tmp_path: Path, database: str
) -> None:
    for name in ("bronze_rejects", "silver_messages"):
        write_deltalake(str(tmp_path / name), pa.table({"message_id": ["a", "b"]}))
    spark = spark.newSession()  # so that other tests do not find the stand-in
    commands = Commands(spark)
    words = ("register", "--tables", tmp_path, "--database", database)
    refused = commands(*words)
    assert refused.code == 2
    assert "tables need Delta's connector, which this Spark session does" in refused.stderr.splitlines()[-1]
    spark.dataSource.register(StandIn)
    done = commands(*words)
    assert done.code == 0, done.stderr
    assert [tuple(json.loads(line).values()) for line in done.stdout.splitlines()] == [
        (f"{database}.bronze_rejects", "table", str(tmp_path / "bronze_rejects"), True),
        (f"{database}.silver_messages", "table", str(tmp_path / "silver_messages"), True),
        (f"{database}.messages", "view", f"{database}.silver_messages", True),
    ]
    shown = {row["tableName"] for row in spark.sql(f"SHOW TABLES IN {database}").collect()}
    assert shown == {"bronze_rejects", "silver_messages", "messages"}
    assert spark.table(f"{database}.messages").columns == ["message_id"]
    assert not any(json.loads(line)["is_new"] for line in commands(*words).stdout.splitlines())


def test_a_session_without_the_jar_is_told_what_is_missing(spark: SparkSession, tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "silver_messages"), pa.table({"message_id": ["a"]}))
    spark = spark.newSession()
    spark.conf.set("spark.sql.catalog.spark_catalog", CONNECTOR_SETTINGS["spark.sql.catalog.spark_catalog"])
    refused = Commands(spark)("register", "--tables", tmp_path, "--database", DATABASE)
    assert refused.code == 2
    assert f"does not have: add its jar for Spark {spark.version}" in refused.stderr.splitlines()[-1]
