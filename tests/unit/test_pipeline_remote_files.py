"""Files of tables at an address. Here the address is a folder that is reached through a slow file system."""

import threading
import time
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from deltalake import write_deltalake
from deltalake.fs import DeltaStorageHandler
from pyarrow import fs as arrow_fs

from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.query.remote_files import RemoteFiles

NAME = "numbers"
TABLES = ("remote", "expected")
DAYS = ("2026-01-01", "2026-01-02", None)
QUERIES = (
    "SELECT * FROM {} ORDER BY n",
    "SELECT count(*) FROM {}",
    "SELECT day, count(*), sum(n) FROM {} GROUP BY day ORDER BY day",
    "SELECT text FROM {} WHERE n % 7 = 0 AND day = '2026-01-02' ORDER BY n",
    "SELECT n FROM {} WHERE added IS NULL AND n > 3 ORDER BY n",
    "SELECT n FROM {} WHERE day IS NULL ORDER BY n DESC LIMIT 3",
    "SELECT n FROM {} WHERE n < 0",
)


class SlowFiles(DeltaStorageHandler):
    """Records who opens which file."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.opened: list[tuple[str, threading.Thread]] = []

    def open_input_file(self, path: str) -> Any:
        self.opened.append((path, threading.current_thread()))
        time.sleep(0.002)  # gives the GIL away
        return super().open_input_file(path)


@pytest.fixture
def rows() -> list[pa.Table]:
    """The rows of each write. The last one has a new column."""
    numbers = range(60)
    columns = {"n": numbers, "text": [f"text {n}" for n in numbers], "day": [DAYS[n % 3] for n in numbers]}
    schema = pa.schema([("n", pa.int64()), ("text", pa.string()), ("day", pa.string())])
    table = pa.Table.from_pydict(columns, schema)
    late = table.append_column("added", pa.array([n % 2 for n in numbers], pa.int32()))
    return [table.slice(0, 20), table.slice(20, 20), late.slice(40)]


@pytest.fixture
def slow(tmp_path: Path, rows: list[pa.Table]) -> tuple[SlowFiles, RemoteFiles]:
    tables = Tables(tmp_path)
    for part in rows:
        write_deltalake(tmp_path / NAME, part, mode="append", schema_mode="merge", partition_by=["day"])
    files = SlowFiles(tmp_path.as_uri())
    tables.storage._fs = arrow_fs.PyFileSystem(files)
    return files, RemoteFiles(tables, NAME)


@pytest.fixture
def database(slow: tuple[SlowFiles, RemoteFiles], rows: list[pa.Table]) -> duckdb.DuckDBPyConnection:
    con = duckdb.connect()
    con.register("remote", slow[1])
    con.register("expected", pa.concat_tables(rows, promote_options="default"))
    return con


@pytest.mark.parametrize("query", QUERIES)
def test_duckdb_reads_the_rows_that_were_written(database: duckdb.DuckDBPyConnection, query: str) -> None:
    found, expected = (database.execute(query.format(name)).fetchall() for name in TABLES)
    assert found == expected


def test_files_of_other_partitions_are_not_opened(
    slow: tuple[SlowFiles, RemoteFiles], database: duckdb.DuckDBPyConnection
) -> None:
    database.execute("SELECT n FROM remote WHERE day = '2026-01-01'").fetchall()
    assert len(slow[0].opened) == 3
    assert all("day=2026-01-01" in path for path, _ in slow[0].opened)


def test_only_threads_of_python_open_files(
    slow: tuple[SlowFiles, RemoteFiles], database: duckdb.DuckDBPyConnection
) -> None:
    """A thread of Arrow that waits here for the GIL holds a lock for which a thread with the GIL may wait."""
    database.execute("SELECT * FROM remote").fetchall()
    assert len(slow[0].opened) == 9
    assert all(thread.name.startswith("ThreadPoolExecutor") for _, thread in slow[0].opened)


def test_a_query_that_stops_early_leaves_no_thread(
    slow: tuple[SlowFiles, RemoteFiles], database: duckdb.DuckDBPyConnection
) -> None:
    before = threading.active_count()
    reader = slow[1].scanner().to_reader()
    assert reader.read_next_batch().num_rows > 0
    del reader
    assert threading.active_count() == before
    assert len(database.execute("SELECT n FROM remote LIMIT 1").fetchall()) == 1
