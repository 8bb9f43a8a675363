"""Expectations of the tables, and what comes of a breach. No JVM is needed for most."""

import json
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from deltalake import DeltaTable, write_deltalake

from postroom.errors import InvalidSetting
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.query import expectations
from postroom.pipeline.query.expectations import EXPECTATIONS, Expectation, measure, read_expectations
from postroom.pipeline.report.findings import findings
from postroom.pipeline.report.queries import ReportReader
from tests.spark.commands import Commands
from tests.spark.conftest import MESSAGES, TablesOf
from tests.spark.openlineage import events_in, receiver

NOW_US = 10**15


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


def test_wrong_rules_give_a_one_line_error(tmp_path: Path) -> None:
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


def broken_tables(tables: Tables, folder: Path) -> str:
    """A copy of tables in which a message occurs twice, and what is said about it."""
    shutil.copytree(tables.folder, folder)
    repeated = DeltaTable(folder / "silver_messages").to_pyarrow_table().slice(0, 1)
    write_deltalake(str(folder / "silver_messages"), repeated, mode="append")
    return f"silver_messages: 1 of {MESSAGES + 1:,} rows repeat another row's message_id"


def test_breach_gives_an_exit_code_a_line_a_finding_and_an_event(
    tables_of: TablesOf, commands: Commands, tmp_path: Path
) -> None:
    folder = tmp_path / "tables"
    sentence = broken_tables(tables_of()[1], folder)
    with receiver() as got:
        done = commands("expect", "--tables", folder, "--lineage", got.url)
    assert (done.code, done.stderr) == (1, f"postroom: breached: {sentence}\n")
    assert got.refusals == []
    begun, ended = got.events
    assert (begun["eventType"], ended["eventType"]) == ("START", "FAIL")
    assert ended["job"]["name"] == "pipeline.expect"
    [told] = [each for each in ended["inputs"] if each["name"] == f"{folder}/silver_messages"]
    assertions = told["inputFacets"]["dataQualityAssertions"]["assertions"]
    wanted = {"assertion": "unique", "success": False, "description": sentence, "column": "message_id"}
    assert wanted in assertions
    assert sum(not one["success"] for one in assertions) == 1
    [file] = (folder / expectations.BREACHES).iterdir()
    assert events_in(file) == [ended]
    [first, *_] = findings(ReportReader(Tables(folder), {}).facts())
    assert (first.level, first.text) == ("bad", f"An expectation is breached: {sentence}.")


def test_a_breach_is_an_event_without_any_option(
    tables_of: TablesOf, commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tables"
    sentence = broken_tables(tables_of()[1], folder)
    monkeypatch.setattr(expectations, "BREACH_EVENTS_MAX", 2)
    for _ in range(3):
        assert commands("expect", "--tables", folder).code == 1
    files = sorted((folder / expectations.BREACHES).iterdir())
    assert len(files) == 2
    times = [event["eventTime"] for file in files for event in events_in(file)]
    assert times == sorted(set(times))  # the oldest of three is gone
    assert sentence in files[-1].read_text()
    assert {name for name in Tables(folder).names() if name.startswith("_")} == set()
    assert commands("status", "--tables", folder).code == 0


def test_a_breach_that_cannot_be_written_is_still_reported(
    tables_of: TablesOf, commands: Commands, tmp_path: Path
) -> None:
    folder = tmp_path / "tables"
    sentence = broken_tables(tables_of()[1], folder)
    (folder / expectations.BREACHES).write_text("a file in its place")
    done = commands("expect", "--tables", folder)
    warning, breached = done.stderr.splitlines()
    assert done.code == 1
    assert warning.startswith(
        f"postroom: warning: no event was written to {folder}/{expectations.BREACHES}: "
    )
    assert breached == f"postroom: breached: {sentence}"


def test_tables_that_meet_expectations_have_no_event(
    tables_of: TablesOf, commands: Commands, tmp_path: Path
) -> None:
    folder = tables_of()[1].folder
    place = tmp_path / "lineage.jsonl"
    assert commands("expect", "--tables", folder, "--lineage", place).code == 0
    assert [event["eventType"] for event in events_in(place)] == ["START", "COMPLETE"]
    assert not (folder / expectations.BREACHES).exists()


def test_a_report_takes_the_rules_of_expect(tables_of: TablesOf, commands: Commands, tmp_path: Path) -> None:
    """A rule that only its file has, of a table that the page does not draw."""
    rules, page = tmp_path / "rules.toml", tmp_path / "report.html"
    rules.write_text(
        '[[expect]]\ntable = "silver_attempts"\nkind = "known_values"\n'
        'columns = ["result"]\nvalues = ["odd"]\n'
        '[[expect]]\ntable = "silver_messages"\nkind = "freshness"\ncolumns = ["last_us"]\nmost = 60\n'
    )
    folder = tables_of()[1].folder
    copy = tmp_path / "tables"
    shutil.copytree(folder, copy)
    done = commands("expect", "--tables", copy, "--rules", rules)
    said = [line.removeprefix("postroom: breached: ") for line in done.stderr.splitlines()]
    assert [one.partition(":")[0] for one in said] == ["silver_attempts", "silver_messages"]
    words = ("report", "--tables", folder, "--out", page)
    assert commands(*words, "--rules", rules).code == 0
    shown = unescape(page.read_text())
    assert f"An expectation is breached: {said[0]}." in shown
    assert "silver_messages: the newest last_us is" in shown  # by the clock, as `expect` says
    assert commands(*words).code == 0
    assert "An expectation is breached" not in page.read_text()
    rules.write_text('[[expect]]\ntable = "silver_messages"\nkind = "unique"\ncolumns = ["nobody"]\n')
    done = commands(*words, "--rules", rules)
    assert (done.code, "has no column nobody" in done.stderr) == (2, True)
