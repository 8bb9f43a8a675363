"""Expectations of the tables and lineage of the jobs, as a data team uses them. No JVM is needed for most."""

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from deltalake import DeltaTable, write_deltalake

from postroom.errors import InvalidSetting
from postroom.pipeline import lineage
from postroom.pipeline.expectations import EXPECTATIONS, Expectation, measure, read_expectations
from postroom.pipeline.report.findings import findings
from postroom.pipeline.report.queries import ReportReader
from postroom.pipeline.tables import Tables
from tests.spark.commands import Commands
from tests.spark.conftest import MESSAGES, TablesOf

NOW_US = 10**15


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An HTTP server, and the events that it got."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(201)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/api/v1/lineage", got
        server.shutdown()
        thread.join()


def table(folder: Path, **columns: list[Any]) -> Tables:
    write_deltalake(str(folder / "t"), pa.table(columns))
    return Tables(folder)


@pytest.mark.parametrize(
    ("expected", "broken", "sentence"),
    [
        (Expectation("t", "not_null", ("a", "b")), 2, "t: 2 of 4 rows have no a or no b"),
        (Expectation("t", "unique", ("a",)), 1, "t: 1 of 4 rows repeat another row's a"),
        (Expectation("t", "unique", ("a", "b")), 0, "t: 0 of 4 rows repeat another row's a and b"),
        (Expectation("t", "known_values", ("b",), ("x", "y")), 1, "t: 1 of 4 rows have an unknown b"),
        (Expectation("t", "freshness", ("at_us",), most=60), 100, "t: the newest at_us is 100 s old"),
    ],
)
def test_an_expectation_counts_the_rows_that_break_it(
    tmp_path: Path, expected: Expectation, broken: int, sentence: str
) -> None:
    at_us = [NOW_US - 100_000_000, 1, 2, 3]
    tables = table(tmp_path, a=["1", "1", "2", None], b=["x", "y", None, "z"], at_us=at_us)
    [found] = measure(tables, [expected], NOW_US)
    assert (found.rows, found.broken, found.sentence) == (4, broken, sentence)
    assert found.holds == (broken == 0)
    [found] = measure(tables, [Expectation(**{**_fields(expected), "most": max(broken / 4, broken)})], NOW_US)
    assert found.holds


def _fields(expected: Expectation) -> dict[str, Any]:
    return {name: getattr(expected, name) for name in expected.__struct_fields__}


def test_a_share_up_to_the_threshold_holds(tmp_path: Path) -> None:
    tables = table(tmp_path, a=["1", None, "2", "3"])
    for most, holds in ((0.25, True), (0.2, False)):
        [found] = measure(tables, [Expectation("t", "not_null", ("a",), most=most)], NOW_US)
        assert found.holds == holds


def test_a_reject_rate_is_the_share_of_rejected_lines(tmp_path: Path) -> None:
    for name, rows in {"bronze_events": 3, "bronze_rejects": 1}.items():
        write_deltalake(str(tmp_path / name), pa.table({"segment": ["s"] * rows}))
    rules = [Expectation("bronze_events", "reject_rate", most=most) for most in (0.25, 0.2)]
    found = measure(Tables(tmp_path), rules, NOW_US)
    assert [(rate.rows, rate.broken, rate.holds) for rate in found] == [(4, 1, True), (4, 1, False)]
    assert found[1].sentence == "bronze_events: 1 of 4 lines were rejected"


def test_wrong_rules_are_one_sentence(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[expect]]\ntable = "t"\nkind = "unique"\ncolumns = ["nobody"]\n')
    with pytest.raises(InvalidSetting, match="table t has no column nobody"):
        measure(table(tmp_path, a=["1"]), read_expectations(rules), NOW_US)
    for text in ('[[expect]]\ntable = "t"\nkind = "odd"\n', "[[expect"):
        rules.write_text(text)
        with pytest.raises(InvalidSetting, match=r"rules\.toml has no expectations: "):
            read_expectations(rules)
    with pytest.raises(InvalidSetting, match="freshness of t needs 1 column"):
        measure(Tables(tmp_path), [Expectation("t", "freshness")], NOW_US)


