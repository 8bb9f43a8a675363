"""Files of earlier versions: `tests/data/store-v0001.db` and so on were written by those versions, and stay.

Each holds, in queue `triage`: a waiting task, one with a name of its own and a key, a delayed one, a claimed
one that failed before, a completed one, a dead letter, and a cancelled one.
"""

import shutil
from pathlib import Path

import pytest

from postroom import Tasks
from postroom.errors import StoreDamaged, WriteFailed
from postroom.stores import sqlite
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
    assert versions == list(sqlite._migrations())[:-1]


def open_tasks(path: Path) -> Tasks:
    return Tasks.open(f"sqlite:///{path}", clock=ManualClock())


def scripts_with(text: str) -> dict[int, str]:
    known = sqlite._migrations()
    return {**known, max(known) + 1: text}


def test_a_store_of_an_earlier_version_is_read_and_goes_on(old_store: Path) -> None:
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


def test_a_later_version_takes_a_step_forward_and_keeps_everything(
    old_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tasks(old_store) as tasks:
        before = [tasks.get(line.task_id) for line in tasks.find()]
    later = scripts_with(NEXT)
    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "_migrations", lambda: later)
        with open_tasks(old_store) as tasks:
            assert [tasks.get(line.task_id) for line in tasks.find()] == before
            assert tasks.enqueue(agent="triage", payload="new")
    with open_tasks(old_store) as tasks, pytest.raises(StoreDamaged, match="written by a newer postroom"):
        tasks.status()


def test_a_step_that_fails_half_way_leaves_the_file_as_it_was(
    old_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = scripts_with(NEXT + "DROP TABLE there_is_no_such_table;")
    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "_migrations", lambda: broken)
        with open_tasks(old_store) as tasks, pytest.raises(WriteFailed, match="no such table"):
            tasks.enqueue(agent="triage", payload=1)
    with open_tasks(old_store) as tasks:
        assert len(tasks.find()) == 7
