"""The same jobs behind a Spark Connect server, from a process that has no JVM."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.jobs import CHECKPOINTS
from postroom.pipeline.query.views import create_views, plain_name
from postroom.pipeline.silver.tables import SILVER
from tests.spark.cluster import do_at
from tests.spark.commands import Done, in_its_own_process
from tests.spark.conftest import TablesOf
from tests.spark.plainrows import all_rows, records, rows_of
from tests.spark.segmentfiles import sealed_segments
from tests.spark.stories import BAD_LINES, write_segment

NO_JAVA = {"JAVA_HOME": "/nowhere"}


def call(*words: object) -> Done:
    """With no Java to be found."""
    return in_its_own_process(*words, **NO_JAVA)


def test_a_server_makes_the_same_tables(tables_of: TablesOf, connect: str, tmp_path: Path) -> None:
    """Bronze and silver. Lines that are no events are kept.

    `make crash` has every job, and compares every table, at a server that has no postroom.
    """
    history, here = tables_of()
    events, tables = tmp_path / "events", Tables(tmp_path / "tables")
    shutil.copytree(history, events)
    write_segment(events, len(sealed_segments(history)) + 1, BAD_LINES)
    do_at(connect, tables.folder, f"silver:{events}", **NO_JAVA)
    rows = all_rows(tables)
    assert rows.pop("bronze_rejects").total() == sum(bad != b"" for bad in BAD_LINES)
    assert set(rows) == {"bronze_events", *SILVER}
    assert rows == {name: rows_of(here, name) for name in rows}


def test_a_stream_goes_on_at_a_server_without_structured_streaming(
    tables_of: TablesOf, connect: str, tmp_path: Path
) -> None:
    events, here = tables_of()
    shutil.copytree(here.folder, tmp_path / "tables")
    shutil.rmtree(tmp_path / "tables" / "gold_sla")
    done = call("stream", "--events", events, "--tables", tmp_path / "tables", "--remote", connect)
    assert done.code == 0, done.stderr
    assert not (tmp_path / "tables" / CHECKPOINTS).exists()
    assert all_rows(Tables(tmp_path / "tables")) == all_rows(here)


@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
def test_views_with_plain_names_stand_in_the_session_of_a_client(tables_of: TablesOf, connect: str) -> None:
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    _, tables = tables_of()
    client: Any = ConnectSession(connect)
    other: Any = ConnectSession(connect)
    try:
        views = create_views(client, tables)
        assert views == sorted(plain for name in tables.names() if (plain := plain_name(name)))
        found = client.sql("SELECT outcome, count(*) AS n FROM messages GROUP BY outcome").collect()
        assert dict(map(tuple, found)) == Counter(
            row["outcome"] for row in records(tables, "silver_messages")
        )
        assert {row["viewName"] for row in client.sql("SHOW VIEWS").collect()} == set(views)
        assert other.sql("SHOW VIEWS").collect() == []
    finally:
        for each in (client, other):
            each.client.close()


@pytest.mark.parametrize(
    ("url", "code", "sentence"),
    [
        ("sc://127.0.0.1:1", 1, "there is no Spark Connect server at sc://127.0.0.1:1: Connection refused"),
        (
            "spark://127.0.0.1",
            2,
            "'spark://127.0.0.1' is not a Spark Connect server: it has the form sc://HOST:PORT",
        ),
        ("sc://host:port", 2, "'sc://host' is not a Spark Connect server: it has the form sc://HOST:PORT"),
    ],
)
def test_an_unreachable_server_is_reported_in_one_line(
    tmp_path: Path, url: str, code: int, sentence: str
) -> None:
    write_segment(tmp_path / "events", 1, [])
    done = call("run", "--events", tmp_path / "events", "--tables", tmp_path / "tables", "--remote", url)
    assert (done.code, done.stderr.splitlines()[-1]) == (code, f"postroom: {sentence}")
