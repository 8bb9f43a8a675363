"""Tables and streams at other places than a folder, and beside other writers."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]
from deltalake import DeltaTable, Field
from pyspark.sql import SparkSession

from postroom.errors import TableChanged
from postroom.pipeline import paths
from postroom.pipeline.delta_log import Txn
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.storage import Access, Storage
from postroom.pipeline.tables import Tables
from tests.crash.attack_pipeline import BY_DUCKDB, BY_SPARK
from tests.spark.commands import Commands
from tests.spark.conftest import TablesOf
from tests.spark.plainrows import Rows, all_rows
from tests.spark.stories import HOUR_US, NOW_US, happened, write_segment
from tests.waiting import until

FEW = {name: GOLD[name] for name in ("gold_flow", "gold_depth", "gold_latency", "gold_tokens")}
KEY = "test"


def deliver(events: Path, number: int) -> None:
    """A segment with messages of its own, and with the end of a message of the first one."""
    facts: dict[str, Any] = {"queue": "q", "state": "QUEUED", "attempt": 1, "tokens_in": number}
    seq = number * 10
    lines = [happened("s", seq + n, f"m{number}{n}", ts_us=NOW_US + n * HOUR_US, **facts) for n in range(3)]
    lines += [happened("s", seq + 5, "m11", "dequeued", ts_us=NOW_US + 2 * HOUR_US + number, attempt=number)]
    write_segment(events, number, lines)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream of three segments."""
    folder = tmp_path_factory.mktemp("stream") / "events"
    for number in (1, 2, 3):
        deliver(folder, number)
    return folder


@pytest.fixture(scope="module")
def expected(spark: SparkSession, events: Path) -> dict[str, Rows]:
    """The rows of that stream, in tables of this machine."""
    tables = Tables(events.parent / "expected")
    Pipeline(spark, tables, gold=FEW).run(events)
    return all_rows(tables)


