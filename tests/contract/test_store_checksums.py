"""One changed byte of a value in the file of a store: the check of the store names the value."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from postroom import Tasks
from postroom.message import Envelope
from postroom.stores.base import CHUNKS
from postroom.stores.sqlite.snapshot import SqliteSnapshot
from postroom.stores.transaction import Transaction
from postroom.testing import ManualClock

VALUES = {
    "records": ("type", "parent_message_id", "key", "sender", "payload", "result", "trail"),
    "events": ("counts", "batch"),
    "cells": ("value",),
    "chunks": ("value",),
}
FLIPPED_AT_MOST = 24  # bytes at the beginning of a value, so that they are in one page
UNCHECKED = (
    "SELECT count(*) FROM records WHERE payload_crc IS NULL",
    "SELECT count(*) FROM records WHERE result NOT NULL AND result_crc IS NULL",
    "SELECT count(*) FROM records WHERE trail NOT NULL AND trail_crc IS NULL",
    "SELECT count(*) FROM events WHERE crc IS NULL",
    "SELECT count(*) FROM cells WHERE crc IS NULL",
    "SELECT count(*) FROM chunks WHERE crc IS NULL",
)


def put_cells(transaction: Transaction) -> None:
    transaction.cells.put("note", "a", b"the first words")
    transaction.cells.put("note", "a", b"other words of a cell")
    transaction.cells.put(CHUNKS, "a", b"words of a chunk")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose values were written in every way."""
    path, clock = tmp_path_factory.mktemp("filled") / "queue.db", ManualClock()
    with Tasks.open(f"sqlite:///{path}", clock=clock) as tasks:
        tasks.enqueue(agent="ada", payload="claimed alone")
        tasks.enqueue_many([{"agent": "ada", "payload": f"one of many {n}"} for n in range(6)])
        tasks.enqueue(agent="ada", payload="named", task_id="named", idempotency_key="issue-7", sender="boss")
        tasks.enqueue(agent="ada", payload="delayed words", delay_s=3600)
        [one] = tasks.claim(agent="ada")
        tasks.complete(one.task_id, one.lease, "result alone")
        same = tasks.claim(agent="ada", limit=2)
        tasks.complete_many([(each.task_id, each.lease, "same result") for each in same])
        different = tasks.claim(agent="ada", limit=2)
        tasks.complete_many([(each.task_id, each.lease, f"result {n}") for n, each in enumerate(different)])
        for word in ("first failure", "second failure"):
            [failed] = tasks.claim(agent="ada")
            tasks.fail(failed.task_id, failed.lease, word)
            clock.advance(3600)
            tasks.sweep()
        alike = [
            Envelope(queue="bob", payload=b'"alike"', type="kind of message", parent_message_id="its parent")
        ] * 2
        tasks.store.write(lambda transaction: transaction.insert(alike))
        tasks.store.write(lambda transaction: transaction.insert(alike[:1]))
        tasks.store.write(put_cells)
        tasks.enqueue(agent="ada", payload="last words")
    with closing(sqlite3.connect(path)) as connection:
        assert [connection.execute(query).fetchone() for query in UNCHECKED] == [(0,)] * len(UNCHECKED)
    assert faults(path) == []
    return path


def faults(path: Path) -> list[str]:
    with SqliteSnapshot(path, at_rest=True) as snapshot:
        return snapshot.faults()


def values_of(path: Path) -> dict[tuple[str, str, str], bytes]:
    """The values of a file, by table, column and number."""
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as connection:
        return {
            (table, column, key): value
            for table, columns in VALUES.items()
            for column in columns
            for key, value in connection.execute(
                f"SELECT {'seq' if table in ('records', 'events') else 'kind || key'}, "  # noqa: S608
                f"CAST({column} AS BLOB) FROM {table} WHERE length({column}) > 0"
            )
        }


def places_of(content: bytes, value: bytes) -> Iterator[int]:
    """Where a value stands in a file: also in bytes that are not in use any more."""
    place = content.find(value)
    while place >= 0:
        yield place
        place = content.find(value, place + 1)


@pytest.mark.parametrize(("table", "column"), [(table, each) for table in VALUES for each in VALUES[table]])
def test_every_value_with_a_changed_byte_is_named(
    filled: Path, tmp_path: Path, table: str, column: str
) -> None:
    path = Path(shutil.copy(filled, tmp_path))
    content, before = path.read_bytes(), values_of(path)
    found = set()
    values = {key: value for (*where, key), value in before.items() if where == [table, column]}
    for key, value in values.items():
        head = value[:FLIPPED_AT_MOST]
        for place in places_of(content, head):
            at = place + len(head) // 2
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            if values_of(path) == before:
                continue  # an old copy of the value, in bytes that are free
            found.add(key)
            said = faults(path)
            assert any("the checksum does not match" in fault for fault in said), (head, said)
    assert found == {*values} != set()
    path.write_bytes(content)
    assert faults(path) == []


def test_values_of_an_earlier_version_are_not_checked(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    shutil.copy(Path(__file__).parents[1] / "data" / "store-v0007.db", path)
    with Tasks.open(f"sqlite:///{path}", clock=ManualClock()) as tasks:
        [task, _] = tasks.claim(agent="triage", limit=2)
        tasks.fail(task.task_id, task.lease, "failed")
    assert faults(path) == []
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE records SET payload = '?' WHERE result NOT NULL")
        connection.execute("UPDATE records SET trail = replace(trail, 'failed', 'fadled')")
        connection.commit()
    [fault] = faults(path)
    assert fault.startswith("the trail of record")


@pytest.mark.parametrize(
    ("table", "column"),
    [
        *(("records", each) for each in ("type", "parent_message_id", "key", "sender", "result_crc")),
        *((table, each) for table in ("cells", "chunks") for each in ("kind", "key", "crc")),
    ],
)
def test_a_value_of_another_type_is_named(filled: Path, tmp_path: Path, table: str, column: str) -> None:
    """One changed bit of a row makes a blob of a text."""
    path = Path(shutil.copy(filled, tmp_path))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE {table} SET {column} = CAST({column} AS BLOB) WHERE length({column}) > 0")  # noqa: S608
        connection.commit()
    assert any("the checksum does not match" in fault for fault in faults(path))
