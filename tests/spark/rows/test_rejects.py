"""Lines that a version rejects and a later one can read."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postroom.pipeline import paths
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.ingest import bronze, rejects
from postroom.pipeline.jobs import Pipeline, RunSummary, nothing_new
from tests.spark.commands import Commands
from tests.spark.plainrows import records
from tests.spark.stories import NO_UTF8, happened, line, write_segment

NEWER = [
    line(event_id=f"new#{n}", seq=n, source="new", message_id=f"n{n}", schema=2, mood="calm") for n in (1, 2)
]
BROKEN = [b"{", NO_UTF8]


class Killed(Exception):
    pass


class Upgraded:
    """Tables of a version that knows schema 1, and the jobs of a version that knows schema 2."""

    def __init__(self, spark: SparkSession, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.events, self.tables, self.spark = folder / "events", Tables(folder / "tables"), spark
        write_segment(self.events, 1, [happened("s", 1, "m1"), *NEWER, *BROKEN])
        first = self.run()
        assert (first.rejects, first.taken_up) == (4, 0)
        patch.setattr(bronze, "NEWEST_SCHEMA", 2)

    def run(self) -> RunSummary:
        return Pipeline(self.spark, Tables(self.tables.folder), gold={}).run(self.events)

    def check(self) -> None:
        """Every readable line is in bronze once, and the others stay."""
        rows = records(self.tables, "bronze_events")
        assert sorted(row["event_id"] for row in rows) == ["new#1", "new#2", "s#1"]
        assert {row["rescued"] for row in rows if row["source"] == "new"} == {'{"mood":"calm"}'}
        assert len({row["segment"] for row in rows}) == 1
        messages = {row["message_id"] for row in records(self.tables, "silver_messages")}
        assert messages == {"m1", "n1", "n2"}
        left = {row["line"]: row["reason"] for row in records(self.tables, "bronze_rejects")}
        assert left == {"{": "it is not a JSON object", NO_UTF8.decode(errors="replace"): bronze.NOT_UTF8}


@pytest.fixture
def upgraded(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upgraded:
    return Upgraded(spark, tmp_path, monkeypatch)


def test_first_run_of_a_newer_version_takes_up_what_it_can_read(upgraded: Upgraded) -> None:
    assert nothing_new(upgraded.tables, []) is None
    assert upgraded.run().taken_up == 2
    upgraded.check()
    again = upgraded.run()
    assert (again.taken_up, rejects.are_due(upgraded.tables)) == (0, False)
    upgraded.check()


def test_take_up_that_is_killed_between_its_commits_is_finished_once(
    upgraded: Upgraded, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Tables.commit

    def killed_after_events(tables: Tables, name: str, *what: object, **how: object) -> None:
        commit(tables, name, *what, **how)  # type: ignore[arg-type]
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Tables, "commit", killed_after_events)
        with pytest.raises(Killed):
            upgraded.run()
    assert upgraded.tables.row_count("bronze_rejects") == 4
    upgraded.run()
    upgraded.check()


def test_two_jobs_take_up_a_line_once(upgraded: Upgraded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark writes the files, as of large tables."""
    monkeypatch.setattr(paths, "SMALL_BYTES", 0)
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(upgraded.run) for _ in range(2)]
        assert sum(job.result().taken_up for job in both) == 2
    upgraded.check()


def test_rejects_are_listed_and_retried_by_commands(upgraded: Upgraded, commands: Commands) -> None:
    listed = commands("rejects", "list", "--tables", upgraded.tables.folder, "--limit", 3)
    assert (listed.code, len(listed.stdout.splitlines())) == (0, 3)
    assert "its schema is 2, and the newest known is 1" in listed.stdout
    done = commands("rejects", "retry", "--tables", upgraded.tables.folder)
    assert (done.code, done.stdout) == (0, '{"taken_up":2}\n'), done.stderr
    upgraded.check()
    assert commands("rejects", "retry", "--tables", upgraded.tables.folder).stdout == '{"taken_up":0}\n'
