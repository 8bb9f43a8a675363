"""The declarative pipeline: its project loads, and its definitions make the tables that the jobs make.

`make crash` has `spark-pipelines` make them, which takes minutes: see `declarative-pipeline`.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.pipelines.flow import Flow
from pyspark.pipelines.graph_element_registry import (
    GraphElementRegistry,
    graph_element_registration_context,
)
from pyspark.pipelines.output import Output
from pyspark.sql import DataFrame, SparkSession

from postroom.audit.layout import CHAIN
from postroom.errors import InvalidSetting
from postroom.pipeline.declarative import (
    CONF_FOLDER,
    CONF_NAME,
    EVENTS_SETTING,
    LEVEL_SETTING,
    QUERYING,
    SEGMENTS,
    define,
    hashed,
    main,
    view_of,
    write_project,
)
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.ingest import bronze
from postroom.pipeline.schema import EVENTS
from tests.spark.conftest import TablesOf
from tests.spark.rows.test_redaction_marks import RAW, claim_redacted
from tests.spark.segmentfiles import sealed_segments
from tests.spark.stories import happened


class Registry(GraphElementRegistry):
    """Keeps what is defined, as Spark's own does before it runs anything."""

    def __init__(self) -> None:
        self.outputs: dict[str, Output] = {}
        self.flows: dict[str, Flow] = {}

    def register_output(self, output: Output) -> None:
        self.outputs[output.name] = output

    def register_flow(self, flow: Flow) -> None:
        self.flows[flow.target] = flow

    def register_auto_cdc_flow(self, flow: Any) -> None:
        raise AssertionError(flow)

    def register_sql(self, sql_text: str, file_path: Path) -> None:
        raise AssertionError(sql_text, file_path)


@pytest.fixture
def configured(spark: SparkSession, tables_of: TablesOf) -> Iterator[SparkSession]:
    spark.conf.set(EVENTS_SETTING, str(tables_of()[0]))
    yield spark
    spark.conf.unset(EVENTS_SETTING)


def test_a_project_defines_the_tables(configured: SparkSession, tmp_path: Path) -> None:
    """Its definitions file is run as `spark-pipelines` runs it: with the session as a global name."""
    spec = write_project(tmp_path / "project", tmp_path)
    told = yaml.safe_load(spec.read_text())
    assert told["configuration"][EVENTS_SETTING] == str(tmp_path)
    settings = (spec.parent / CONF_FOLDER / CONF_NAME).read_text()
    assert f"\nspark.sql.warehouse.dir  {tmp_path}/project/tables\n" in settings
    assert f"databaseName={tmp_path}/project/catalog;" in settings
    registry = Registry()
    for entry in told["libraries"]:
        for file in spec.parent.glob(entry["glob"]["include"] + "/*"):
            with graph_element_registration_context(registry):
                exec(file.read_text(), {"spark": configured})  # noqa: S102 - that is what the program does
    silver = {"silver_events", "silver_messages", "silver_attempts"}
    assert {"lines", "bronze_events", SEGMENTS, *silver} < set(registry.outputs)
    assert set(registry.outputs) == set(registry.flows)
    missing = set(GOLD) - set(registry.outputs)
    assert missing == {name for name, table in GOLD.items() if QUERYING & {name, *table.inputs}}


def test_spark_takes_every_definition(tables_of: TablesOf, connect: str, tmp_path: Path) -> None:
    """Its own program, at a server. It refuses a definition that so much as asks which columns rows have."""
    history, _ = tables_of()
    spec = write_project(tmp_path / "project", history)
    done = subprocess.run(
        [sys.executable, "-m", "pyspark.pipelines.cli", "dry-run", "--spec", spec],
        env={**os.environ, "SPARK_REMOTE": connect},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Run is COMPLETED" in done.stdout + done.stderr


def defined(spark: SparkSession, rows: DataFrame, folder: Path) -> dict[str, Flow]:
    """The definitions over a folder, and views of what its bronze tables would have."""
    registry = Registry()
    with graph_element_registration_context(registry):
        define(spark)
    stored = rows.select(*EVENTS.names, "segment", "date")  # there is no column of marks
    stored.createOrReplaceTempView(view_of("bronze_events"))
    hashed(spark.read, str(folder)).createOrReplaceTempView(view_of(SEGMENTS))
    return registry.flows


def test_definitions_make_the_rows_that_the_jobs_make(configured: SparkSession, tables_of: TablesOf) -> None:
    folder, tables = tables_of()
    flows = defined(configured, tables.read(configured, "bronze_events"), folder)
    tables.read(configured, "silver_events").createOrReplaceTempView(view_of("silver_events"))
    for name in ("silver_events", "silver_messages"):
        made, known = flows[name].func(), tables.read(configured, name)
        assert made.columns == known.columns
        assert made.exceptAll(known).isEmpty()
        assert known.exceptAll(made).isEmpty()


def test_redaction_that_the_shipper_has_done_is_not_done_again(
    configured: SparkSession, tmp_path: Path
) -> None:
    """Unless a segment was changed, or the chain. Segments are sealed as redacted, though they are not."""
    events = [happened("s", n, f"m{n}", payload=RAW.replace("ada", f"ada{n}")) for n in (1, 2)]
    claim_redacted(tmp_path, *events)
    changed = sealed_segments(tmp_path)[1].path
    changed.write_bytes(changed.read_bytes().replace(b"ada2", b"eve2"))
    configured.conf.set(EVENTS_SETTING, str(tmp_path))
    rows = bronze.plain(configured, [str(tmp_path / "date=*" / "hour=*")], with_date=True)

    def payloads() -> list[str]:
        found = defined(configured, rows, tmp_path)["silver_events"].func()
        return sorted(row["payload"] for row in found.collect())

    assert payloads() == ['{"to":"<email>"}', '{"to":"ada1@example.com"}']
    chain = tmp_path / CHAIN
    chain.write_bytes(chain.read_bytes().replace(b'"n":1', b'"n":3'))
    assert payloads() == ['{"to":"<email>"}'] * 2


def test_a_configuration_that_is_none_is_refused(configured: SparkSession) -> None:
    configured.conf.set(LEVEL_SETTING, "some")
    with pytest.raises(
        InvalidSetting, match=f"{LEVEL_SETTING} must be one of none, medium, full, not 'some'"
    ):
        define(configured)
    configured.conf.unset(LEVEL_SETTING)
    configured.conf.unset(EVENTS_SETTING)
    with pytest.raises(InvalidSetting, match=f"the configuration of the pipeline has no {EVENTS_SETTING}"):
        define(configured)


def test_a_project_is_refused_where_there_is_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(InvalidSetting, match="is not empty"):
        write_project(tmp_path, tmp_path)
    assert main([str(tmp_path), str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main([]) == 2
    assert main([str(tmp_path / "new"), str(tmp_path)]) == 0
