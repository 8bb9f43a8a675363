"""The same jobs behind a Spark Connect server, from a process that has no JVM."""

import shutil
from pathlib import Path

import pytest

from postroom.pipeline.segments import sealed_segments
from postroom.pipeline.tables import Tables
from tests.spark.commands import Done, in_its_own_process
from tests.spark.conftest import TablesOf
from tests.spark.plainrows import all_rows
from tests.spark.stories import BAD_LINES, write_segment


def call(*words: object) -> Done:
    """With no Java to be found."""
    return in_its_own_process(*words, JAVA_HOME="/nowhere")


def test_a_server_makes_the_same_tables(tables_of: TablesOf, connect: str, tmp_path: Path) -> None:
    """Every table, gold included. Lines that are no events are kept; a wrong question stays one sentence.

    `make crash` does it with a server that has no postroom, in two runs: the second follows the first.
    """
    history, here = tables_of()
    events, tables = tmp_path / "events", Tables(tmp_path / "tables")
    shutil.copytree(history, events)
    write_segment(events, len(sealed_segments(history)) + 1, BAD_LINES)
    done = call("run", "--events", events, "--tables", tables.folder, "--remote", connect)
    assert done.code == 0, done.stderr
    wrong = call("sql", "--tables", tables.folder, "--remote", connect, "SELECT nobody FROM silver_spans")
    rows, known = all_rows(tables), all_rows(here)
    assert rows.pop("bronze_rejects").total() == sum(bad != b"" for bad in BAD_LINES)
    assert known.pop("bronze_rejects").total() == 0
    assert rows == known
    assert wrong.code == 2
    assert len(wrong.stderr.splitlines()) == 2  # that Spark is started, and what it says
    assert "nobody" in wrong.stderr


@pytest.mark.parametrize(
    ("url", "code", "sentence"),
    [
        ("sc://127.0.0.1:1", 1, "there is no Spark Connect server at sc://127.0.0.1:1: Connection refused"),
        (
            "spark://127.0.0.1",
            2,
            "'spark://127.0.0.1' is no Spark Connect server: it has the form sc://HOST:PORT",
        ),
        ("sc://host:port", 2, "'sc://host:port' is no Spark Connect server: it has the form sc://HOST:PORT"),
    ],
)
def test_a_server_that_is_not_there_is_said_in_one_sentence(
    tmp_path: Path, url: str, code: int, sentence: str
) -> None:
    done = call("sql", "--tables", tmp_path, "--remote", url, "SELECT 1")
    assert (done.code, done.stderr.splitlines()[-1]) == (code, f"postroom: {sentence}")


def test_a_stream_is_refused(tmp_path: Path) -> None:
    done = call("stream", "--events", tmp_path, "--tables", tmp_path, "--remote", "sc://127.0.0.1:1")
    assert done.code == 2
    assert "a stream has no --remote" in done.stderr
