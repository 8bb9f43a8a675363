"""The pipeline in a session of somebody else: the notebook runs as it is, whatever the time zone."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import postroom.pipeline
from postroom.pipeline import Pipeline, Tables
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.silver.tables import SILVER
from tests.spark.comparison import differing

NOTEBOOK = Path(__file__).parents[3] / "examples" / "pipeline.ipynb"
TIME_ZONE = "spark.sql.session.timeZone"


@pytest.fixture
def in_tokyo(spark: SparkSession) -> Iterator[SparkSession]:
    before = str(spark.conf.get(TIME_ZONE))
    spark.conf.set(TIME_ZONE, "Asia/Tokyo")
    yield spark
    spark.conf.set(TIME_ZONE, before)


@pytest.mark.usefixtures("in_tokyo")
def test_the_notebook_makes_the_tables_of_the_oracle(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    try:
        for cell in cells:
            exec("".join(cell["source"]), names)  # noqa: S102 - that is what a notebook does
        assert set(names["tables"].names()) >= {*SILVER, *GOLD}
        assert differing(names["tables"], names["folder"] / "events") == []
        assert {"messages", "spans", "latency", "cost"} <= set(names["views"])
        assert sum(row["n"] for row in names["outcomes"].collect()) == 100
    finally:
        shutil.rmtree(names["folder"])
    assert "100 messages" in capsys.readouterr().out


def test_a_uri_names_a_folder_or_an_object_store(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    assert Tables(folder.as_uri()).folder == Tables(str(folder)).folder == Tables(folder).folder == folder
    assert Tables("s3://bucket/t").storage.place == "s3://bucket/t"
    assert Pipeline.__module__ == "postroom.pipeline.jobs"
    with pytest.raises(AttributeError, match="has no attribute 'Nobody'"):
        _ = postroom.pipeline.Nobody
