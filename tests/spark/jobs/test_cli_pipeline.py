import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from postroom import Tasks
from postroom.cli.pipeline.pipeline import pipeline
from postroom.pipeline.delta.delta_log import Txn
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.spark import event_logs
from postroom.server.folder.audit_table import export_table, opened_table
from postroom.server.folder.shipping import Sources
from postroom.settings import AuditSettings
from tests.postgresserver import database, postgres
from tests.privatepostgres import PostgresServer
from tests.segmentstories import sealed_folder
from tests.spark.commands import Commands, Done, in_its_own_process
from tests.spark.conftest import MESSAGES, TablesOf
from tests.spark.quick import QUICK
from tests.spark.stories import write_segment

__all__ = ["database", "postgres"]  # fixtures


@pytest.fixture
def copied(tables_of: TablesOf, tmp_path: Path) -> tuple[Path, Path]:
    events, tables = tables_of()
    shutil.copytree(tables.folder, tmp_path / "tables")
    return events, tmp_path / "tables"


def test_sql_prints_json_lines_and_a_wrong_question_gives_a_one_line_error(
    tables_of: TablesOf, commands: Commands
) -> None:
    _, tables = tables_of()
    query = "SELECT outcome, count(*) AS n, max(rejected_us) AS none FROM silver_messages GROUP BY outcome"
    done = commands("sql", "--tables", tables.folder, query)
    assert done.code == 0, done.stderr
    rows = [json.loads(text) for text in done.stdout.splitlines()]
    assert sum(row["n"] for row in rows) == MESSAGES
    assert all(set(row) == {"outcome", "n", "none"} for row in rows)
    done = commands("sql", "--tables", tables.folder, "SELECT nobody FROM silver_spans")
    assert done.code == 2
    assert done.stdout == ""
    assert "nobody" in done.stderr.splitlines()[-1]
    assert all(line.startswith("postroom: ") for line in done.stderr.splitlines())


def test_run_says_what_it_did_and_shows_progress(copied: tuple[Path, Path]) -> None:
    """In a process and a JVM of its own, which writes the event log of the job."""
    events, tables = copied
    shutil.rmtree(tables / "gold_sla")
    conf = [f"--conf={name}={value}" for name, value in QUICK.items()]
    words = ("--events", events, "--tables", tables, "--master", "local[1]", *conf)
    done = in_its_own_process("run", *words, "--json", "--skip-missing")
    assert done.code == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["waiting"], summary["missing"], summary["note"]) == (0, [], "")
    assert (summary["segments"], summary["rows"]["silver_messages"]) == (0, MESSAGES)
    assert summary["rows"]["gold_sla"] > 0
    assert "gold_sla" in done.stderr
    assert "gold_latency" not in done.stderr  # it is as its sources are
    [log] = (tables / event_logs.FOLDER).iterdir()
    assert "Spark's UI: http://127.0.0.1:" in done.stderr
    assert not log.name.endswith(".inprogress")
    with pa.input_stream(log, compression="zstd") as logged:
        told = [json.loads(text) for text in logged.read().splitlines()]
    kinds = [event["Event"].removeprefix("SparkListener") for event in told]
    assert (kinds[0], kinds[-1]) == ("LogStart", "ApplicationEnd")
    assert kinds.count("JobEnd") == kinds.count("JobStart") > 0
    assert [event["App Name"] for event in told if "App Name" in event] == ["postroom"]


def test_exported_audit_table_runs_through_the_pipeline(
    database: str, postgres: PostgresServer, commands: Commands, tmp_path: Path
) -> None:
    table, settings = postgres.new_store(), AuditSettings(redaction="none")
    with Tasks.open(database) as tasks:
        for number in range(3):
            tasks.enqueue(agent="a", payload={"n": number, "nul": "\0"})
        held = tasks.claim(agent="a", limit=2)
        tasks.complete_many([(task.task_id, task.lease, None) for task in held])
    with opened_table(table, Sources((database,)), settings) as shipping:
        shipping.once()
    assert export_table(table, tmp_path / "events", settings) == 10
    done = commands("run", "--events", tmp_path / "events", "--tables", tmp_path / "tables", "--json")
    assert done.code == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert (rows["bronze_events"], rows["silver_messages"]) == (10, 3)
    query = "SELECT outcome, count(*) AS n FROM silver_messages GROUP BY outcome ORDER BY n"
    done = commands("sql", "--tables", tmp_path / "tables", query)
    assert [json.loads(line)["n"] for line in done.stdout.splitlines()] == [1, 2]


