"""One Spark session for all tests of the pipeline and its commands, and tables that are made once."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from postroom.pipeline import paths
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.generator.generate import generate
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.spark.jvm import end_jvm
from postroom.pipeline.spark.session import DRIVER_OPTIONS, LOOPBACK, SMALL_SETTINGS, spark_session
from tests.spark import stories
from tests.spark.commands import Commands
from tests.spark.quick import QUICK, UNCOMPILED
from tests.spark.realhistory import RealHistory, lived
from tests.spark.stories import Story

MESSAGES, SEED = 1_500, 8  # of which the history with faults tells every kind of event
YOUNG = "-Xmn1300m"  # plans live shortly: few collections, each of which finds little
COMPILED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
"""What Spark does by itself."""
TablesOf = Callable[..., tuple[Path, Tables]]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    folder = tmp_path_factory.mktemp("spark")
    session = spark_session(
        "local[2]",
        conf={
            "spark.driver.memory": "2g",
            DRIVER_OPTIONS: f"{QUICK[DRIVER_OPTIONS]} {YOUNG}",
            "spark.local.dir": str(folder / "local"),
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            **SMALL_SETTINGS,  # thousands of small plans, each run once
            "spark.sql.shuffle.partitions": "2",  # rows of one key have to meet
            "spark.connect.grpc.binding.address": LOOPBACK,
            "spark.connect.grpc.binding.port": "0",
        },
    )
    yield session
    session.stop()
    end_jvm()  # `make test` counts the CPU time of processes that have ended


@pytest.fixture
def compiled(spark: SparkSession) -> Iterator[None]:
    """For a test with many rows: its plans are compiled, as outside of tests."""
    for name, value in COMPILED.items():
        spark.conf.set(name, value)
    yield
    for name, value in UNCOMPILED.items():
        spark.conf.set(name, value)


@pytest.fixture(scope="session")
def connect(spark: SparkSession) -> str:
    """The URL of a Spark Connect server, in the JVM of the tests. `make crash` has one of its own."""
    context: Any = spark.sparkContext
    services = context._jvm.org.apache.spark.sql.connect.service
    service = getattr(getattr(services, "SparkConnectService$"), "MODULE$")
    service.start(context._jsc.sc())
    return f"sc://{LOOPBACK}:{service.localPort()}"


@pytest.fixture(scope="session")
def tables_of(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> TablesOf:
    """A history and all of its tables. They are shared: whoever changes them makes a copy.

    Spark writes the files of the one without faults, as those of a large history. The others are small, as in
    most tests, and written through Arrow.
    """
    made: dict[bool, tuple[Path, Tables]] = {}

    def make(*, faults: bool = False) -> tuple[Path, Tables]:
        if faults not in made:
            folder = tmp_path_factory.mktemp("history")
            generate(folder / "events", MESSAGES, SEED, faults=faults)
            tables = Tables(folder / "tables")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(paths, "SMALL_BYTES", paths.SMALL_BYTES * faults)
                Pipeline(spark, tables).run(folder / "events")
            made[faults] = (folder / "events", tables)
        return made[faults]

    return make


@pytest.fixture(scope="session")
def story(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Small stories with a known end, and the tables after each of their deliveries."""
    return stories.told(spark, tmp_path_factory.mktemp("stories"))


@pytest.fixture(scope="session")
def real_history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealHistory]:
    """Events of all contracts, by real parts."""
    history = lived(tmp_path_factory.mktemp("real"))
    yield history
    history.world.engine.close()


@pytest.fixture(scope="session")
def commands(spark: SparkSession) -> Commands:
    """Runs `postroom pipeline …`."""
    return Commands(spark)
