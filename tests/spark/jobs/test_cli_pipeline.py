import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postroom.cli.pipeline import pipeline
from tests.spark.commands import Commands, in_its_own_process
from tests.spark.conftest import MESSAGES, TablesOf
from tests.spark.stories import write_segment


@pytest.fixture
def copied(tables_of: TablesOf, tmp_path: Path) -> tuple[Path, Path]:
    events, tables = tables_of()
    shutil.copytree(tables.folder, tmp_path / "tables")
    return events, tmp_path / "tables"


def test_sql_prints_json_lines_and_a_wrong_question_is_one_sentence(
    tables_of: TablesOf, commands: Commands
) -> None:
    """The first in a process and a JVM of its own."""
    _, tables = tables_of()
    query = "SELECT outcome, count(*) AS n, max(rejected_us) AS none FROM silver_messages GROUP BY outcome"
    done = in_its_own_process("sql", "--tables", tables.folder, "--master", "local[1]", query)
    assert done.code == 0, done.stderr
    rows = [json.loads(text) for text in done.stdout.splitlines()]
    assert sum(row["n"] for row in rows) == MESSAGES
    assert all(set(row) == {"outcome", "n", "none"} for row in rows)
    assert "starting Spark" in done.stderr
    done = commands("sql", "--tables", tables.folder, "SELECT nobody FROM silver_spans")
    assert done.code == 2
    assert done.stdout == ""
    assert "nobody" in done.stderr.splitlines()[-1]
    assert all(line.startswith("postroom: ") for line in done.stderr.splitlines())


def test_what_is_no_question_is_refused_before_spark_starts(tmp_path: Path) -> None:
    done = in_its_own_process("sql", "--tables", tmp_path, "DROP TABLE silver_spans")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("postroom: DROP is no question")
    assert len(done.stderr.splitlines()) == 1


def test_a_question_opens_the_tables_that_it_names_and_one_that_names_none_all(
    spark: SparkSession, tables_of: TablesOf, commands: Commands
) -> None:
    _, tables = tables_of()
    for query, opened in {
        "SELECT count(*) FROM Gold_SLA": ["gold_sla"],
        "SHOW TABLES": tables.names(),
    }.items():
        for name in views(spark):
            spark.catalog.dropTempView(name)
        assert commands("sql", "--tables", tables.folder, query).code == 0
        assert views(spark) == sorted(opened)


def views(spark: SparkSession) -> list[str]:
    return sorted(row["viewName"] for row in spark.sql("SHOW VIEWS").collect())


def test_run_says_what_it_did_and_shows_progress(copied: tuple[Path, Path], commands: Commands) -> None:
    events, tables = copied
    shutil.rmtree(tables / "gold_sla")
    done = commands(
        "run", "--events", events, "--tables", tables, "--master", "local[1]", "--json", "--skip-missing"
    )
    assert done.code == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["waiting"], summary["missing"], summary["note"]) == (0, [], "")
    assert (summary["segments"], summary["rows"]["silver_messages"]) == (0, MESSAGES)
    assert summary["rows"]["gold_sla"] > 0
    assert "gold_sla" in done.stderr
    assert "gold_latency" not in done.stderr  # it is as its sources are


def test_status_and_tables_need_no_java(copied: tuple[Path, Path], tmp_path: Path) -> None:
    events, tables = copied
    done = in_its_own_process(
        "status", "--tables", tables, "--events", events, PATH="", JAVA_HOME=str(tmp_path)
    )
    rows = {row["table"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows["segments"]["behind"] == rows["silver_spans"]["behind"] == 0
    assert rows["silver_messages"]["rows"] == MESSAGES
    assert done.stderr == ""
    done = in_its_own_process("tables", "--tables", tables, "--vacuum", "--compact")
    columns = [json.loads(text) for text in done.stdout.splitlines()]
    assert {"table": "silver_messages", "column": "queue_us", "type": "bigint"} in columns


@pytest.mark.parametrize(
    "words",
    [("status",), ("tables",), ("tables", "--compact", "--vacuum"), ("backfill",), ("sql", "SELECT 1")],
)
def test_a_folder_without_tables_is_named_and_stays_as_it_is(
    commands: Commands, tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = commands(words[0], "--tables", tmp_path / "mistyped", *words[1:])
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"postroom: there are no tables in {tmp_path / 'mistyped'}"
    assert list(tmp_path.iterdir()) == []


def test_status_names_the_segment_that_the_others_wait_for(tmp_path: Path) -> None:
    for number in (1, 3, 4):
        write_segment(tmp_path / "events", number, [])
    done = in_its_own_process("status", "--tables", tmp_path / "tables", "--events", tmp_path / "events")
    [row] = map(json.loads, done.stdout.splitlines())
    assert (done.code, row["behind"], row["missing"]) == (0, 3, [[2, 2]])
    assert done.stderr == "postroom: segment 2 is missing, and 2 behind 2 wait for it\n"


def test_what_is_missing_is_said_in_one_sentence(tmp_path: Path) -> None:
    where = ("run", "--events", tmp_path, "--tables", tmp_path / "tables")
    done = in_its_own_process(*where, JAVA_HOME=str(tmp_path))
    assert done.code == 2
    assert done.stderr.splitlines()[-1].startswith(
        "postroom: the pipeline needs Java 17 or 21, and there is none"
    )
    hidden = tmp_path / "hidden" / "pyspark"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text('raise ModuleNotFoundError("no", name="pyspark")')
    for command in (where, ("status", "--tables", tmp_path)):
        done = in_its_own_process(*command, PYTHONPATH=str(hidden.parent))
        assert done.code == 2
        missing = (
            "postroom: the pipeline needs pyspark, which is not installed: pip install 'postroom[spark]'"
        )
        assert done.stderr.splitlines()[-1] == missing


def test_help_does_not_import_spark() -> None:
    code = "import sys; import postroom.cli.pipeline; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_commands_are_those_that_are_promised() -> None:
    promised = "run stream backfill status tables sql retain replay report check generate prepare"
    assert set(pipeline.commands) == set(promised.split())
