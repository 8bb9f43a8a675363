"""Forks, removed files and truncated wake-up files beside an open handle."""

import os
import sqlite3
import tempfile
import threading
import time
from pathlib import Path

import pytest

from postroom import Tasks
from postroom.errors import StoreDamaged, StoreUnwritable
from postroom.message import Envelope
from postroom.stores.base import ByIds
from postroom.stores.own_ids import EARLIER_RULE, IDS_FACT, UPGRADE_US
from postroom.stores.sqlite import known
from postroom.stores.sqlite import store as sqlite
from postroom.stores.sqlite.ledger import FOLD_EVENTS
from postroom.stores.sqlite.snapshot import SqliteSnapshot
from postroom.testing import ManualClock, check_consistency
from tests.children import no_child_left, run
from tests.waiting import HANG_GUARD_S

__all__ = ["no_child_left"]  # a fixture

EACH = 20


def open_tasks(folder: Path) -> Tasks:
    return Tasks.open(f"sqlite:///{folder}/queue.db")


def wait_for(pid: int) -> None:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.usefixtures("no_child_left")
def test_a_child_can_write_after_its_parent_closed_the_store(tmp_path: Path) -> None:
    """Closing the last connection removes the WAL, so the parent must know that the child has it open."""
    tasks = open_tasks(tmp_path)
    tasks.enqueue(agent="a", payload="parent")
    child_wrote, tell_parent = os.pipe()
    parent_closed, tell_child = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            tasks.enqueue(agent="a", payload="child")
            os.write(tell_parent, b"1")
            os.read(parent_closed, 1)
            for number in range(EACH):
                tasks.enqueue(agent="a", payload=number)
            [task] = tasks.claim(agent="a")
            tasks.complete(task.task_id, task.lease, "done")
            os._exit(0)
        finally:
            os._exit(1)
    os.read(child_wrote, 1)
    tasks.close()
    os.write(tell_child, b"1")
    wait_for(pid)
    with open_tasks(tmp_path) as again:
        states = again.status().agents["a"].states
        assert states == {"QUEUED": EACH + 1, "COMPLETED": 1}
        check_consistency(again.store)
    for fd in (child_wrote, tell_parent, parent_closed, tell_child):
        os.close(fd)


@pytest.mark.usefixtures("no_child_left")
def test_parent_and_child_can_write_after_a_fork_next_to_a_writing_thread(tmp_path: Path) -> None:
    tasks = open_tasks(tmp_path)
    ending = threading.Event()

    def write() -> None:
        while not ending.is_set():
            tasks.enqueue(agent="thread", payload=1)

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            try:
                tasks.enqueue(agent="child", payload=1)
                os._exit(0)
            finally:
                os._exit(1)
        wait_for(pid)
    ending.set()
    thread.join(HANG_GUARD_S)
    assert not thread.is_alive()
    assert tasks.status().agents["child"].depth == 5
    check_consistency(tasks.store)
    tasks.close()


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_removed_file_is_not_written_to(tmp_path: Path, how: str) -> None:
    tasks = open_tasks(tmp_path)
    tasks.enqueue(agent="a", payload=1)
    path = tmp_path / "queue.db"
    if how == "removed":
        path.unlink()
    else:
        path.rename(tmp_path / "elsewhere.db")
    if how == "replaced":
        path.write_bytes(b"")
    time.sleep(sqlite.FILE_LOOK_S)
    with pytest.raises(StoreDamaged, match="was moved or removed while it was in use"):
        tasks.enqueue(agent="a", payload=2)
    assert tasks.store.trouble
    tasks.close()


def test_a_truncated_wake_up_file_does_no_harm(tmp_path: Path) -> None:
    with open_tasks(tmp_path) as tasks:
        tasks.enqueue(agent="a", payload=1)
        heard = threading.Event()
        with tasks.notifier.subscribed("a", heard.set):
            os.truncate(tmp_path / "queue.db.bells" / "a", 0)
            tasks.enqueue(agent="a", payload=2)
            assert heard.wait(HANG_GUARD_S)
        assert len(tasks.claim(agent="a", limit=2)) == 2


