"""One Spark session for all tests of the pipeline, and tables that are made once for all who read them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postroom.pipeline.generate import generate
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.session import SETTINGS, spark_session
from postroom.pipeline.tables import Tables

QUICK_COMPILER = "-XX:TieredStopAtLevel=1"
TablesOf = Callable[..., tuple[Path, Tables]]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    folder = tmp_path_factory.mktemp("spark")
    session = spark_session(
        "local[2]",
        conf={
            "spark.driver.memory": "1g",
            # A test compiles much and runs little: the quick compiler is enough.
            "spark.driver.extraJavaOptions": f"{SETTINGS['spark.driver.extraJavaOptions']} {QUICK_COMPILER}",
            "spark.local.dir": str(folder / "local"),
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.sql.shuffle.partitions": "2",
        },
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def tables_of(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> TablesOf:
    """A history and its bronze and silver tables. They are shared: whoever changes them makes a copy."""
    made: dict[tuple[int, int, bool], tuple[Path, Tables]] = {}

    def make(messages: int, seed: int, faults: bool = False) -> tuple[Path, Tables]:
        key = (messages, seed, faults)
        if key not in made:
            folder = tmp_path_factory.mktemp("history")
            generate(folder / "events", messages, seed, faults=faults)
            tables = Tables(folder / "tables")
            Pipeline(spark, tables, gold={}).run(folder / "events")
            made[key] = (folder / "events", tables)
        return made[key]

    return make


QUICK = ("test_bronze.py", "test_silver.py", "test_tables.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts sessions, commands or clusters of its own takes minutes, and is asked for by its mark."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name not in QUICK:
            item.add_marker(pytest.mark.long)
