"""Spark's event log of a job, next to the tables. No JVM starts here."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from postroom.cli.main import PROGRAM, cli
from postroom.cli.pipeline import pipeline_options
from postroom.cli.shell import run
from postroom.errors import Unavailable
from postroom.pipeline.spark.event_logs import EVENT_LOGS_MAX, FOLDER, event_log_settings
from postroom.pipeline.spark.session import LOOPBACK, settings
from tests.spark.stories import happened, write_segment


def test_only_the_newest_logs_are_kept(tmp_path: Path) -> None:
    event_log_settings(tmp_path)
    for number in range(EVENT_LOGS_MAX + 3):
        path = tmp_path / FOLDER / f"local-{number}"
        path.mkdir() if number == 1 else path.touch()
        os.utime(path, ns=(number, number))
    assert event_log_settings(tmp_path)["spark.eventLog.dir"] == (tmp_path / FOLDER).as_uri()
    kept = {path.name for path in (tmp_path / FOLDER).iterdir()}
    assert kept == {f"local-{number}" for number in range(3, EVENT_LOGS_MAX + 3)}


@pytest.mark.parametrize(("words", "is_on"), [((), True), (("--no-monitor",), False)])
def test_a_job_is_monitored_unless_an_option_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], is_on: bool
) -> None:
    write_segment(tmp_path / "events", 1, [happened("s", 1, "m")])
    asked: dict[str, Any] = {}

    def spark_of(**how: Any) -> contextlib.AbstractContextManager[None]:
        asked.update(how)
        raise Unavailable("no session here")

    monkeypatch.setattr(pipeline_options, "spark_of", spark_of)
    places = ["--events", str(tmp_path / "events"), "--tables", str(tmp_path / "tables")]
    assert run(cli, PROGRAM, ["pipeline", "run", *places, *words]) == 1
    assert (asked["monitor"], asked["conf"].get("spark.eventLog.enabled") == "true") == (is_on, is_on)
    assert (tmp_path / "tables" / FOLDER).exists() == is_on


def test_spark_ui_of_a_local_session_listens_on_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPARK_LOCAL_IP", raising=False)
    assert settings("spark://head:7077", {}, with_ui=True)["spark.ui.enabled"] == "false"
    local = settings("local[2]", {}, with_ui=True)
    assert (local["spark.ui.enabled"], local["spark.ui.port"]) == ("true", "0")
    assert os.environ["SPARK_LOCAL_IP"] == LOOPBACK
    assert settings("local[2]", {"spark.ui.enabled": "false"}, with_ui=True)["spark.ui.enabled"] == "false"
