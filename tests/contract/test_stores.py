"""`StoreContract` for each store, then tests of SQLite alone: processes, threads, disks and damage."""

import itertools
import os
import sqlite3
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any

import apsw
import pytest

from postroom import Tasks, open_store
from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.errors import (
    HandleDead,
    InvalidMessage,
    LockTimeout,
    QueueFull,
    StaleLease,
    StoreDamaged,
    WriteFailed,
)
from postroom.message import Durability, Envelope
from postroom.stores.base import ByIds, Limits, Listing
from postroom.stores.event_runs import IMPLIED_MAX, UNREADABLE
from postroom.stores.purge import purge_events, purge_tasks
from postroom.stores.sqlite import ledger
from postroom.stores.sqlite import store as sqlite
from postroom.stores.sqlite.parts import listing_query
from postroom.stores.sqlite.sql import queries
from postroom.stores.sqlite.store import SqliteStore
from postroom.stores.store import Store
from postroom.stores.transaction import Claim, Transaction
from postroom.system.manual_clock import FIRST_BOOT_NS
from postroom.testing import (
    Crashed,
    FaultyStore,
    ManualClock,
    MemoryStore,
    StoreContract,
    check_consistency,
    explained,
)
from tests import children
from tests.children import no_child_left
from tests.faultydisk import FaultyDisk, in_background
from tests.smalldisk import fill, small_disk
from tests.waiting import HANG_GUARD_S

__all__ = ["no_child_left", "small_disk"]  # fixtures

CHILDREN = 8
EACH = 25


class TestMemory(StoreContract):
    keeps = False

    def open(self, folder: Path, clock: ManualClock) -> Store:  # noqa: ARG002 - memory needs no folder
        return MemoryStore(clock=clock)


class TestSqlite(StoreContract):
    def open(self, folder: Path, clock: ManualClock) -> Store:
        return SqliteStore(folder / "queue.db", clock=clock)


class TestFaultyWithoutFaults(StoreContract):
    def open(self, folder: Path, clock: ManualClock) -> Store:
        return FaultyStore(SqliteStore(folder / "queue.db", clock=clock))


def test_a_long_read_holds_up_no_other_read(path: Path) -> None:
    store = SqliteStore(path)
    has_begun, may_end = threading.Event(), threading.Event()

    def long(transaction: Transaction) -> int:
        has_begun.set()
        assert may_end.wait(HANG_GUARD_S)
        return transaction.events.newest()

    begun = in_background(lambda: store.read(long))
    assert has_begun.wait(HANG_GUARD_S)
    other = in_background(lambda: store.read(lambda transaction: transaction.events.newest()))
    other.join(HANG_GUARD_S)
    assert not other.is_alive()
    may_end.set()
    begun.join(HANG_GUARD_S)
    store.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "queue.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path)
    yield store
    store.close()


def insert(store: Store, *payloads: bytes, queue: str = "q", **facts: Any) -> list[str]:
    envelopes = [Envelope(queue=queue, payload=payload, **facts) for payload in payloads]
    accepted = store.write(lambda transaction: transaction.insert(envelopes))
    return [each.message_id for each in accepted]


def claim(store: Store, limit: int = 1, queue: str = "q") -> list[tuple[str, int]]:
    terms = Claim(queue, "w", limit, 300 * NANOS_PER_S)
    deliveries = store.write(lambda transaction: transaction.claim(terms))
    return [(delivery.message_id, delivery.lease) for delivery in deliveries]


def complete(store: Store, message_id: str, token: int) -> None:
    store.write(lambda transaction: transaction.complete({message_id: (token, b"1")}), makes_room=True)


def fails() -> None:
    raise KeyError("planned")


# ---- addresses -------------------------------------------------------------------------------------


@pytest.mark.statement("one-machine")
def test_a_store_is_opened_by_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = open_store("sqlite:///sub/queue.db")
    insert(relative, b"1")
    relative.close()
    absolute = open_store(f"sqlite:///{tmp_path}/sub/queue.db")
    assert absolute.count() == {"q": {"QUEUED": 1}}
    assert absolute.url == relative.url
    absolute.close()
    assert open_store("memory://").url == "memory://"


@pytest.mark.parametrize("url", ["", "queue.db", "sqlite://", "sqlite:///", "mysql://x", "sqlite:///a\0b"])
def test_an_unknown_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidMessage, match="is not a store"):
        open_store(url)


def test_only_the_owner_may_read_the_files(store: SqliteStore, path: Path) -> None:
    insert(store, b"1", durability="fsync")
    names = ("queue.db", "queue.db-wal", "queue.db-shm", "queue.db.lock", "queue.db.gate", "queue.db.ballast")
    modes = {file.name: file.stat().st_mode & 0o077 for file in path.parent.iterdir()}
    assert modes == dict.fromkeys(names, 0)


# ---- processes and threads -------------------------------------------------------------------------


def test_children_share_an_open_handle(store: SqliteStore, no_child_left: None) -> None:
    """Each child inserts and claims through the inherited handle. Nothing is lost or delivered twice."""
    insert(store, b"0")
    claim(store)
    store.find(Listing(limit=1))  # a reader is open too

    def child() -> None:
        for number in range(EACH):
            insert(store, b"%d" % number)
            for message_id, token in claim(store):
                complete(store, message_id, token)
        store.count()
        store.close()

    pids = [children.start(child) for _ in range(CHILDREN)]
    for _ in range(EACH):
        insert(store, b"1", queue="parents")
    children.wait(*pids)
    assert store.count() == {
        "q": {"PROCESSING": 1, "COMPLETED": CHILDREN * EACH},
        "parents": {"QUEUED": EACH},
    }
    check_consistency(store)


