"""`stream`: Structured Streaming carries the events, and each micro-batch is committed once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.ingest import bronze_writer
from postroom.pipeline.jobs import Pipeline
from tests.spark.plainrows import all_rows
from tests.spark.stories import BAD_LINES, NOW_US, happened, write_segment

ODD = json.dumps({"b": 1.50, "a": " \u00e9\u2028"})


def deliver(events: Path, number: int, *others: bytes) -> None:
    facts: dict[str, Any] = {"queue": "q", "state": "QUEUED", "detail": {"text": ODD, "n": 1e3}}
    lines = [happened("s", number * 10 + n, f"m{number}{n}", ts_us=NOW_US + n, **facts) for n in range(3)]
    write_segment(events, number, [*lines, *others], f"2025-01-0{number}")


def refused(*_: object, **__: object) -> Any:
    raise AssertionError("a micro-batch carries these events")


class Killed(Exception):
    pass


@pytest.fixture
def followed(spark: SparkSession, tmp_path: Path) -> Callable[[], Tables]:
    """Follows the streams of the test until everything that is there is ingested."""

    def follow() -> Tables:
        Pipeline(spark, Tables(tmp_path / "tables"), gold={}).stream([tmp_path / "one", tmp_path / "two"])
        return Tables(tmp_path / "tables")

    return follow


def test_micro_batches_carry_the_events_and_are_committed_once(
    spark: SparkSession, tmp_path: Path, followed: Callable[[], Tables], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stream lacks a segment at first. The process is killed between the commit and the checkpoint."""
    one, two = tmp_path / "one", tmp_path / "two"
    for number in (1, 3):
        deliver(one, number)
    write_segment(two, 4, [happened("t", 1, "n1")])
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "_run", refused)
        patch.setattr(bronze_writer, "_write_by_date", refused)
        patch.setattr(Pipeline, "_refresh_tables", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            followed()
    version = Tables(tmp_path / "tables").version("bronze_events")
    assert version == 1  # a commit for each stream
    tables = followed()
    assert tables.version("bronze_events") == version
    assert tables.last_txn("silver_events", "bronze_events") == version
    deliver(one, 2)  # the third segment has waited for it, and is not a new file
    write_segment(two, 5, [happened("t", 2, "n2"), *BAD_LINES, b'{"event_id":"\xff"}'])
    tables = followed()
    assert tables.version("bronze_events") == version + 2
    log = (tables.folder / "bronze_events/_delta_log" / f"{version + 1:020}.json").read_text().splitlines()
    txns = {txn["appId"]: txn["version"] for line in log if (txn := json.loads(line).get("txn"))}
    [number] = [
        n for name, n in txns.items() if name.startswith(f"micro-batches of segments of {one}, query")
    ]
    assert (number, txns[f"segments of {one}"]) == (1, 3)
    by_run = Tables(tmp_path / "by-run")
    Pipeline(spark, by_run, gold={}).run([one, two])
    assert all_rows(tables) == all_rows(by_run)