def test_tables_of_a_history_meet_every_built_in_expectation(tables_of: TablesOf, commands: Commands) -> None:
    done = commands("expect", "--tables", tables_of()[1].folder)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.code, done.stderr, len(rows)) == (0, "", len(EXPECTATIONS))
    assert all(row["holds"] and row["rows"] > 0 for row in rows)


def test_a_breach_is_an_exit_code_an_event_and_a_line_of_the_report(
    tables_of: TablesOf, commands: Commands, tmp_path: Path, receiver: tuple[str, list[dict[str, Any]]]
) -> None:
    folder = tmp_path / "tables"
    shutil.copytree(tables_of()[1].folder, folder)
    repeated = DeltaTable(folder / "silver_messages").to_pyarrow_table().slice(0, 1)
    write_deltalake(str(folder / "silver_messages"), repeated, mode="append")
    url, got = receiver
    done = commands("expect", "--tables", folder, "--lineage", url)
    sentence = f"silver_messages: 1 of {MESSAGES + 1:,} rows repeat another row's message_id"
    assert done.code == 1
    assert done.stderr == f"postroom: breached: {sentence}\n"
    [event] = got
    [told] = [each for each in event["inputs"] if each["name"] == f"{folder}/silver_messages"]
    assertions = told["inputFacets"]["dataQualityAssertions"]["assertions"]
    assert {"assertion": "unique", "success": False, "column": "message_id"} in assertions
    assert (event["eventType"], event["job"]["name"]) == ("FAIL", "pipeline.expect")
    [first, *_] = findings(ReportReader(Tables(folder), {}).facts())
    assert (first.level, first.text) == ("bad", f"An expectation is breached: {sentence}.")


def test_a_run_emits_its_lineage(
    tables_of: TablesOf, commands: Commands, tmp_path: Path, receiver: tuple[str, list[dict[str, Any]]]
) -> None:
    events, tables = tables_of()
    folder = tmp_path / "tables"
    shutil.copytree(tables.folder, folder)
    url, got = receiver
    words = ("run", "--events", events, "--tables", folder, "--lineage")
    assert commands(*words, url).code == commands(*words, tmp_path / "lineage.jsonl").code == 0
    begun, ended = got
    assert [each["eventType"] for each in got] == ["START", "COMPLETE"]
    assert begun["run"]["runId"] == ended["run"]["runId"]
    assert begun["inputs"] == ended["inputs"] == [{"namespace": "file", "name": str(events)}]
    rows = {each["name"]: each["outputFacets"]["outputStatistics"]["rowCount"] for each in ended["outputs"]}
    assert rows[f"{folder}/silver_messages"] == MESSAGES
    assert set(rows) == {f"{folder}/{name}" for name in tables.names()}
    lines = [json.loads(line) for line in (tmp_path / "lineage.jsonl").read_text().splitlines()]
    assert [each["eventType"] for each in lines] == ["START", "COMPLETE"]


def test_a_receiver_that_is_away_fails_no_job(tmp_path: Path) -> None:
    said: list[str] = []
    emitter = lineage.Lineage("http://127.0.0.1:1/lineage", "job", said.append)
    with emitter.run([], list):
        pass
    assert len(said) == 2
    assert said[0].startswith("warning: lineage was not delivered to http://127.0.0.1:1/lineage: ")
    with pytest.raises(InvalidSetting, match="is no place for lineage"):
        lineage.Lineage("kafka://x", "job")
    place = tmp_path / "lineage.jsonl"
    with pytest.raises(ZeroDivisionError), lineage.Lineage(str(place), "job").run([], list):
        raise ZeroDivisionError("by nothing")
    kinds = [json.loads(line) for line in place.read_text().splitlines()]
    assert [each["eventType"] for each in kinds] == ["START", "FAIL"]
    assert kinds[1]["run"]["facets"]["errorMessage"]["message"] == "by nothing"