def test_a_killed_child_loses_no_committed_record(store: SqliteStore, no_child_left: None) -> None:
    insert(store, b"0")

    def child() -> None:
        def work(transaction: Transaction) -> None:
            transaction.insert([Envelope(queue="q", payload=b"1")])
            transaction.claim(Claim("q", "w", 1, NANOS_PER_S))
            children.die()

        store.write(work)

    assert children.killed(child)
    assert store.count() == {"q": {"QUEUED": 1}}
    check_consistency(store)


def test_threads_share_a_handle(store: SqliteStore) -> None:
    errors: list[BaseException] = []

    def thread(number: int) -> None:
        try:
            for _ in range(EACH):
                insert(store, b"%d" % number)
                for message_id, token in claim(store):
                    complete(store, message_id, token)
                store.count()
        except BaseException as error:  # noqa: BLE001 - the test shows it
            errors.append(error)

    threads = [threading.Thread(target=thread, args=(number,)) for number in range(CHILDREN)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []
    assert store.count() == {"q": {"COMPLETED": CHILDREN * EACH}}
    check_consistency(store)


def test_callers_share_a_commit_and_a_failure_stays_with_its_caller(store: SqliteStore, path: Path) -> None:
    insert(store, b"first")
    answers: dict[int, object] = {}

    def call(number: int) -> None:
        def work(transaction: Transaction) -> object:
            accepted = transaction.insert([Envelope(queue="q", payload=b"%d" % number)])
            if number % 4 == 0:
                fails()
            return accepted

        try:
            answers[number] = store.write(work)
        except KeyError as error:
            answers[number] = error

    other = SqliteStore(path)
    other._lock.acquire()  # no thread can commit, so all wait for the same commit
    threads = [in_background(partial(call, number)) for number in range(12)]
    while len(store._group.pending) + 2 < len(threads):  # one leads, and perhaps one writes alone
        threads[0].join(0.01)
    other._lock.release()
    other._lock.forget()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    refused = {number for number, answer in answers.items() if isinstance(answer, KeyError)}
    assert (len(answers), refused) == (12, {0, 4, 8})
    assert store.count() == {"q": {"QUEUED": 10}}
    check_consistency(store)


def test_waiting_callers_need_few_commits(store: SqliteStore, path: Path) -> None:
    insert(store, b"first")
    other = SqliteStore(path)
    other._lock.acquire()
    threads = [in_background(lambda: insert(store, b"1")) for _ in range(20)]
    while len(store._group.pending) + 2 < len(threads):
        threads[0].join(0.01)
    other._lock.release()
    other._lock.forget()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    commits = sqlite3.connect(path).execute("SELECT count(*) FROM events").fetchone()[0]
    assert store.count() == {"q": {"QUEUED": 21}}
    assert commits <= 4  # the first commit, the current one, and the shared one


def test_a_queue_that_was_rolled_back_is_not_mistaken_for_another(store: SqliteStore, path: Path) -> None:
    """The number of a rolled back queue goes to the next new queue, perhaps of another process."""

    def work(transaction: Transaction) -> None:
        transaction.insert([Envelope(queue="gone", payload=b"1", message_id="x")])
        transaction.claim(Claim("gone", "w", 1, NANOS_PER_S))
        transaction.records.find(ByIds(("x",)))
        transaction.claim(Claim("gone", "w", 1, NANOS_PER_S))
        fails()

    with pytest.raises(KeyError):
        store.write(work)
    other = SqliteStore(path)
    [name] = insert(other, b"1", queue="new")
    other.close()
    assert store.find(ByIds((name,)))[0].queue == "new"
    assert (store.next_work_ns("gone"), store.next_work_ns("new")) == (None, 0)


def test_counters_include_the_commits_of_other_handles(
    store: SqliteStore, path: Path, no_child_left: None
) -> None:
    store.write(lambda transaction: transaction.set_limits("q", Limits(max_depth=10)))
    insert(store, b"1")

    def child() -> None:
        other = SqliteStore(path)
        insert(other, *[b"1"] * 8)
        claim(other, 2)
        other.close()

    children.run(child)
    assert store.count() == {"q": {"QUEUED": 7, "PROCESSING": 2}}
    insert(store, *[b"1"] * 3)
    with pytest.raises(QueueFull):
        insert(store, b"1")


def test_counters_stay_correct_after_their_events_are_purged(store: SqliteStore, path: Path) -> None:
    """A handle reads the counters again after another handle wrote them and purged the events."""
    count = ledger.FOLD_EVENTS  # two events each
    store.write(lambda transaction: transaction.set_limits("q", Limits(max_depth=count + 60)))
    insert(store, b"1")
    other = SqliteStore(path)
    for _ in range(0, count, 100):
        insert(other, *[b"1"] * 100)
    other.write(lambda transaction: purge_events(transaction, 10**9, 10**18, 10 * count))
    assert other.events()[0].seq > ledger.FOLD_EVENTS
    assert other.newest_event() == 2 * (count + 1)
    other.close()
    for _ in range(59):
        insert(store, b"1")
    with pytest.raises(QueueFull):
        insert(store, b"1")
    assert store.count() == SqliteStore(path).count() == {"q": {"QUEUED": count + 60}}


def test_a_lock_held_too_long_raises_a_timeout(path: Path) -> None:
    holder, store = SqliteStore(path), SqliteStore(path, lock_timeout_s=0.01)
    insert(holder, b"1")
    holder._lock.acquire()
    with pytest.raises(LockTimeout, match="another process holds it"):
        insert(store, b"1")
    holder._lock.release()
    insert(store, b"1")
    for each in (holder, store):
        each.close()


def test_a_reader_of_another_program_does_not_disturb_writers(store: SqliteStore, path: Path) -> None:
    insert(store, b"1")
    reader = sqlite3.connect(path)
    rows = reader.execute("SELECT seq FROM records")
    rows.fetchone()
    for _ in range(20):
        insert(store, b"1")
    assert len(claim(store, 100)) == 21
    reader.close()


# ---- time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_s", [3_600, -3_600, 86_400, -86_400])
def test_a_step_of_the_clock_changes_no_lease_and_no_order(path: Path, step_s: int) -> None:
    clock = ManualClock()
    store = SqliteStore(path, clock=clock)
    first = insert(store, b"1", b"2")
    held = claim(store)
    clock.step_wall(step_s)
    later = insert(store, b"3")
    delayed = insert(store, b"4", delay_ns=NANOS_PER_S)
    assert [name for name, _ in claim(store, 10)] == [*first[1:], *later]
    clock.step_wall(-2 * step_s)
    clock.advance(299)
    assert [name for name, _ in claim(store, 10)] == delayed
    complete(store, *held[0])
    clock.advance(1)
    assert [name for name, _ in claim(store, 10)] == [*first[1:], *later]
    check_consistency(store)
    store.close()


def test_the_clock_of_a_store_continues_after_a_reboot(path: Path) -> None:
    clock = ManualClock()
    store = SqliteStore(path, clock=clock)
    insert(store, b"1")
    clock.advance(1_000)
    insert(store, b"2")
    before = store.steady_ns()
    store.close()
    clock.reboot()
    store = SqliteStore(path, clock=clock)
    assert store.steady_ns() == before
    assert store.read(lambda transaction: transaction.oldest_ns("q")) == 1_000 * NANOS_PER_S
    store.close()


def test_a_pause_before_a_retry_does_not_grow_with_a_reboot(path: Path) -> None:
    """Also when the newest record is days old at the reboot."""
    clock = ManualClock()
    store = SqliteStore(path, clock=clock)
    [name] = insert(store, b"1")
    clock.advance(10 * 86_400)
    [(_, token)] = claim(store)
    pause_ns = 60 * NANOS_PER_S
    store.write(
        lambda transaction: transaction.apply(
            ByIds((name,)), lambda record, now: lifecycle.fail(record, now, token, "no", delay_ns=pause_ns)
        )
    )
    store.close()
    clock.reboot()
    store = SqliteStore(path, clock=clock)
    assert store.next_work_ns("q") == pause_ns
    store.close()


def test_an_age_is_never_negative(path: Path) -> None:
    clock = ManualClock()
    store = SqliteStore(path, clock=clock)
    name, last = insert(store, b"1", b"2")
    (_, token), (_, lasts_token) = claim(store, 2)
    complete(store, last, lasts_token)
    clock.advance(100)
    store.write(
        lambda transaction: transaction.apply(
            ByIds((name,)), lambda record, now: lifecycle.release(record, now, token)
        )
    )
    store.close()
    clock.reboot()
    store = SqliteStore(path, clock=clock)
    assert store.read(lambda transaction: transaction.oldest_ns("q")) == 0
    store.close()


# ---- the file --------------------------------------------------------------------------------------


def test_a_file_of_a_newer_version_is_refused_and_left_alone(store: SqliteStore, path: Path) -> None:
    insert(store, b"1")
    store.close()
    newer = sqlite3.connect(path)
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(StoreDamaged, match=r"newer postroom \(its version 99\)"):
        insert(store, b"1")
    rows = sqlite3.connect(path).execute("SELECT count(*) FROM records").fetchone()
    assert rows == (1,)


@pytest.mark.parametrize("text", [b"root:x:0:0::/root:/bin/sh\n", b"these are notes of somebody" * 100])
def test_a_file_that_is_not_a_database_is_refused_and_left_alone(
    store: SqliteStore, path: Path, text: bytes
) -> None:
    path.write_bytes(text)
    for look in (lambda: insert(store, b"1"), store.count):
        with pytest.raises(StoreDamaged, match="is not a store of tasks: it is not a SQLite database"):
            look()
    assert path.read_bytes() == text
    assert os.listdir(path.parent) == [path.name]  # no file is created beside it


def test_a_database_of_another_program_is_refused_and_left_alone(store: SqliteStore, path: Path) -> None:
    other = sqlite3.connect(path)
    other.executescript("CREATE TABLE bookmarks (url TEXT); PRAGMA user_version = 1")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreDamaged, match="it is the database of another program"):
        insert(store, b"1")
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_in_place_of_the_file_is_refused(store: SqliteStore, path: Path) -> None:
    path.mkdir()
    with pytest.raises(StoreDamaged, match="is not a file"):
        insert(store, b"1")


