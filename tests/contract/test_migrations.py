"""Files of earlier versions: `tests/data/store-v0001.db` and so on were written by those versions, and stay.

Each holds, in queue `triage`: a waiting task, one with a name of its own and a key, a delayed one, a claimed
one that failed before, a completed one, a dead letter, and a cancelled one.
"""

import json
import shutil
import sqlite3
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import apsw
import pytest

from postroom import Tasks
from postroom.contracts.tasks.tasks import DECISIONS, STATUS, TaskInfo
from postroom.errors import StoreDamaged, WriteFailed
from postroom.stores.sqlite import file
from postroom.testing import ManualClock

GOLDEN = sorted(Path(__file__).parents[1].glob("data/store-v*.db"))
NEXT = "ALTER TABLE records ADD COLUMN colour TEXT NOT NULL DEFAULT 'grey';"


@pytest.fixture(params=GOLDEN, ids=lambda path: path.stem)
def old_store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "queue.db"
    shutil.copy(request.param, path)
    return path


def test_there_is_a_file_of_every_earlier_version() -> None:
    versions = [int(path.stem.removeprefix("store-v")) for path in GOLDEN]
    assert versions == list(file.migrations())[:-1]


def open_tasks(path: Path) -> Tasks:
    return Tasks.open(f"sqlite:///{path}", clock=ManualClock())


def scripts_with(text: str) -> dict[int, str]:
    known = file.migrations()
    return {**known, max(known) + 1: text}


def test_a_store_of_an_earlier_version_can_be_read_and_written(old_store: Path) -> None:
    with open_tasks(old_store) as tasks:
        status = tasks.status().agents["triage"]
        assert status.states == {
            "QUEUED": 2,
            "SCHEDULED": 1,
            "PROCESSING": 1,
            "COMPLETED": 1,
            "DEAD_LETTER": 1,
            "CANCELLED": 1,
        }
        assert tasks.enqueue(agent="triage", payload=0, idempotency_key="issue-7") == "named"
        assert [task.payload for task in tasks.claim(agent="triage", limit=10)] == ["waiting", "named"]
        dead = next(line for line in tasks.find(agent="triage", state="DEAD_LETTER"))
        assert tasks.get(dead.task_id).errors == ["no", "no"]
        numbers = [event.seq for event in tasks.events()]
        assert numbers == list(range(1, len(numbers) + 1))


def test_a_migration_keeps_every_record(old_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tasks(old_store) as tasks:
        before = [tasks.get(line.task_id) for line in tasks.find()]
    later = scripts_with(NEXT)
    with monkeypatch.context() as patch:
        patch.setattr(file, "migrations", lambda: later)
        with open_tasks(old_store) as tasks:
            assert [tasks.get(line.task_id) for line in tasks.find()] == before
            assert tasks.enqueue(agent="triage", payload="new")
    with open_tasks(old_store) as tasks, pytest.raises(StoreDamaged, match="written by a newer postroom"):
        tasks.status()


def test_an_upgrade_keeps_a_copy_of_the_earlier_format(old_store: Path) -> None:
    with closing(sqlite3.connect(old_store)) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
    with open_tasks(old_store) as tasks:
        assert tasks.enqueue(agent="triage", payload="new")
    copy = old_store.with_name(f"queue.db.before-{version}")
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA user_version").fetchone() == (version,)
        assert connection.execute("SELECT count(*) FROM records").fetchone() == (7,)
    assert copy.stat().st_mode & 0o777 == 0o600
    copy.unlink()
    with open_tasks(old_store) as tasks:  # nothing to upgrade, so nothing to copy
        assert tasks.enqueue(agent="triage", payload="new")
    assert not copy.exists()


def test_without_room_for_the_copy_there_is_no_upgrade(
    old_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise apsw.FullError("database or disk is full")

    before = old_store.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(file, "copy_database", fail)
        with open_tasks(old_store) as tasks, pytest.raises(WriteFailed, match="before-"):
            tasks.enqueue(agent="triage", payload=1)
    assert old_store.read_bytes()[100:] == before[100:]  # the header says WAL from now on
    with open_tasks(old_store) as tasks:
        assert len(tasks.find()) == 7


def test_a_migration_that_fails_changes_nothing(old_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = scripts_with(NEXT + "DROP TABLE there_is_no_such_table;")
    with monkeypatch.context() as patch:
        patch.setattr(file, "migrations", lambda: broken)
        with open_tasks(old_store) as tasks, pytest.raises(WriteFailed, match="no such table"):
            tasks.enqueue(agent="triage", payload=1)
    with open_tasks(old_store) as tasks:
        assert len(tasks.find()) == 7


# ---- foreman's table ---------------------------------------------------------------------------------

COLUMNS = [
    "task_id", "agent_url", "status", "payload", "created_at", "claimed_at", "completed_at", "result",
    "retry_count", "last_heartbeat",
]  # fmt: skip


def foreman_rows(path: Path) -> list[dict[str, Any]]:
    """The view as any SQLite program sees it: here the one of the standard library."""
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute("SELECT * FROM task_queue ORDER BY created_at")]


def as_foreman(info: TaskInfo) -> dict[str, Any]:
    def text(moment: datetime | None) -> str | None:
        return None if moment is None else f"{moment:%Y-%m-%dT%H:%M:%S.%f}Z"

    return {
        "task_id": info.task_id,
        "agent_url": info.agent,
        "status": info.status,
        "payload": json.dumps(info.payload),
        "created_at": text(info.created_at),
        "claimed_at": text(info.claimed_at),
        "completed_at": text(info.completed_at),
        "result": None if info.result is None else json.dumps(info.result, separators=(",", ":")),
        "retry_count": info.retry_count,
        "last_heartbeat": text(info.last_heartbeat),
    }


def by_id(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["task_id"]: row for row in rows}


def test_a_store_of_an_earlier_version_has_foremans_table(old_store: Path) -> None:
    with open_tasks(old_store) as tasks:
        expected = [as_foreman(tasks.get(line.task_id)) for line in tasks.find()]
    rows = foreman_rows(old_store)
    assert list(rows[0]) == COLUMNS
    assert by_id(rows) == by_id(expected)
    assert {row["status"] for row in rows} == {"pending", "claimed", "completed", "failed", "cancelled"}


def test_foremans_table_follows_every_state_and_leaves_decisions_out(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    with open_tasks(path) as tasks:
        task_id = tasks.enqueue(agent="triage", payload="claimed and done")
        [task] = tasks.claim(agent="triage")
        tasks.heartbeat(task.task_id, task.lease)
        tasks.complete(task.task_id, task.lease, {"label": "bug"})
        tasks.open_decision(task_id)
        [decision] = tasks.claim(agent=DECISIONS)
        tasks.settle(decision)
        [row] = foreman_rows(path)
        assert row == as_foreman(tasks.get(task_id))
        assert row["status"] == "done"


def test_foremans_status_of_each_state_is_the_contracts(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    with open_tasks(path) as tasks:
        for state in STATUS:
            tasks.enqueue(agent="triage", payload=1, task_id=state)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE records SET state = message_id")
        connection.commit()
    assert {row["task_id"]: row["status"] for row in foreman_rows(path)} == STATUS


@pytest.mark.parametrize(
    "statement", ["UPDATE task_queue SET status = 'done'", "DELETE FROM task_queue"], ids=["update", "delete"]
)
def test_foremans_table_can_only_be_read(old_store: Path, statement: str) -> None:
    with open_tasks(old_store) as tasks:
        tasks.status()
    with closing(sqlite3.connect(old_store)) as connection, pytest.raises(sqlite3.Error, match="view"):
        connection.execute(statement)
