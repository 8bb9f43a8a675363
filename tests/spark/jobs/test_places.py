"""Tables and streams at other places than a folder, and beside other writers."""

import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]
from deltalake import DeltaTable, Field
from pyspark.sql import SparkSession

from postroom.errors import TableChanged
from postroom.pipeline import paths
from postroom.pipeline.delta.delta_log import Txn
from postroom.pipeline.delta.storage import Access, Storage
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.follow.refresh import Table
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.silver.tables import SILVER
from tests.spark.commands import Commands
from tests.spark.comparison import differing
from tests.spark.conftest import TablesOf
from tests.spark.plainrows import Rows, all_rows
from tests.spark.realhistory import RealHistory
from tests.spark.stories import BAD_LINES, write_segment
from tests.waiting import until

FEW = {name: GOLD[name] for name in ("gold_flow", "gold_depth", "gold_latency", "gold_tokens")}
KEY = "test"


Deliveries = list[list[bytes]]
"""The lines of three segments."""


@pytest.fixture(scope="module")
def deliveries(real_history: RealHistory) -> Deliveries:
    """Lines of all contracts in any order, some of them twice, and lines that are no events."""
    rng = random.Random(6)
    lines = real_history.lines()
    lines += rng.sample(lines, len(lines) // 4)
    rng.shuffle(lines)
    return [[*BAD_LINES, *lines[n::3]] for n in range(3)]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory, deliveries: Deliveries) -> Path:
    """A stream of three segments."""
    folder = tmp_path_factory.mktemp("stream") / "events"
    for number, lines in enumerate(deliveries, 1):
        write_segment(folder, number, lines)
    return folder


@pytest.fixture(scope="module")
def whole(spark: SparkSession, events: Path) -> Tables:
    """The tables of that stream, in a folder of this machine."""
    tables = Tables(events.parent / "expected")
    Pipeline(spark, tables).run(events)
    return tables


@pytest.fixture(scope="module")
def all_expected(whole: Tables) -> dict[str, Rows]:
    return all_rows(whole)


@pytest.fixture(scope="module")
def expected(all_expected: dict[str, Rows]) -> dict[str, Rows]:
    """The rows of bronze, silver and few gold tables."""
    return {name: rows for name, rows in all_expected.items() if name in FEW or name not in GOLD}


def test_the_tables_to_compare_with_are_those_of_the_oracle(
    whole: Tables, real_history: RealHistory, tmp_path: Path
) -> None:
    write_segment(tmp_path, 1, real_history.lines())
    assert differing(whole, tmp_path) == []


def test_spark_reads_and_writes_a_file_system_that_only_hadoop_knows(
    spark: SparkSession,
    tmp_path: Path,
    deliveries: Deliveries,
    expected: dict[str, Rows],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mount of `viewfs:`. Executors read the segments and write the files. Two streams share the tables."""
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    hadoop.set("fs.viewfs.mounttable.default.link./lake", tmp_path.as_uri())
    monkeypatch.setattr(paths, "SMALL_BYTES", 0)
    tables = Tables("viewfs:///lake/tables", Access(mounts={"viewfs:///lake": tmp_path.as_uri()}))
    job = Pipeline(spark, tables, gold=FEW)
    for number, lines in enumerate(deliveries, 1):
        write_segment(tmp_path / ("first" if number == 1 else "rest"), number, lines)
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


class Killed(Exception):
    pass


class Disturbed(Tables):
    """Another engine compacts a table, adds a column and vacuums, before every commit to it."""

    kills: set[str]
    """The tables at whose next commit the job is killed: every second one before it, the others after it."""

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


ANY = {*SILVER, *GOLD, "bronze_events", "bronze_rejects"}
FEWER = {name: GOLD[name] for name in ("gold_flow", "gold_depth")}


@pytest.mark.parametrize(
    ("small_bytes", "gold", "chosen", "runs"),
    [
        pytest.param(paths.SMALL_BYTES, GOLD, ANY, 3, id="arrow"),
        pytest.param(0, FEWER, {"gold_flow"}, 2, id="spark"),
    ],
)
def test_maintenance_by_other_engines_and_kills_at_commits_change_no_row(
    spark: SparkSession,
    tmp_path: Path,
    deliveries: Deliveries,
    all_expected: dict[str, Rows],
    monkeypatch: pytest.MonkeyPatch,
    small_bytes: int,
    gold: dict[str, Table],
    chosen: set[str],
    runs: int,
) -> None:
    """Arrow writes the files of all tables, Spark those of few. The `chosen` ones are killed at a commit.

    Segments arrive before each of some runs, and all that are left before the last.
    """
    monkeypatch.setattr(paths, "SMALL_BYTES", small_bytes)
    tables = Disturbed(tmp_path / "tables")
    tables.kills = set()
    job = Pipeline(spark, tables, gold=gold)
    arrivals = enumerate(deliveries, 1)
    for run in range(1, runs + 1):
        for number, lines in arrivals if run == runs else islice(arrivals, 1):
            write_segment(tmp_path / "growing", number, lines)
        if run == runs:
            tables.kills = set(chosen)
        while tables.kills:
            with pytest.raises(Killed):
                job.run(tmp_path / "growing")
        job.run(tmp_path / "growing")
    assert {name: without_foreign(rows) for name, rows in all_rows(tables).items()} == {
        name: rows for name, rows in all_expected.items() if name in gold or name not in GOLD
    }


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
