"""`postroom move`: a live SQLite store becomes a PostgreSQL store."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from postroom import Engine, Tasks
from postroom.cli.main import cli
from postroom.contracts.move import end_move, move_store
from postroom.errors import InvalidMessage, StoreMoved
from postroom.stores.base import Listing
from postroom.testing import check_consistency
from tests.postgresserver import database, postgres

__all__ = ["database", "postgres"]  # fixtures


def filled(url: str) -> tuple[list[str], int]:
    """A store with a waiting, a leased, a completed, a dead and a delayed task, and messages of an engine."""
    with Tasks.open(url) as tasks:
        names = [tasks.enqueue(agent="a", payload={"n": n}, max_retries=0) for n in range(3)]
        names.append(tasks.enqueue(agent="a", payload="x\0", task_id="mine", idempotency_key="k"))
        names.append(tasks.enqueue(agent="a", payload=1, delay_s=3_600))
        done, dead, held = tasks.claim(agent="a", limit=3)
        tasks.complete(done.task_id, done.lease, {"ok": True})
        tasks.fail(dead.task_id, dead.lease, "broken")
    with Engine.open(url) as engine:
        for key in ("o", "o", ""):
            fields = {"ordering_key": key} if key else {}
            engine.blocking.submit(type="tool_call", org_id="acme", payload={}, **fields)
    return names, held.lease


def test_everything_moves_and_goes_on(tmp_path: Path, database: str) -> None:
    source = f"sqlite:///{tmp_path}/queue.db"
    names, lease = filled(source)
    with Tasks.open(source) as tasks:
        before = tasks.store.find(Listing()), tasks.store.events(0, 1_000), tasks.store.count()
        other = Tasks.open(source)  # a process that is at work meanwhile
        other.get(names[0])
        copied = move_store(source, database)
        assert copied["records"] == len(before[0])
        for handle in (tasks, other):
            with pytest.raises(StoreMoved, match="postgres://"):
                handle.enqueue(agent="a", payload=1)
            assert handle.get("mine").payload == "x\0"
        other.close()
    with Tasks.open(database) as moved:
        assert (moved.store.find(Listing()), moved.store.events(0, 1_000), moved.store.count()) == before
        assert moved.enqueue(agent="a", payload=2, idempotency_key="k") == "mine"
        moved.complete(names[2], lease, {"late": True})
        assert [task.task_id for task in moved.claim(agent="a", limit=9)] == ["mine"]
        moved.retry(names[1])
        assert [event.seq for event in moved.store.events(0, 1_000)] == list(
            range(1, moved.store.newest_event() + 1)
        )
        check_consistency(moved.store)


def test_target_must_be_empty_and_a_failed_move_leaves_the_source_as_it_was(
    tmp_path: Path, database: str
) -> None:
    source = f"sqlite:///{tmp_path}/queue.db"
    filled(source)
    with Tasks.open(database) as tasks:
        tasks.enqueue(agent="a", payload=1)
    with pytest.raises(InvalidMessage, match="not empty"):
        move_store(source, database)
    with Tasks.open(source) as tasks:
        tasks.enqueue(agent="a", payload=1)


def test_a_second_move_is_refused_and_the_source_still_takes_no_writes(tmp_path: Path, database: str) -> None:
    source = f"sqlite:///{tmp_path}/queue.db"
    filled(source)
    move_store(source, database)
    with pytest.raises(StoreMoved, match="postgres://"):
        move_store(source, database)
    again = CliRunner().invoke(cli, ["move", source, database])
    assert (again.exit_code, "postroom move --undo" in again.output) == (1, True)
    with Tasks.open(source) as tasks, pytest.raises(StoreMoved):
        tasks.enqueue(agent="a", payload=1)


def test_command_moves_and_says_what(tmp_path: Path, database: str) -> None:
    source = f"sqlite:///{tmp_path}/queue.db"
    filled(source)
    done = CliRunner().invoke(cli, ["--json", "move", source, database], catch_exceptions=False)
    assert (done.exit_code, '"verified":true' in done.output.replace(" ", "")) == (0, True)
    with Tasks.open(source) as tasks, pytest.raises(StoreMoved):
        tasks.enqueue(agent="a", payload=1)
    end_move(source)
    with Tasks.open(source) as tasks:
        tasks.enqueue(agent="a", payload=1)