def test_spark_reads_and_writes_a_file_system_that_only_hadoop_knows(
    spark: SparkSession, tmp_path: Path, expected: dict[str, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount of `viewfs:`. Executors read the segments and write the files. Two streams share the tables."""
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    hadoop.set("fs.viewfs.mounttable.default.link./lake", tmp_path.as_uri())
    monkeypatch.setattr(paths, "SMALL_BYTES", 0)
    tables = Tables("viewfs:///lake/tables", Access(mounts={"viewfs:///lake": tmp_path.as_uri()}))
    job = Pipeline(spark, tables, gold=FEW)
    first, rest = tmp_path / "first", tmp_path / "rest"
    deliver(first, 1)
    for number in (2, 3):
        deliver(rest, number)
    places = ["viewfs:///lake/first", "viewfs:///lake/rest"]
    assert [job.run(places).segments for _ in range(2)] == [3, 0]
    assert all_rows(tables) == expected
    assert tables.folder == tmp_path / "tables"


@pytest.fixture(scope="module")
def s3() -> Iterator[Access]:
    """A server that speaks S3, in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    url = f"http://127.0.0.1:{port}"
    key = {"aws_access_key_id": KEY, "aws_secret_access_key": KEY, "region_name": "us-east-1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        client = boto3.client("s3", endpoint_url=url, **key)

        def has_bucket() -> bool:
            try:
                client.create_bucket(Bucket="lake")
            except BotoCoreError:
                return False
            return True

        until(has_bucket)
        options = {name.upper(): value for name, value in key.items() if name != "region_name"}
        yield Access(
            {**options, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}
        )
        server.terminate()


def test_the_log_lies_in_an_object_store(
    spark: SparkSession, events: Path, expected: dict[str, Rows], s3: Access
) -> None:
    """Small tables are written by this process, so that all of a run is seen there, without a jar for S3."""
    tables = Tables("s3a://lake/tables", s3)
    job = Pipeline(spark, tables, gold=FEW)
    assert [job.run(events).segments for _ in range(2)] == [3, 0]
    assert all_rows(tables) == expected
    late, base = Tables(tables.storage), tables.version("gold_flow")
    assert late.version("gold_flow") == base
    late.mark("gold_flow", [Txn("other", 1)], base=base)
    with pytest.raises(TableChanged):
        tables.mark("gold_flow", [Txn("other", 2)], base=base)
    assert Tables(tables.storage).last_txn("gold_flow", "other") == 1


ANSWERS = (
    ("status",),
    ("check",),
    ("expect",),
    ("sql", "SHOW TABLES"),
    ("sql", "SELECT day, org_id, sum(cost_usd) AS usd FROM gold_cost GROUP BY ALL ORDER BY ALL"),
    ("sql", "SELECT * FROM silver_messages WHERE outcome <> 'completed' ORDER BY message_id LIMIT 40"),
    ("sql", "SELECT date, count(*) AS n FROM bronze_rejects GROUP BY date ORDER BY date"),
)
"""Commands whose answers do not depend on the place of the tables."""


@pytest.fixture(scope="module")
def moved(tables_of: TablesOf, s3: Access) -> tuple[Path, list[str]]:
    """Tables of this machine, and the options with which commands reach a copy of them in an object store."""
    _, tables = tables_of(faults=True)
    there = Storage("s3a://lake/moved", s3)
    for file in tables.storage.files():
        there.write(file.path, tables.storage.read(file.path))
    options = [word for pair in s3.options.items() for word in ("--storage", "=".join(pair))]
    return tables.folder, ["--tables", there.place, *options]


def test_commands_answer_at_an_address_as_in_a_folder_without_a_jvm(
    moved: tuple[Path, list[str]], commands: Commands, tmp_path: Path
) -> None:
    folder, there = moved
    for command, *words in ANSWERS:
        here = commands(command, "--tables", folder, *words)
        assert (here.stdout, "starting Spark" in here.stderr) != ("", True)
        assert commands(command, *there, *words) == here
    pages = [tmp_path / "here.html", tmp_path / "there.html"]
    for page, place in zip(pages, (["--tables", str(folder)], there), strict=True):
        assert commands("report", *place, "--out", page).code == 0
    assert pages[0].read_text() == pages[1].read_text()


def test_spark_answers_at_an_address_as_duckdb_does(
    moved: tuple[Path, list[str]], commands: Commands
) -> None:
    """Spark gets small tables from this process, so that it needs no jar for S3."""
    _, there = moved
    for command, *words in (ANSWERS[1], ANSWERS[5]):
        own, by_spark = (commands(command, *there, *engine, *words) for engine in (BY_DUCKDB, BY_SPARK))
        assert own.code == by_spark.code
        assert list(map(json.loads, own.stdout.splitlines())) == [
            json.loads(line) for line in by_spark.stdout.splitlines()
        ]


class Killed(Exception):
    pass


class Disturbed(Tables):
    """Another engine compacts a table, adds a column and vacuums, before every commit to it."""

    kills: set[str]
    """Tables at whose next commit the job is killed: every second one before it, the others after it."""

    def _commit(self, name: str, *what: Any, **how: Any) -> None:
        self._maintain(name)
        is_killed, is_early = name in self.kills, sum(name.encode()) % 2
        self.kills.discard(name)
        if is_killed and is_early:
            raise Killed
        super()._commit(name, *what, **how)
        if is_killed:
            raise Killed

    def _maintain(self, name: str) -> None:
        table = self._latest(name)
        if table is not None:
            table.optimize.compact()
            table = DeltaTable(self.folder / name)
            table.alter.add_columns(Field(f"foreign_{table.version()}", "integer"))  # type: ignore[arg-type]
            DeltaTable(self.folder / name).vacuum(0, dry_run=False, enforce_retention_duration=False)


def test_maintenance_by_other_engines_and_kills_at_every_commit_change_no_row(
    spark: SparkSession, tmp_path: Path, expected: dict[str, Rows]
) -> None:
    tables = Disturbed(tmp_path / "tables")
    tables.kills = set()
    job = Pipeline(spark, tables, gold=FEW)
    for number in (1, 2):
        deliver(tmp_path / "growing", number)
        job.run(tmp_path / "growing")
    deliver(tmp_path / "growing", 3)
    tables.kills = {name for name in tables.names() if name != "bronze_rejects"}  # no line is rejected
    while tables.kills:
        with pytest.raises(Killed):
            job.run(tmp_path / "growing")
    job.run(tmp_path / "growing")
    assert {name: without_foreign(rows) for name, rows in all_rows(tables).items()} == expected


def without_foreign(rows: Rows) -> Rows:
    """Rows without the columns that nobody of us has added."""
    kept: Rows = type(rows)()
    for text, n in rows.items():
        row = {name: value for name, value in json.loads(text).items() if not name.startswith("foreign_")}
        kept[json.dumps(row, sort_keys=True)] += n
    return kept


def test_two_jobs_at_once_make_the_tables_of_one(
    spark: SparkSession, tmp_path: Path, events: Path, expected: dict[str, Rows]
) -> None:
    jobs = [Pipeline(spark, Tables(tmp_path / "tables"), gold=FEW) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda job: job.run(events), jobs))
    jobs[0].run(events)  # a job leaves segments to another that has begun with them
    assert sum(summary.segments for summary in done) == 3
    assert all_rows(Tables(tmp_path / "tables")) == expected