def test_status_sql_and_tables_need_no_java(copied: tuple[Path, Path], tmp_path: Path) -> None:
    events, tables = copied
    done = in_its_own_process(
        "status", "--tables", tables, "--events", events, PATH="", JAVA_HOME=str(tmp_path)
    )
    rows = {row["table"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows["segments"]["behind"] == rows["silver_spans"]["behind"] == 0
    assert rows["silver_messages"]["rows"] == MESSAGES
    assert done.stderr == ""
    query = "SELECT count(*) AS n FROM silver_messages"
    done = in_its_own_process("sql", "--tables", tables, query, PATH="", JAVA_HOME=str(tmp_path))
    assert (done.stdout, done.stderr) == (f'{{"n":{MESSAGES}}}\n', "")
    done = in_its_own_process("tables", "--tables", tables, "--vacuum", "--compact")
    columns = [json.loads(text) for text in done.stdout.splitlines()]
    assert {"table": "silver_messages", "column": "queue_us", "type": "bigint"} in columns


def row_counts(tables: Path) -> dict[str, int]:
    opened = Tables(tables)
    return {name: opened.row_count(name) for name in opened.names()}


def run_without_java(events: Path, tables: Path, *more: object) -> Done:
    """A run that ends with a sentence about Java if it needs Spark."""
    words = ("--events", events, "--tables", tables, "--json", *more)
    return in_its_own_process("run", *words, PATH="", JAVA_HOME=str(tables / "no-java"))


def test_run_without_new_segments_does_not_start_spark(copied: tuple[Path, Path]) -> None:
    events, tables = copied
    done = run_without_java(events, tables)
    assert (done.code, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert (summary["segments"], summary["rows"]) == (0, row_counts(tables))


@pytest.mark.parametrize("news", ["new segment", "missing segment", "missing table", "newer input"])
def test_run_with_new_segments_starts_spark(copied: tuple[Path, Path], tmp_path: Path, news: str) -> None:
    events, tables = copied
    others = sealed_folder(tmp_path / "other", segments=2) if news.endswith("segment") else []
    if news == "missing segment":
        others[0].unlink()
    elif news == "missing table":
        shutil.rmtree(tables / "gold_sla")
    elif news == "newer input":
        Tables(tables).mark("silver_messages", [Txn("another job", 1)])
    done = run_without_java(events, tables, *(["--events", tmp_path / "other"] if others else []))
    assert (done.code, done.stdout) == (2, "")
    assert "needs Java" in done.stderr.splitlines()[-1]


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
    assert done.stderr.splitlines() == [
        f"postroom: warning: there are no tables in {tmp_path / 'tables'}",
        "postroom: segment 2 is missing, and 2 later segments wait for it",
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("run", "--events", "nowhere", "--tables", "t"),
            "there is no folder {folder}/nowhere: give the folder of an",
        ),
        (("run", "--events", ".", "--tables", "t"), "{folder} is not an audit stream: it has no segments"),
        (("stream", "--events", ".", "--tables", "t"), "{folder} is not an audit stream: it has no segments"),
        (("run", "--events", "events", "--tables", "file"), "tables cannot be written to {folder}/file: "),
        (
            ("run", "--events", "events", "--tables", "file/t"),
            "tables cannot be written to {folder}/file/t: ",
        ),
        (("run", "--events", "events", "--tables", "events"), "--events and --tables are the same folder, "),
        (("run", "--events", "events", "--tables", "tables/../events"), "--events and --tables are the same"),
        (("stream", "--events", "events", "--tables", "events"), "--events and --tables are the same folder"),
        (("backfill", "--events", "events", "--tables", "events"), "--events and --tables are the same"),
        (
            ("run", "--events", "events", "--tables", "events/t"),
            "{folder}/events/t lies in {folder}/events: ",
        ),
        (("run", "--events", "events", "--tables", "."), "{folder}/events lies in {folder}: "),
        (("run", "--events", "events", "--tables", "other"), "{folder}/other is not a folder of tables: it"),
        (("run", "--events", "events", "--tables", "stream"), "{folder}/stream is not a folder of tables: "),
        (("status", "--tables", "t", "--events", "nowhere"), "there is no folder {folder}/nowhere: "),
        (("status", "--tables", "t"), "there are no tables in "),
        (("tables", "--tables", "t"), "there are no tables in "),
        (("replay", "--tables", "t", "--where", "true", "--to", "sqlite:///x.db"), "there are no tables in "),
        (("backfill", "--tables", "t"), "there are no tables in "),
        (("sql", "--tables", "t", "SELECT 1"), "there are no tables in "),
        (("check", "--tables", "t"), "there are no tables in "),
        (("retain", "--tables", "t", "--keep-days", "7"), "there are no tables in "),
        (("report", "--tables", "t", "--out", "r.html"), "there are no tables in "),
        (("report", "--tables", "tables", "--out", "nowhere/r.html"), "there is no folder "),
        (
            ("report", "--tables", "tables", "--out", "events"),
            "events is a folder: give the name of the file",
        ),
        (("generate", "--messages", "1", "--seed", "1", "--out", "s3://b/t"), "s3://b/t is not a folder of"),
        (("retain", "--tables", "tables", "--keep-days", "7", "--hold", "nowhere"), "cannot read nowhere: "),
        (
            ("run", "--events", "events", "--tables", "t", "--conf", "x"),
            "Invalid value for '--conf': 'x' is not",
        ),
    ],
)
def test_a_wrong_path_gives_a_one_line_error_before_spark_starts(
    commands: Commands,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    sentence: str,
) -> None:
    """A command that starts a session would say so first."""
    write_segment(tmp_path / "events", 1, [])
    (tmp_path / "tables" / "gold_sla" / "_delta_log").mkdir(parents=True)
    (tmp_path / "tables" / "gold_sla" / "_delta_log" / "0.json").touch()
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    write_segment(tmp_path / "stream", 1, [])
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    done = commands(*words)
    assert (done.code, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"postroom: {sentence.format(folder=tmp_path)}")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_or_missing_table_is_named_in_one_line(
    copied: tuple[Path, Path], commands: Commands
) -> None:
    _, tables = copied
    report = ("report", "--tables", tables, "--out", tables / "report.html")
    for name in ("bronze_events", "silver_messages"):
        for file in (tables / name).rglob("*.parquet"):
            file.write_bytes(b"no Parquet")
    done = commands(*report)
    assert (done.code, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("postroom: table silver_messages cannot be read: ")
    done = commands("check", "--tables", tables)
    assert (done.code, done.stdout) == (1, "")
    assert done.stderr.startswith("postroom: table bronze_events cannot be read: ")
    (log,) = (tables / "gold_cost" / "_delta_log").glob("*0.json")
    log.write_bytes(log.read_bytes()[:50])
    for words in (report, ("status", "--tables", tables), ("tables", "--tables", tables)):
        last = commands(*words).stderr.splitlines()[-1]
        assert last.startswith("postroom: table gold_cost cannot be read: ")
        assert last.endswith("; delete its folder, and `postroom pipeline run` rebuilds it")
    shutil.rmtree(tables / "gold_cost")
    shutil.rmtree(tables / "silver_events")
    last = commands(*report).stderr.splitlines()[-1]
    assert last.startswith("postroom: there is no table silver_events in ")
    rows = {
        row["table"]: row
        for row in map(json.loads, commands("status", "--tables", tables).stdout.splitlines())
    }
    assert rows["silver_messages"]["behind"] is None


def test_what_is_missing_is_reported_in_one_line(tables_of: TablesOf, tmp_path: Path) -> None:
    _, tables = tables_of()
    write_segment(tmp_path / "events", 1, [])
    where = ("run", "--events", tmp_path / "events", "--tables", tmp_path / "tables")
    done = in_its_own_process(*where, JAVA_HOME=str(tmp_path))
    assert done.code == 2
    assert done.stderr.splitlines()[-1].startswith(
        "postroom: the pipeline needs Java 17 or 21, and there is none"
    )
    hidden = tmp_path / "hidden" / "pyspark"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text('raise ModuleNotFoundError("no", name="pyspark")')
    for command in (where, ("status", "--tables", tables.folder)):
        done = in_its_own_process(*command, PYTHONPATH=str(hidden.parent))
        assert done.code == 2
        missing = (
            "postroom: the pipeline needs pyspark, which is not installed: pip install 'postroom[spark]'"
        )
        assert done.stderr.splitlines()[-1] == missing


def test_help_does_not_import_spark() -> None:
    code = "import sys; import postroom.cli.pipeline.pipeline; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_commands_are_those_that_are_promised() -> None:
    jobs = "run stream backfill retain rejects replay generate prepare"
    queries = "status tables sql report check expect"
    assert set(pipeline.commands) == {*jobs.split(), *queries.split()}