@pytest.mark.usefixtures("no_child_left")
@pytest.mark.skipif(os.getuid() != 0, reason="another user was NOT tested: this needs root")
def test_a_folder_of_another_user_is_not_damage() -> None:
    with tempfile.TemporaryDirectory() as folder:  # `tmp_path` is in a folder that only this user enters
        path = Path(folder)
        path.chmod(0o755)
        with open_tasks(path) as tasks:
            tasks.enqueue(agent="a", payload=1)
        (path / "queue.db").chmod(0o644)

        def as_another_user() -> None:
            os.setuid(65_534)
            for use in (lambda: open_tasks(path).status(), lambda: SqliteSnapshot(path / "queue.db")):
                with pytest.raises(StoreUnwritable, match=r"queue\.db cannot be opened: Permission denied"):
                    use()

        run(as_another_user)


def test_upgraded_store_keeps_old_ids_and_hides_numbers_in_new_ones(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "queue.db"

    def insert(store: sqlite.SqliteStore) -> str:
        envelope = Envelope(queue="org:acme", payload=b"{}")
        return store.write(lambda transaction: transaction.insert([envelope]))[0].message_id

    def is_hidden(store: sqlite.SqliteStore, name: str) -> bool:
        [record] = store.find(ByIds((name,)))
        return int(name[-12:], 16) >> 18 & 0xFFFF != record.seq

    sqlite.SqliteStore(path, clock=clock).close()
    store = sqlite.SqliteStore(path, clock=clock)
    store.identity()
    with sqlite3.connect(path) as file:
        file.execute("UPDATE facts SET value = ? WHERE name = ?", (EARLIER_RULE.text, IDS_FACT))
    store.close()
    store = sqlite.SqliteStore(path, clock=clock)
    names, newest = [insert(store)], store.newest_event()
    store.close()
    with sqlite3.connect(path) as file:
        file.execute("DELETE FROM facts WHERE name = ?", (IDS_FACT,))
    store = sqlite.SqliteStore(path, clock=clock)
    names.append(insert(store))
    assert store.read(lambda transaction: transaction.ids.rule).plain_max == newest
    clock.advance(UPGRADE_US / 1_000_000)
    names.append(insert(store))
    assert [is_hidden(store, name) for name in names] == [False, False, True]
    assert [event.message_id for event in store.events() if event.kind == "created"] == names
    store.close()


def test_a_read_adds_to_the_counters_of_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read decoded the counters of all queues: 100,000 of one organization cost others 0.6 s."""
    often = FOLD_EVENTS // 20
    url, clock = f"sqlite:///{tmp_path / 'queue.db'}", ManualClock()
    with Tasks.open(url, clock=clock) as writer, Tasks.open(url, clock=clock) as reader:
        read_again = 0
        for step in range(60):
            agent = f"agent{step % 7}"
            writer.enqueue_many({"agent": agent, "payload": number} for number in range(often + step % 3))
            for task in writer.claim(agent=f"agent{step % 5}", limit=2):
                writer.complete(task.task_id, task.lease)
            if step % 20 == 19:
                clock.advance(8 * 86_400)
                writer.purge()
                writer.forget_events(writer.store.newest_event())
            if step % 4 == 3:
                counted = reader.store.depths()
                with Tasks.open(url, clock=clock) as fresh:
                    assert counted == fresh.store.depths() == writer.store.depths()
                with monkeypatch.context() as watched:
                    watched.setattr(known, "_decode_depths", lambda _: pytest.fail("read again"))
                    assert reader.store.depths() == counted
                read_again += 1
        assert read_again == 15


def test_counters_are_right_after_a_read_of_them_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Tasks.open(f"sqlite:///{tmp_path / 'queue.db'}") as tasks:
        for _ in range(3):
            tasks.enqueue(agent="a", payload=1)
            counted = tasks.store.depths()
            tasks.enqueue_many({"agent": "a", "payload": 1} for _ in range(2))
            with monkeypatch.context() as failing:
                failing.setattr(known, "_decode_counts", lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    tasks.store.depths()
            assert tasks.store.depths() == {"a": {"P2": counted["a"]["P2"] + 2}}
