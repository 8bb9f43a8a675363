"""Checkpoints: a thread moves the pages of the WAL into the database beside the commits."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from postroom.errors import WriteFailed
from postroom.message import Envelope
from postroom.stores.sqlite import checkpoints
from postroom.stores.sqlite.checkpoints import CheckpointLimits
from postroom.stores.sqlite.store import SqliteStore
from postroom.stores.transaction import Claim
from tests import children
from tests.children import no_child_left
from tests.smalldisk import fill, small_disk
from tests.waiting import HANG_GUARD_S

__all__ = ["no_child_left", "small_disk"]  # fixtures

FEW_PAGES = 20
OFTEN = CheckpointLimits(wal_pages=FEW_PAGES, look_events=1)
MANY = 400  # commits, each of two pages or more
HEADER_BYTES, FRAME_BYTES = 32, 24 + 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "queue.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path, checkpoints=OFTEN)
    yield store
    store.close()


def insert(store: SqliteStore, count: int = 1) -> None:
    for _ in range(count):
        store.write(lambda transaction: transaction.insert([Envelope(queue="q", payload=b"0")]))


def wal_pages(path: Path) -> int:
    return (path.with_name("queue.db-wal").stat().st_size - HEADER_BYTES) // FRAME_BYTES


def without_wal(path: Path) -> apsw.Connection:
    """A connection that sees the file alone.

    It is one of apsw, as those of the store: another SQLite in the process would end their locks.
    """
    return apsw.Connection(f"file:{path}?immutable=1", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)


def wait_for_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == "postroom-checkpoint":
            thread.join(HANG_GUARD_S)


def test_the_wal_is_reused_after_each_checkpoint(store: SqliteStore, path: Path) -> None:
    for _ in range(MANY // 10):
        insert(store, 10)
        wait_for_thread()
    assert wal_pages(path) < 5 * FEW_PAGES  # the file keeps its longest size; 800 pages were written
    assert store.count() == {"q": {"QUEUED": MANY}}


def test_a_thread_checkpoints_without_a_commit(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of commits are counted, and the database alone holds the tasks."""
    in_a_commit: list[int] = []
    monkeypatch.setattr(
        checkpoints, "_checkpoint", lambda connection: _count_commits(connection, in_a_commit)
    )
    insert(store, MANY)
    wait_for_thread()
    assert in_a_commit == []
    alone = without_wal(path)
    assert alone.execute("SELECT count(*) > 0 FROM records").fetchone() == (1,)
    alone.close()


def _count_commits(connection: apsw.Connection, in_a_commit: list[int]) -> None:
    if threading.current_thread().name != "postroom-checkpoint":
        in_a_commit.append(1)
    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)


def test_a_thread_checkpoints_during_commits(store: SqliteStore, path: Path) -> None:
    insert(store)
    with store._group.leading:
        store._checkpoints._move()
        alone = without_wal(path)
        assert alone.execute("SELECT count(*) FROM records").fetchone() == (1,)
        alone.close()


def test_a_commit_checkpoints_itself_when_no_thread_can_start(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints.Checkpoints, "_start", lambda _: False)
    insert(store, MANY)
    assert wal_pages(path) < 3 * FEW_PAGES


def test_a_commit_checkpoints_when_the_thread_falls_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread never runs, so the commits checkpoint at the limit."""
    few = CheckpointLimits(wal_pages=FEW_PAGES, wal_pages_max=3 * FEW_PAGES, look_events=1)
    store = SqliteStore(path, checkpoints=few)
    monkeypatch.setattr(checkpoints.Checkpoints, "_start", lambda _: True)
    insert(store, MANY)
    assert wal_pages(path) < 5 * FEW_PAGES
    store.close()


def test_a_long_reader_only_makes_the_wal_longer(store: SqliteStore, path: Path) -> None:
    insert(store)
    reader = apsw.Connection(str(path))
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM records").fetchone() == (1,)
    insert(store, MANY)
    wait_for_thread()
    assert reader.execute("SELECT count(*) FROM records").fetchone() == (1,)
    assert store.count() == {"q": {"QUEUED": MANY + 1}}
    reader.close()
    insert(store, MANY)
    wait_for_thread()
    before = wal_pages(path)
    insert(store, MANY)
    wait_for_thread()
    assert wal_pages(path) == before  # the WAL was reused from its start


def test_a_full_disk_during_a_checkpoint_loses_nothing(small_disk: Path) -> None:
    """Neither the thread nor the commits find space. Acknowledged tasks stay, and tasks can be completed."""
    store = SqliteStore(small_disk / "queue.db", checkpoints=CheckpointLimits(wal_pages=FEW_PAGES))
    insert(store, FEW_PAGES)
    filler = fill(small_disk)
    acknowledged = FEW_PAGES + _insert_until_full(store)
    wait_for_thread()
    terms = Claim("q", "w", 1, 10**9)
    [held] = store.write(lambda transaction: transaction.claim(terms), makes_room=True)
    store.write(
        lambda transaction: transaction.complete({held.message_id: (held.lease, b"1")}), makes_room=True
    )
    filler.unlink()
    insert(store, MANY)
    wait_for_thread()
    assert store.count() == {"q": {"QUEUED": acknowledged + MANY - 1, "COMPLETED": 1}}
    store.close()


def _insert_until_full(store: SqliteStore) -> int:
    for count in range(10_000):
        try:
            insert(store)
        except WriteFailed:
            return count
    pytest.fail("the disk is never full")


def test_a_process_killed_during_a_checkpoint_loses_nothing(store: SqliteStore, path: Path) -> None:
    """The kill may come during a commit or during a checkpoint; nothing is lost in either case."""
    reader, writer = os.pipe()

    def work() -> None:
        mine = SqliteStore(path, checkpoints=OFTEN)
        for number in range(MANY):
            insert(mine)
            os.write(writer, b".")
            if number == MANY - 1 or (number > MANY // 2 and mine._checkpoints.under_way.locked()):
                children.die()

    insert(store)
    assert children.killed(work)
    os.close(writer)
    with open(reader, "rb") as reports:
        acknowledged = len(reports.read())
    assert acknowledged > MANY // 2
    [(waiting, count)] = store.count()["q"].items()
    assert waiting == "QUEUED"
    assert acknowledged + 1 <= count <= acknowledged + 2  # one may be committed and not acknowledged


def test_threads_commit_during_a_checkpoint(store: SqliteStore) -> None:
    threads = [threading.Thread(target=insert, args=(store, 100)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    assert store.count() == {"q": {"QUEUED": 800}}


def test_a_closed_store_leaves_nothing_open(path: Path) -> None:
    for _ in range(20):
        store = SqliteStore(path, checkpoints=OFTEN)
        insert(store, FEW_PAGES)  # a checkpoint is under way, or just over
        store.close()
        wait_for_thread()
    opened = [name for name in _open_files() if name.startswith(str(path))]
    assert opened == []


def _open_files() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the descriptor of the folder
            continue
    return names


def test_a_child_can_be_forked_during_a_checkpoint(store: SqliteStore) -> None:
    """Whenever the fork happens, child and parent can use the file."""
    for _ in range(20):
        insert(store, 10)
        children.run(lambda: insert(store, 10))
    wait_for_thread()
    assert store.count() == {"q": {"QUEUED": 400}}
