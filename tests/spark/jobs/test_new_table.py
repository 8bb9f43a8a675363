"""A gold table is one file, one query and one line of a page: `docs/howto/add-a-table.md`, done in a copy."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.generator.generate import generate
from postroom.pipeline.jobs import Pipeline
from tests.spark.oracle import in_order, stored
from tests.spark.plainrows import plain
from tests.spark.rows.test_gold import database
from tests.spark.segmentfiles import sealed_segments
from tests.waiting import HANG_GUARD_S

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "howto" / "add-a-table.md"
LINES_MAX = 40
COPIED = ("tests", "src", "docs", "tools", "pyproject.toml")


def block(language: str) -> str:
    """The one block of a language on the page."""
    [found] = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return str(found)


def test_page_of_new_gold_table_is_written_from_its_file(tmp_path: Path) -> None:
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    added = tmp_path / "src/postroom/pipeline/gold/tables/retries.py"
    added.write_text(block("python"))
    assert len(added.read_text().splitlines()) <= LINES_MAX
    subprocess.run(
        [sys.executable, tmp_path / "tools" / "gen_reference.py"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        check=True,
        capture_output=True,
        timeout=HANG_GUARD_S,
    )
    written = (tmp_path / "docs" / "contracts" / "pipeline.md").read_text("utf-8")
    row = "| `gold_retries` | hour, organization, type: the number of retries | `day` | silver_events |"
    assert row in written.splitlines()


def test_new_gold_table_follows_its_input_as_its_oracle_says(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "retries.py"
    file.write_text(block("python"))
    spec = importlib.util.spec_from_file_location("retries", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    events, tables = tmp_path / "events", Tables(tmp_path / "tables")
    generate(events, 300, 5)
    late = [segment.path for segment in sealed_segments(events)][3:]
    for path in late:
        path.rename(tmp_path / path.name)
    job = Pipeline(spark, tables, gold=module.TABLES)
    job.run(events)
    for path in late:
        (tmp_path / path.name).rename(path)
    job.run(events)
    columns, _, oracle = block("sql").partition("\n")
    assert columns == f"-- {tables.schema('gold_retries').simpleString()} by day"
    found = database(events).execute(oracle).fetchall()
    assert stored(tables, "gold_retries") == in_order(plain(row) for row in found)
    assert found
