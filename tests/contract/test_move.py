"""`postroom move`: a live SQLite store becomes a PostgreSQL store."""

import re
from contextlib import closing
from functools import partial
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner

from postroom import Engine, Tasks, open_store
from postroom.cli.main import cli
from postroom.contracts.move import end_move, move_store
from postroom.errors import InvalidMessage, StoreDamaged, StoreMoved, Unavailable
from postroom.stores.base import Listing
from postroom.stores.postgres.importer import differences
from postroom.stores.transaction import Transaction
from postroom.testing import check_consistency
from tests.integration.commandline import isolate, postroom
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
            engine.blocking.submit(type="tool_call", org_id="acme", payload={}, ordering_key=key or None)
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


def test_cells_whose_keys_are_empty_or_have_nul_are_moved(tmp_path: Path, database: str) -> None:
    source = f"sqlite:///{tmp_path}/queue.db"
    cells = [(f"a{character}", character.encode()) for character in ("\0", "\x01")]
    cells.append(("", b"as the position of the shipper"))
    with closing(open_store(source)) as store:
        store.write(lambda transaction: [transaction.cells.put("k", key, value) for key, value in cells])
    assert move_store(source, database)["cells"] == len(cells)
    with closing(open_store(database)) as store:
        assert {key: store.read(partial(cell_of, key)) for key, _ in cells} == dict(cells)


def cell_of(key: str, transaction: Transaction) -> bytes | None:
    return transaction.cells.get("k", key)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("UPDATE S.events SET batch = replace(batch::text, '62726f6b656e', '6d656e646564')::bytea",
         "the events differ"),
        ("DELETE FROM S.events WHERE position = (SELECT min(position) FROM S.events)", "the events differ"),
        ("UPDATE S.cells SET value = 'other' WHERE kind = 'key'", "the cells differ"),
        ("DELETE FROM S.cells WHERE kind = 'key'", "the cells differ"),
        ("UPDATE S.records SET result = 'other' WHERE result IS NOT NULL", "record .* differs"),
        ("INSERT INTO S.count_changes VALUES ('a', 'COMPLETED', 1)", "the counters differ"),
    ],
)  # fmt: skip
def test_every_kind_of_difference_is_found(
    tmp_path: Path, database: str, change: str, difference: str
) -> None:
    source = f"sqlite:///{tmp_path}/queue.db"
    filled(source)
    move_store(source, database)
    address, _, schema = database.partition("?schema=")
    with closing(open_store(source)) as one, closing(open_store(database)) as other:
        assert differences(one, other) == []
        with psycopg.connect(address) as connection:
            connection.execute(change.replace("S.", f"{schema}."))  # type: ignore[arg-type, unused-ignore]
        [found] = differences(one, other)
    assert re.fullmatch(difference, found)


def test_shipping_goes_on_into_the_same_stream_after_a_move(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(monkeypatch, tmp_path)
    source = "sqlite:///run/queue.db"
    Path("run").mkdir()
    names, _ = filled(source)
    shipped = postroom("audit", "ship", "--store", source, "--to", "audit", "--once").line["shipped"]
    with Tasks.open(source) as tasks:
        tasks.enqueue(agent="a", payload="not shipped before the move")
    assert postroom("move", source, database).code == 0
    with Tasks.open(database) as tasks:
        tasks.retry(names[1])
        newest = tasks.store.newest_event()
    again = postroom("audit", "ship", "--store", database, "--to", "audit", "--once")
    assert again.line == {"shipped": newest - shipped}, again.errors
    for command in (
        ("verify", "audit", "--store", database),
        ("audit", "verify", "audit", "--store", database),
    ):
        proved = postroom(*command)
        assert proved.code == 0, proved
    numbers = [line["seq"] for line in postroom("audit", "query", "audit").lines]
    assert numbers == list(range(1, newest + 1))


def test_move_needs_an_empty_target_and_a_failure_keeps_the_source(tmp_path: Path, database: str) -> None:
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
    with pytest.raises(InvalidMessage, match="both stores would deliver"):
        end_move(source, database)
    refused = CliRunner().invoke(cli, ["move", "--undo", source])
    assert (refused.exit_code, "say where the move went" in refused.output) == (2, True)
    undone = CliRunner().invoke(cli, ["move", "--undo", "--force", source], catch_exceptions=False)
    assert undone.exit_code == 0
    with Tasks.open(source) as tasks:
        tasks.enqueue(agent="a", payload=1)


def test_source_stays_closed_when_the_copy_is_in_the_target(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"sqlite:///{tmp_path}/queue.db"
    filled(source)
    monkeypatch.setattr("postroom.contracts.move.differences", lambda *_: ["the counters differ"])
    with pytest.raises(StoreDamaged, match="the counters differ"):
        move_store(source, database)
    with Tasks.open(source) as tasks, pytest.raises(StoreMoved):
        tasks.enqueue(agent="a", payload=1)


def test_source_takes_writes_again_when_the_copy_failed(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"sqlite:///{tmp_path}/queue.db"
    filled(source)

    def fail(*_: object) -> None:
        raise Unavailable("the copy failed")

    monkeypatch.setattr("postroom.contracts.move.import_store", fail)
    with pytest.raises(Unavailable, match="the copy failed"):
        move_store(source, database)
    with Tasks.open(source) as tasks:
        tasks.enqueue(agent="a", payload=1)