def test_a_damaged_page_is_reported(store: SqliteStore, path: Path) -> None:
    insert(store, *[b"x" * 1_000] * 50)
    store.close()
    data = bytearray(path.read_bytes())
    for page in range(4096, len(data), 4096):
        data[page : page + 200] = b"\xff" * 200
    path.write_bytes(data)
    for look in (lambda: claim(store), store.count, lambda: store.find(Listing(limit=100))):
        with pytest.raises(StoreDamaged, match="is damaged"):
            look()


def test_an_old_sqlite_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.45.1")
    with pytest.raises(StoreDamaged, match=r"SQLite 3\.45\.1 can damage"):
        SqliteStore(path)


def test_an_apsw_without_arrays_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(apsw, "carray")
    with pytest.raises(StoreDamaged, match="without SQLite's arrays"):
        SqliteStore(path)


def test_a_link_in_place_of_the_file_is_not_followed(store: SqliteStore, path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    path.with_name("queue.db.lock").symlink_to(victim)
    with pytest.raises(Exception, match="lock"):
        insert(store, b"1")
    assert not victim.exists()


# ---- the plans of the hot queries ------------------------------------------------------------------

ARRAY = apsw.carray(array("q", [1]))
GIVEN = ("SCAN CONSTANT ROW", "SCAN given VIRTUAL TABLE INDEX 1:", "SCAN carray VIRTUAL TABLE INDEX 1:")
HOT: dict[str, tuple[str, tuple[Any, ...]]] = {
    "claim": (queries.HEADS, (18, 1)),
    "pull": (queries.PULL, (18, 1)),
    "first deadlines": (queries.FIRST_DEADLINES, ()),
    "lease": (queries.LEASE_MANY, (1, "w", 1, 1, 1, ARRAY)),
    "leased": (queries.LEASED_MANY, (ARRAY, 1)),
    "complete": (queries.COMPLETE_MANY, (1, b"", 1, b"", ARRAY)),
    "ending": (queries.ENDING, (9, 0, 1)),
    "expiring": (queries.EXPIRING, (0, 1)),
    "by name": (queries.BY_NAME, ("x",)),
    "by number": (queries.BY_SEQ, (1,)),
    "by state": listing_query(Listing(state="DEAD_LETTER"), 0),
    "by queue and state": listing_query(Listing("q", "DEAD_LETTER"), 1),
    "newest": listing_query(Listing("q", before=9), 1),
    "newest waiting": listing_query(Listing("q", "QUEUED", before=9), 1),
    "newest delayed": listing_query(Listing("q", "SCHEDULED", before=9), 1),
    "newest dead": listing_query(Listing("q", "DEAD_LETTER", before=9), 1),
    "counts": (queries.COUNTS_AFTER, (1,)),
    "implied": (queries.IMPLIED, (1, 9)),
    "cell": (queries.CELL, ("key", "k")),
    "cells": (queries.CELLS, ("key", "k", 1)),
}


@pytest.mark.parametrize("name", HOT)
def test_a_hot_query_uses_an_index_and_does_not_sort(store: SqliteStore, name: str) -> None:
    insert(store, b"1")
    query, values = HOT[name]
    assert store._writer is not None
    plan = [row[3] for row in store._writer.execute(f"EXPLAIN QUERY PLAN {query}", values)]
    steps = [step for step in plan if step not in GIVEN and "SCALAR SUBQUERY" not in step]
    assert steps, plan
    assert all(step.startswith("SEARCH") for step in steps), plan
    assert not any("TEMP B-TREE" in step for step in plan), plan


# ---- many at once, in one statement ----------------------------------------------------------------

LONG = ledger.ALIKE_PAYLOAD_BYTES_MAX + 1
MIXED = [
    *(Envelope(queue="q", payload=b"%d" % number) for number in range(5)),
    *(Envelope(queue="q", payload=b"later", delay_ns=NANOS_PER_S) for _ in range(3)),
    *(Envelope(queue="q", payload=b"x" * size) for size in (0, LONG, LONG, 1)),
    *(Envelope(queue=queue, payload=b"elsewhere") for queue in ("r", "r", "q", "r")),
    *(Envelope(queue="q", payload=b"1", type='"quoted"', parent_message_id="p") for _ in range(2)),
    *(Envelope(queue="q", payload=b"1", ttl_ns=ttl_ns) for ttl_ns in (0, 5 * NANOS_PER_S, 5 * NANOS_PER_S)),
    *(Envelope(queue="q", payload=b"1", priority=priority, max_retries=1) for priority in (1, 1, 3)),
    *(Envelope(queue="q", payload=b"1", durability=durability) for durability in ("os", "group", "group")),
]


class FromZero(ManualClock):
    """A clock that begins at 0, as the clock of a new file does."""

    def boot_ns(self) -> int:
        return super().boot_ns() - FIRST_BOOT_NS


def both(path: Path, work: Callable[[Transaction], Any]) -> list[Any]:
    """The answer of the same work in SQLite and in memory, with all records and messages."""
    seen = []
    stores = (
        SqliteStore(path, clock=ManualClock(), store_id="t1"),
        MemoryStore(clock=FromZero(), store_id="t1"),
    )
    for store in stores:
        answer = store.write(work)
        check_consistency(store)
        records = store.find(Listing(limit=1_000))
        stored = [store.load(record.message_id) for record in records]
        seen.append((answer, records, stored, store.events(), store.count()))
        store.close()
    return seen


@pytest.mark.parametrize("alike", [0, 2 * ledger.ALIKE_ROWS_MAX])
def test_unlike_messages_of_a_batch_are_stored_as_memory_stores_them(path: Path, alike: int) -> None:
    ours, model = both(path, lambda transaction: transaction.insert([*MIXED[:1] * alike, *MIXED]))
    assert ours == model


def test_several_inserts_of_a_commit_are_stored_as_memory_stores_them(path: Path) -> None:
    def work(transaction: Transaction) -> list[Any]:
        answers: list[Any] = [transaction.insert([envelope]) for envelope in (*MIXED, MIXED[0])]
        transaction.alert("Test", "a number between two messages")
        answers.append(transaction.insert(MIXED[:2]))
        [first, *_] = claimed = transaction.claim(Claim("q", "w", 4, NANOS_PER_S))
        answers.append(transaction.insert(MIXED[:1]))
        transaction.complete({each.message_id: (each.lease, b"1") for each in claimed[1:]})
        answers.append(transaction.insert([Envelope(queue="q", payload=b"1", message_id="mine")]))
        answers.append(transaction.insert(MIXED[:1]))
        transaction.complete({first.message_id: (first.lease, b"2")})
        return [*answers, claimed]

    ours, model = both(path, work)
    assert ours == model


def test_different_results_of_one_commit_are_each_kept(path: Path) -> None:
    def work(transaction: Transaction) -> None:
        transaction.insert(MIXED[:5])
        claimed = transaction.claim(Claim("q", "w", 5, NANOS_PER_S))
        transaction.complete({each.message_id: (each.lease, each.payload) for each in claimed})

    ours, model = both(path, work)
    assert ours == model
    assert [stored.result for stored in ours[2]] == [b"0", b"1", b"2", b"3", b"4"]


# ---- disks -----------------------------------------------------------------------------------------


def insert_until_full(store: Store) -> list[str]:
    names: list[str] = []
    for _ in range(10_000):
        try:
            names += insert(store, b"x" * 3_000)
        except WriteFailed:
            return names
    pytest.fail("the disk is never full")


@pytest.mark.statement("full-disk")
@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
def test_on_a_full_disk_tasks_can_be_completed_and_nothing_is_lost(small_disk: Path, restart: bool) -> None:
    clock = ManualClock()
    store = SqliteStore(small_disk / "queue.db", clock=clock)
    names = insert(store, *[b"1"] * 40)
    held = claim(store, 20)
    complete(store, *held[0])
    if restart:
        store.close()
    filler = fill(small_disk)
    names += insert_until_full(store)
    if restart:  # the new handle finds the disk reserve of the previous one
        store.close()
        store = SqliteStore(small_disk / "queue.db", clock=clock)
    for each in held[1:11]:
        complete(store, *each)
    store.write(lambda t: t.apply(ByIds((names[39],)), lifecycle.cancel), makes_room=True)
    clock.advance(10)
    keep_us = dict.fromkeys(lifecycle.ENDED, 0)
    store.write(lambda t: purge_tasks(t, 0, keep_us, 5), makes_room=True)
    with pytest.raises(WriteFailed, match="No space left"):
        insert(store, b"x" * 3_000)
    another = SqliteStore(
        small_disk / "queue.db", clock=clock
    )  # a process that starts now can read and complete
    assert another.load(names[0]) is None
    complete(another, *held[11])
    assert store.count() == another.count()
    counts = store.count()["q"]
    assert counts == {"COMPLETED": 7, "CANCELLED": 1, "PROCESSING": 8, "QUEUED": len(names) - 21}
    filler.unlink()
    names += insert(store, b"y" * 3_000)
    assert (small_disk / "queue.db.ballast").stat().st_size == sqlite.RESERVE_BYTES
    assert len(claim(store, 1_000)) == len(names) - 21
    check_consistency(store)
    store.close()
    another.close()


def test_a_disk_that_is_full_from_the_start_is_reported(small_disk: Path) -> None:
    filler = fill(small_disk)
    store = SqliteStore(small_disk / "queue.db")
    for call in (lambda: insert(store, b"1"), store.count):
        with pytest.raises(WriteFailed, match=r"could not write \S+/queue\.db: No space left"):
            call()
    filler.unlink()
    insert(store, b"1")
    assert store.count() == {"q": {"QUEUED": 1}}
    store.close()


# ---- turns -----------------------------------------------------------------------------------------

MESSAGES = 25
SLOW_S = 0.01  # a commit on a slow disk, longer than a turn at the lock


class Poller:
    """Polls in a tight loop on a slow disk, and counts its commits in shared memory."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._memory = mmap(-1, 16)  # shared with forked children

    @property
    def commits(self) -> int:
        return int.from_bytes(self._memory[:8], "little")

    def poll_until_stopped(self) -> None:
        for number in itertools.count(1):
            if self._memory[8]:
                return
            self._store.write(self._look)
            self._memory[:8] = number.to_bytes(8, "little")

    @staticmethod
    def _look(transaction: Transaction) -> None:
        transaction.claim(Claim("nothing", "poller", 1, NANOS_PER_S))
        time.sleep(SLOW_S)

    def stop(self) -> None:
        self._memory[8] = 1


def commits_while_sending(poller: Poller, sender: SqliteStore) -> int:
    """How many commits the poller made while a sender stored its messages one at a time."""
    while not poller.commits:
        time.sleep(SLOW_S)
    before = poller.commits
    for number in range(MESSAGES):
        insert(sender, b"%d" % number)
    made = poller.commits - before
    poller.stop()
    return made


def test_a_sender_gets_its_turn_despite_a_poller_of_another_process(path: Path, no_child_left: None) -> None:
    """Poller and sender alternate, also on a slow disk: a returning poller waits after the sender."""
    sender, poller = SqliteStore(path), Poller(SqliteStore(path))
    insert(sender, b"first")
    sender.close()
    child = children.start(poller.poll_until_stopped)
    made = commits_while_sending(poller, sender)
    children.wait(child)
    assert made <= 2 * MESSAGES
    sender.close()


def test_a_sender_gets_its_turn_despite_a_poller_of_another_thread(store: SqliteStore) -> None:
    insert(store, b"first")
    poller = Poller(store)
    thread = in_background(poller.poll_until_stopped)
    made = commits_while_sending(poller, store)
    thread.join(HANG_GUARD_S)
    assert made <= 2 * MESSAGES


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    return FaultyDisk(monkeypatch)


def test_only_commits_with_a_synced_durability_class_are_synced(store: SqliteStore, disk: FaultyDisk) -> None:
    insert(store, b"1")
    claim(store)
    assert disk.calls == 0
    [name] = insert(store, b"1", durability="fsync")
    assert disk.calls == 1
    insert(store, b"1", durability="group")
    assert disk.calls == 2
    complete(store, name, dict(claim(store, 1))[name])  # a completion is as durable as its insert
    assert disk.calls == 4


@pytest.mark.parametrize("name", [{"key": "delivery-93"}, {"message_id": "t-1"}], ids=["key", "id"])
@pytest.mark.parametrize("first", ["os", "group", "fsync"])
@pytest.mark.parametrize("second", ["os", "group", "fsync"])
def test_a_repeated_enqueue_is_answered_after_the_first_record_is_synced(
    path: Path, disk: FaultyDisk, name: dict[str, str], first: Durability, second: Durability
) -> None:
    """The first enqueue may come from a process that was killed between its commit and its fsync."""
    killed, store = SqliteStore(path), SqliteStore(path)
    insert(store, b"other")
    disk.failing = True
    with suppress(WriteFailed):
        insert(killed, b"1", durability=first, **name)
    disk.failing = False
    synced = disk.calls
    [message_id] = insert(store, b"1", durability=second, **name)
    assert store.find(ByIds((message_id,)))[0].durability == first
    assert disk.calls - synced == (0 if first == second == "os" else 1)
    synced = disk.calls
    assert insert(store, b"2", b"3", durability=second, **name) == [message_id] * 2
    assert disk.calls - synced == (0 if first == second == "os" else 1)
    killed.close()
    store.close()


def test_after_a_failed_fsync_nothing_is_acknowledged_until_it_is_reopened(
    store: SqliteStore, disk: FaultyDisk
) -> None:
    kept = insert(store, b"1", durability="fsync")
    disk.failing = True
    with pytest.raises(WriteFailed, match="may or may not be stored"):
        insert(store, b"2", durability="fsync")
    disk.failing = False
    for durability in ("os", "fsync"):
        with pytest.raises(HandleDead, match="reopen"):
            insert(store, b"3", durability=durability)
    assert store.find(ByIds(tuple(kept)))[0].state == "QUEUED"  # reading is still allowed
    store.reopen()
    kept += insert(store, b"4", durability="fsync")
    found = [record.message_id for record in store.find(Listing(limit=100))]
    assert set(kept) <= set(found)
    assert len(found) <= 3
    check_consistency(store)


def test_every_caller_of_a_commit_gets_the_error_of_its_fsync(store: SqliteStore, disk: FaultyDisk) -> None:
    insert(store, b"1", durability="fsync")
    disk.hold()
    disk.failing = True
    failures: list[BaseException] = []

    def call() -> None:
        try:
            insert(store, b"2", durability="group")
        except (WriteFailed, HandleDead) as error:
            failures.append(error)

    threads = [in_background(call) for _ in range(6)]
    assert disk.entered.wait(HANG_GUARD_S)
    disk.gate.set()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    assert len(failures) == 6


def test_an_interrupt_during_the_fsync_repeats_no_call(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader is interrupted after the commit: the other callers must not repeat their work."""
    insert(store, b"first", durability="group")
    real, calls, answers = os.fsync, list[int](), list[str]()

    def fsync(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:  # the first call is of the writer that committed alone
            raise KeyboardInterrupt
        real(fd)

    def call() -> None:
        try:
            insert(store, b"1", durability="group")
        except (KeyboardInterrupt, WriteFailed) as error:
            answers.append(type(error).__name__)
        else:
            answers.append("stored")

    monkeypatch.setattr(os, "fsync", fsync)
    other = SqliteStore(path)
    other._lock.acquire()
    threads = [in_background(call) for _ in range(8)]
    while len(store._group.pending) + 2 < len(threads):
        threads[0].join(0.01)
    other._lock.release()
    other._lock.forget()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    assert len(answers) == 8
    assert answers.count("KeyboardInterrupt") == 1
    assert store.count() == {"q": {"QUEUED": 9}}


# ---- the fault injector ----------------------------------------------------------------------------


def test_a_crash_commits_nothing_and_a_lost_answer_commits_everything() -> None:
    store = FaultyStore(MemoryStore(), ["crash", "lost_answer"])
    with pytest.raises(Crashed, match="before its write was committed"):
        insert(store, b"1")
    assert store.count() == {}
    with pytest.raises(Crashed, match="is lost"):
        insert(store, b"1")
    assert store.count() == {"q": {"QUEUED": 1}}
    insert(store, b"1")  # the plan has ended
    assert store.happened == ["crash", "lost_answer", "none"]
    check_consistency(store)


def test_a_write_can_arrive_twice_or_late() -> None:
    clock = ManualClock()
    store = FaultyStore(MemoryStore(clock=clock), delay=lambda: clock.advance(60))
    store.inject("duplicate", "duplicate", "delay")
    insert(store, b"1", key="k")
    assert store.count() == {"q": {"QUEUED": 1}}
    insert(store, b"1")
    assert store.count() == {"q": {"QUEUED": 3}}
    before = clock.boot_ns()
    insert(store, b"1")
    assert clock.boot_ns() - before == 60 * NANOS_PER_S


def test_a_lost_wake_up_loses_nothing() -> None:
    store = FaultyStore(MemoryStore(), ["lost_wakeup"])
    notified: list[set[str]] = []
    store.on_commit = lambda transaction: notified.append(transaction.ready) if transaction.ready else None
    insert(store, b"1")
    assert notified == []
    insert(store, b"2")
    assert notified == [{"q"}]
    assert len(claim(store, 10)) == 2


def test_tasks_survive_every_fault_without_loss() -> None:
    faults: list[Any] = ["crash", "lost_answer", "duplicate", "none"] * 10
    tasks = Tasks(FaultyStore(MemoryStore(), faults))
    ids = {
        _until_answered(partial(tasks.enqueue, agent="a", payload=number, task_id=f"t{number}"))
        for number in range(10)
    }
    done: set[str] = set()
    while tasks.status().totals.get("completed", 0) < 10:
        claimed = _until_answered(lambda: tasks.claim(agent="a", limit=3, lease_s=0.01))
        for task in claimed:
            try:
                _until_answered(partial(tasks.complete, task.task_id, task.lease, "ok"))
            except StaleLease:
                continue
            done.add(task.task_id)
    assert done == ids
    check_consistency(tasks.store)


def _until_answered(call: Callable[[], Any]) -> Any:
    while True:
        try:
            return call()
        except Crashed:
            continue


def test_events_that_contradict_each_other_are_noticed() -> None:
    store = MemoryStore()
    insert(store, b"1")
    [(name, token)] = claim(store)
    complete(store, name, token)
    events = store.events()
    assert explained(events)[name].state == "COMPLETED"
    with pytest.raises(ValueError, match="never created"):
        explained(events[1:])
    with pytest.raises(ValueError, match="leads from QUEUED to COMPLETED"):
        explained([*events[:2], events[3]])


@pytest.mark.parametrize(
    "batch",
    [
        '[["leased",1',
        '[["what",1,2]]',
        '[["new",1,2,"q",2,"","",0,"x"]]',
        "[5]",
        '[["leased",3,5,"q",2,"w",[1],[1,2],[0]]]',
    ],
)
def test_a_damaged_row_of_events_is_reported_and_tasks_continue(
    store: SqliteStore, path: Path, batch: str
) -> None:
    insert(store, b"1", b"2")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE events SET batch = ?", (batch,))
    connection.close()
    assert ("alert", UNREADABLE) in [(event.kind, event.error_type) for event in store.events()]
    assert len(claim(store, 2)) == 2


def test_damaged_counts_are_reported_to_callers_that_need_them(store: SqliteStore, path: Path) -> None:
    insert(store, b"1", b"2")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE events SET counts = '[5]'")
    connection.close()
    for count in (store.count, SqliteStore(path).count, lambda: insert(SqliteStore(path), b"2")):
        with pytest.raises(StoreDamaged, match="is damaged: "):
            count()


# ---- records that imply their events ------------------------------------------------------------


def rows_of_events(path: Path) -> int:
    connection = sqlite3.connect(path)
    [(count,)] = connection.execute("SELECT count(*) FROM events").fetchall()
    connection.close()
    return int(count)


def check_events(store: SqliteStore, path: Path) -> None:
    """Events and counters are the same in this handle and in a new one."""
    everything = store.events(limit=10_000)
    assert [event.seq for event in everything] == list(range(1, len(everything) + 1))
    assert store.newest_event() == len(everything)
    other = SqliteStore(path)
    assert other.events(limit=10_000) == everything
    assert other.count() == store.count()
    assert other.write(lambda transaction: transaction.lanes.depth("q")) == store.write(
        lambda transaction: transaction.lanes.depth("q")
    )
    other.close()


def test_a_record_inserted_alone_implies_its_events(store: SqliteStore, path: Path) -> None:
    for payload in (b"1", b"22", b"333"):
        insert(store, payload)
    assert rows_of_events(path) == 0
    events = store.events()
    assert [(event.kind, event.message_id, event.body_bytes) for event in events[::2]] == [
        ("created", f"{store.identity()}-{seq}", size) for seq, size in ((1, 1), (3, 2), (5, 3))
    ]
    assert [event.kind for event in events[1::2]] == ["enqueued"] * 3
    check_events(store, path)


@pytest.mark.parametrize("verb", ["claim", "two", "delayed", "named", "keyed"])
def test_a_commit_with_events_also_writes_the_implied_ones(store: SqliteStore, path: Path, verb: str) -> None:
    for _ in range(5):
        insert(store, b"1")
    before = store.events()
    if verb == "claim":
        claim(store, 2)
    elif verb == "two":
        insert(store, b"2", b"2")
    else:
        facts: dict[str, dict[str, Any]] = {
            "delayed": {"delay_ns": 10**9},
            "named": {"message_id": "x"},
            "keyed": {"key": "k"},
        }
        insert(store, b"3", **facts[verb])
    assert rows_of_events(path) == 1
    assert store.events()[:10] == before
    check_events(store, path)


def test_implied_events_are_written_after_a_limit(store: SqliteStore, path: Path) -> None:
    for number in range(300):
        insert(store, b"1", queue="q" if number % 7 else "r")
    assert 300 // IMPLIED_MAX <= rows_of_events(path) <= 300 // IMPLIED_MAX + 1
    check_events(store, path)
    everything = store.events(limit=10_000)
    for after in range(590):
        assert store.events(after, 5) == everything[after : after + 5]


def test_two_handles_alternate_with_implied_events(store: SqliteStore, path: Path) -> None:
    other = SqliteStore(path)
    for turn in range(40):
        for handle in (store, other):
            for _ in range(turn % 3 + 1):
                insert(handle, b"1")
            if turn % 5 == 4:
                claim(handle, 2)
            assert (
                handle.count()["q"]["QUEUED"]
                == handle.write(lambda transaction: transaction.lanes.depth("q"))["P2"]
            )
    check_events(store, path)
    other.close()


def test_implied_records_are_counted_after_an_interrupted_commit(store: SqliteStore, path: Path) -> None:
    def half_done(transaction: Transaction) -> None:
        transaction.insert([Envelope(queue="q", payload=b"1")])
        raise KeyboardInterrupt

    for _ in range(10):
        insert(store, b"1")
        with pytest.raises(KeyboardInterrupt):
            store.write(half_done)
    assert store.count() == {"q": {"QUEUED": 10}}
    check_events(store, path)


def test_records_forgotten_without_an_event_are_counted_once(store: SqliteStore, path: Path) -> None:
    for _ in range(3):
        insert(store, b"1")
    store.write(lambda transaction: transaction.records.forget(transaction.records.find(Listing(limit=1))))
    assert store.count() == {"q": {"QUEUED": 2}}
    insert(store, b"1")
    claim(store, 1)
    for handle in (store, SqliteStore(path)):
        assert handle.count() == {"q": {"QUEUED": 2, "PROCESSING": 1}}


def test_records_between_those_of_a_range_are_left_alone(path: Path) -> None:
    """Delayed messages have one event each, so another queue can own the number between two of them."""
    clock = ManualClock()
    store = SqliteStore(path, clock=clock)
    for _ in range(3):
        for queue in ("q", "r"):
            insert(store, b"1", queue=queue, delay_ns=NANOS_PER_S)
    clock.advance(2.0)
    assert [claim(store, 1)[0][0]] == [f"{store.identity()}-1"]
    held = claim(store, 2)
    assert [message_id for message_id, _ in held] == [f"{store.identity()}-3", f"{store.identity()}-5"]
    assert store.count() == {"q": {"PROCESSING": 3}, "r": {"QUEUED": 3}}
    others = store.find(ByIds(tuple(f"{store.identity()}-{number}" for number in (2, 4, 6))))
    assert [record.state for record in others] == ["QUEUED"] * 3
    words = {message_id: (lease, b"null") for message_id, lease in held}
    store.write(lambda transaction: transaction.complete(words))
    assert [record.lease for record in store.find(ByIds(tuple(words)))] == [lease for _, lease in held]
    others = store.find(ByIds(tuple(f"{store.identity()}-{number}" for number in (2, 4, 6))))
    assert [record.state for record in others] == ["QUEUED"] * 3
    store.close()


# ---- cells within one transaction ----------------------------------------------------------------------


def test_a_transaction_sees_its_own_cells_and_writes_new_records_together(store: SqliteStore) -> None:
    def work(transaction: Transaction) -> list[Any]:
        seen: list[Any] = [transaction.cells.get("kind", "a"), transaction.cells.page("kind")]
        for payload in (b"1", b"2"):
            transaction.insert([Envelope(queue="q", payload=payload)])
            transaction.cells.put("kind", "a", payload)
            seen += [transaction.cells.get("kind", "a"), transaction.cells.page("kind")]
        transaction.cells.put("kind", "a", None)
        return [*seen, transaction.cells.get("kind", "a"), transaction.cells.page("kind")]

    found = store.write(work)
    assert found == [None, [], b"1", [("a", b"1")], b"2", [("a", b"2")], None, []]
    assert [event.seq for event in store.events()] == [1, 2, 3, 4]
    assert store.newest_event() == 4
