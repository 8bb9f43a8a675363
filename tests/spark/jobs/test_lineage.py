"""Lineage of the jobs that write tables: every event follows the specification, and names true inputs."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openlineage.client.naming import dataset as naming

from postroom.errors import InvalidSetting
from postroom.pipeline.delta.storage import Storage
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.follow import deleted_numbers
from postroom.pipeline.generator.generate import generate
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.lineage import JobRun, dataset
from postroom.pipeline.silver.tables import SILVER
from tests.spark.commands import Commands
from tests.spark.openlineage import Event, edges, events_in, receiver, require_event

DECLARED = {name: set(table.inputs) for name, table in (SILVER | GOLD).items()}


def runs_of(events: list[Event], job: str) -> dict[str, list[Event]]:
    """The events of each job below a job, which are those of one parent. Every run begins and ends once."""
    parent, *_ = events
    assert (parent["job"]["namespace"], parent["job"]["name"]) == ("postroom", job)
    assert (parent["inputs"], parent["outputs"]) == ([], [])
    runs: dict[str, list[Event]] = {}
    for event in events:
        runs.setdefault(event["run"]["runId"], []).append(event)
    own = runs.pop(parent["run"]["runId"])
    assert [each["eventType"] for each in own] == ["START", "COMPLETE"]
    assert own[1] is events[-1]
    for begun, ended in runs.values():
        assert (begun["eventType"], ended["eventType"]) == ("START", "COMPLETE")
        assert begun["job"] == ended["job"]
        assert begun["eventTime"] <= ended["eventTime"]
        for each in (begun, ended):
            facet = each["run"]["facets"]["parent"]
            assert (facet["run"]["runId"], facet["job"]["name"]) == (parent["run"]["runId"], job)
    return {begun["job"]["name"].removeprefix(f"{job}."): [begun, ended] for begun, ended in runs.values()}


class Ran(NamedTuple):
    """A small history, its tables, and the events of the run that made them."""

    stream: Path
    folder: Path
    events: list[Event]


@pytest.fixture(scope="module")
def ran(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    place = tmp_path_factory.mktemp("lineage")
    generate(place / "events", 20, 8, faults=True)
    with receiver() as got:
        done = commands(
            "run", "--events", place / "events", "--tables", place / "tables", "--lineage", got.url
        )
    assert (done.code, got.refusals) == (0, []), done.stderr
    return Ran(place / "events", place / "tables", got.events)


def copy_of(ran: Ran, folder: Path) -> Path:
    return Path(shutil.copytree(ran.folder, folder / "tables"))


def test_a_run_emits_a_run_for_each_table_with_its_inputs(ran: Ran) -> None:
    runs = runs_of(ran.events, "pipeline.run")
    tables = Tables(ran.folder)
    written = {name for name in tables.names() if tables.listing(name).rows}
    assert set(runs) == written > {"bronze_events", "silver_spans", "gold_depth"}
    stream = {"bronze_events": {str(ran.stream)}, "bronze_rejects": {str(ran.stream)}}
    assert edges(ran.events, ran.folder) == {
        name: sources for name, sources in (DECLARED | stream).items() if name in written
    }
    for name, (_, ended) in runs.items():
        [output] = ended["outputs"]
        files = tables.listing(name)
        told = output["outputFacets"]["outputStatistics"]
        assert (told["rowCount"], told["size"], told["fileCount"]) == (files.rows, files.bytes, len(files))
        assert output["facets"]["version"]["datasetVersion"] == str(tables.version(name))
        columns = [field["name"] for field in output["facets"]["schema"]["fields"]]
        assert columns == tables.schema(name).names
    [read] = runs["silver_messages"][1]["inputs"]
    assert read["facets"]["version"]["datasetVersion"] == str(tables.version("silver_events"))


def test_a_run_that_finds_nothing_new_starts_no_spark(ran: Ran, commands: Commands, tmp_path: Path) -> None:
    place = tmp_path / "lineage.jsonl"
    done = commands("run", "--events", ran.stream, "--tables", ran.folder, "--lineage", place)
    assert (done.code, done.stderr) == (0, "")
    assert runs_of(events_in(place), "pipeline.run") == {}


def test_a_backfill_emits_what_it_rebuilds(ran: Ran, commands: Commands, tmp_path: Path) -> None:
    folder, place = copy_of(ran, tmp_path), tmp_path / "lineage.jsonl"
    assert commands("backfill", "--tables", folder, "--lineage", place).code == 0
    events = events_in(place)
    rebuilt = runs_of(events, "pipeline.backfill")
    assert "silver_events" in rebuilt
    assert set(rebuilt) == {name for name in DECLARED if Tables(folder).listing(name).rows}
    assert edges(events, folder) == {name: DECLARED[name] for name in rebuilt}


def test_a_stream_emits_the_tables_of_its_batches(ran: Ran, commands: Commands, tmp_path: Path) -> None:
    folder, place = tmp_path / "tables", tmp_path / "lineage.jsonl"
    done = commands("stream", "--events", ran.stream, "--tables", folder, "--lineage", place)
    assert done.code == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["segments"] > 0
    assert summary["rows"] == {name: Tables(folder).row_count(name) for name in Tables(folder).names()}
    events = events_in(place)
    assert set(runs_of(events, "pipeline.stream")) == set(runs_of(ran.events, "pipeline.run"))
    known = edges(ran.events, ran.folder)
    assert edges(events, folder) == known


def test_retention_emits_the_tables_that_lose_rows(ran: Ran, commands: Commands, tmp_path: Path) -> None:
    folder, place = copy_of(ran, tmp_path), tmp_path / "lineage.jsonl"
    before = Tables(folder).row_count("silver_events")
    words = ("retain", "--tables", folder, "--keep-days", 1, "--lineage", place)
    assert commands(*words, "--dry-run").code == 0
    assert runs_of(events_in(place), "pipeline.retain") == {}
    place.unlink()
    done = commands(*words)
    assert done.code == 0, done.stderr
    deleted = Counter({row["table"]: row["deleted"] for row in map(json.loads, done.stdout.splitlines())})
    assert deleted["silver_events"] == before
    found = edges(events_in(place), folder)
    assert set(found) == {name for name, n in deleted.items() if n} | {deleted_numbers.TABLE}
    assert found["silver_events"] == {"silver_events", "silver_messages"}
    assert found["silver_messages"] == {"silver_messages"}
    assert found[deleted_numbers.TABLE] == {"silver_events"}


def test_a_failed_job_and_its_table_name_the_error(tmp_path: Path) -> None:
    place = tmp_path / "lineage.jsonl"
    job = JobRun(str(place), "job")
    with pytest.raises(ZeroDivisionError), job.running(), job.table(Tables(tmp_path), "t", ()):
        raise ZeroDivisionError("by nothing")
    events = events_in(place)
    assert [(each["job"]["name"], each["eventType"]) for each in events] == [
        ("job", "START"), ("job.t", "START"), ("job.t", "FAIL"), ("job", "FAIL"),
    ]  # fmt: skip
    assert [each["run"]["facets"]["errorMessage"]["message"] for each in events[2:]] == ["by nothing"] * 2


def test_a_job_that_is_stopped_is_aborted_and_says_nothing_more(tmp_path: Path) -> None:
    place = tmp_path / "lineage.jsonl"
    job = JobRun(str(place), "job")
    with pytest.raises(KeyboardInterrupt), job.running():
        raise KeyboardInterrupt
    with pytest.raises(ZeroDivisionError), job.table(Tables(tmp_path), "t", ()):
        raise ZeroDivisionError  # a thread of the job, whose JVM has gone
    assert [each["eventType"] for each in events_in(place)] == ["START", "ABORT"]


def test_a_receiver_that_is_away_fails_no_job() -> None:
    said: list[str] = []
    with JobRun("http://127.0.0.1:1/lineage", "job", said.append).running():
        pass
    assert len(said) == 2
    assert said[0].startswith("warning: lineage was not delivered to http://127.0.0.1:1/lineage: ")
    with pytest.raises(InvalidSetting, match="is not a place for lineage"):
        JobRun("kafka://x", "job")


def test_datasets_have_the_names_of_the_specification() -> None:
    for place, name in (
        ("/data/tables", naming.LocalFileSystem("/data/tables/t")),
        ("s3a://lake/tables", naming.S3("lake", "tables/t")),
        ("s3://lake/a/b", naming.S3("lake", "a/b/t")),
        ("gs://lake/tables", naming.GCS("lake", "tables/t")),
        ("hdfs://head:9000/tables", naming.HDFS("head", "9000", "/tables/t")),
        ("abfss://box@acme.dfs.core.windows.net/tables", naming.ABFSS("box", "acme", "/tables/t")),
    ):
        told = dataset(Storage(place), "t")
        assert told == {"namespace": name.get_namespace(), "name": name.get_name()}


WRONG: list[tuple[str, Any]] = [
    ("run.runId", "7"),
    ("run", {}),
    ("eventTime", "2026-01-01"),
    ("eventType", "BEGIN"),
    ("schemaURL", "https://openlineage.io/spec/1-0-0/OpenLineage.json"),
    ("producer", None),
    ("job.facets", {"nobody": {}}),
    ("colour", "red"),
    ("outputs", [{"namespace": "file", "name": 7}]),
    ("run.facets.parent.run", {"id": "7"}),
]


@pytest.mark.parametrize(("member", "value"), WRONG)
def test_the_receiver_of_the_tests_refuses_other_events(tmp_path: Path, member: str, value: Any) -> None:
    job = JobRun(str(tmp_path / "lineage.jsonl"), "job")
    with pytest.raises(ZeroDivisionError), job.table(Tables(tmp_path), "t", ()):
        raise ZeroDivisionError
    [event, _] = events_in(tmp_path / "lineage.jsonl")
    *path, last = member.split(".")
    part = event
    for name in path:
        part = part[name]
    part[last] = value
    with pytest.raises((KeyError, TypeError, ValueError)):
        require_event(event)
