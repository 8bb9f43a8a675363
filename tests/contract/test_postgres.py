"""`StoreContract` for PostgreSQL, then what holds for it alone: processes, faults, migrations, secrets."""

import re
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from postroom import Engine, Tasks, open_store
from postroom.calls.submit import SubmitFields
from postroom.contracts.tasks.tasks import TaskLimits
from postroom.core.formats.events import of_store
from postroom.core.history.history_checker import History
from postroom.core.lifecycle.fairness import Rotation
from postroom.engine.messages import decode_body
from postroom.engine.rules.claims import Claims
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.outcomes import Outcome
from postroom.engine.rules.policy import Policy
from postroom.errors import StoreDamaged
from postroom.message import Envelope
from postroom.nudges.database_notifier import DatabaseNotifier
from postroom.stores.base import Limits, Listing
from postroom.stores.event_quarantine import QUARANTINE, quarantine_events
from postroom.stores.event_runs import UNREADABLE
from postroom.stores.own_ids import IDS_FACT
from postroom.stores.postgres import connection as postgres_connection
from postroom.stores.postgres.store import CLOCK_KEPT_S, FOLD_COMMITS, PostgresStore
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction
from postroom.system.manual_clock import MICROS_PER_S
from postroom.testing import ManualClock, StoreContract, World, check_consistency
from tests import children
from tests.children import no_child_left
from tests.postgresserver import database, postgres
from tests.privatepostgres import PostgresServer
from tests.waiting import HANG_GUARD_S

__all__ = ["database", "no_child_left", "postgres"]  # fixtures

WORKERS = 4
LINES = 5
MESSAGES = 120


class TestPostgres(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, postgres: PostgresServer) -> None:
        self.server = postgres
        self.databases: dict[Path, str] = {}

    def open(self, folder: Path, clock: ManualClock) -> Store:
        if folder not in self.databases:
            self.databases[folder] = self.server.new_store()
        return PostgresStore(self.databases[folder], clock=clock)


def insert(store: Store, count: int = 1, **facts: Any) -> list[str]:
    envelopes = [Envelope(**{"queue": "q", "payload": b"{}", **facts})] * count
    return [one.message_id for one in store.write(lambda transaction: transaction.insert(envelopes))]


def sql(url: str, query: str) -> list[Any]:
    """Rows of a query, which names the tables of the store `S.table`."""
    address, _, schema = url.partition("?schema=")
    with psycopg.connect(address, autocommit=True) as connection:
        found = connection.execute(query.replace("S.", f"{schema}."))  # type: ignore[arg-type, unused-ignore]
        return found.fetchall() if found.description else []


def test_a_damaged_row_of_events_is_kept_and_readers_go_on(database: str) -> None:
    with closing(open_store(database)) as store:
        for _ in range(3):
            insert(store)
        before = store.events()
        sql(database, "UPDATE S.events SET batch = '\\x5bff' WHERE position = 4")
        found = store.events()
        assert [event.seq for event in found] == [event.seq for event in before] == [1, 2, 3, 4, 5, 6]
        assert [event.error_type for event in found] == ["", "", UNREADABLE, UNREADABLE, "", ""]
        assert found[:2] + found[4:] == before[:2] + before[4:]
        assert abs(found[2].ts_us - before[2].ts_us) < 60_000_000
        store.write(lambda transaction: quarantine_events(transaction, found))
        [(key, batch)] = store.read(lambda transaction: transaction.cells.page(QUARANTINE))
        assert (int(key), batch) == (found[2].detail["row"], b"[\xff")


# ---- the engine on top -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_seeded_world_keeps_every_rule(database: str, seed: int) -> None:
    report = World(seed, store=database).run()
    assert report.ok, str(report)


@pytest.mark.statement("postgresql-ledger")
def test_processes_share_the_work_and_ordering_keys_hold(database: str, no_child_left: None) -> None:
    with Engine.open(database) as engine:
        for first in range(0, MESSAGES, 20):
            messages: list[SubmitFields] = [
                {
                    "type": "tool_call",
                    "org_id": f"o{n % 3}",
                    "payload": {"n": n},
                    "ordering_key": f"k{n % LINES}",
                }
                for n in range(first, first + 20)
            ]
            engine.blocking.wait(engine.submit_many(messages))
    children.run(*(partial(work, database, f"w{n}") for n in range(WORKERS)))
    store = PostgresStore(database)
    assert {record.state for record in store.find(Listing(limit=1_000))} == {"COMPLETED"}
    check_consistency(store)
    check_history(store)
    delivered: dict[tuple[str, str], list[int]] = {}
    numbers = {event.message_id: event.seq for event in store.events(limit=10_000) if event.kind == "created"}
    for event in store.events(limit=10_000):
        if event.kind == "dequeued":
            body = decode_body(store.load(event.message_id).envelope.payload)  # type: ignore[union-attr]
            delivered.setdefault((event.queue, body.ordering_key), []).append(numbers[event.message_id])
    assert len(delivered) == 3 * LINES
    assert all(line == sorted(line) for line in delivered.values()), "an ordering key was broken"
    assert len({event.worker_id for event in store.events(limit=10_000) if event.worker_id}) > 1
    store.close()


def work(url: str, name: str) -> None:
    """Claim and finish until nothing is left."""
    store, rotation, policy = open_store(url), Rotation(), Policy()

    def claim(transaction: Transaction) -> Any:
        return Claims(transaction, policy, name, rotation, {}).claim(3)

    while any(record.state != "COMPLETED" for record in store.find(Listing(limit=1_000))):
        held = store.write(claim)
        outcomes = [
            Outcome(
                kind="completed", message_id=one.record.message_id, lease=one.record.lease, type=one.type,
                org_id="", body=one.body, result=b"null",
            )
            for one in held
        ]  # fmt: skip
        if outcomes:
            store.write(lambda transaction, done=outcomes: Operations(transaction, policy).finish(done))  # type: ignore[misc]
        else:
            time.sleep(0.01)


def check_history(store: Store) -> None:
    checker = History(ordered=False)
    for event in store.events(0, 100_000):
        checker.add(of_store(event, "engine:x", "engine"))
    assert not checker.verdict().violations


# ---- wake-ups --------------------------------------------------------------------------------------


def test_enqueue_of_another_handle_wakes_a_waiting_claim(database: str) -> None:
    with Tasks.open(database) as sender, Tasks.open(database) as worker:
        worker.limits = TaskLimits(look_again_s=60.0)
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.extend(worker.claim(agent="a", wait_s=50)))
        waiting.start()
        while not worker.notifier.hears_other_processes:
            time.sleep(0.01)
        sender.enqueue(agent="a", payload=1)
        waiting.join(HANG_GUARD_S)
        assert len(found) == 1


@pytest.mark.statement("postgresql-notify")
def test_store_without_listen_polls(database: str) -> None:
    url = f"{database}&listen=off&prepare=off"
    with Tasks.open(url) as sender, Tasks.open(url) as worker:
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.extend(worker.claim(agent="a", wait_s=20)))
        waiting.start()
        sender.enqueue(agent="a", payload=1)
        waiting.join(HANG_GUARD_S)
        assert (len(found), worker.notifier.hears_other_processes) == (1, False)


def test_a_notifier_that_closes_while_it_connects_starts_no_thread_again(database: str) -> None:
    address = postgres_connection.Address(database)
    may_connect = threading.Event()

    def connect() -> Any:
        assert may_connect.wait(HANG_GUARD_S)
        return address.connect()

    before = set(threading.enumerate())
    notifier = DatabaseNotifier(connect, "postroom")
    with notifier.subscribed("a", lambda: None):
        notifier.close()
        may_connect.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(HANG_GUARD_S)
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert not names & {"postroom-notify", "postroom-listen"}


# ---- tables ----------------------------------------------------------------------------------------


def test_payloads_are_shown_as_json_where_jsonb_can_hold_them(database: str) -> None:
    store = PostgresStore(database)
    payloads = [b'{"b":1,"a":[1.50]}', b'"\\u0000"', b"\xff\0", b'{"a":1,"a":2}']
    for payload in payloads:
        [name] = insert(store, payload=payload)
        loaded = store.load(name)
        assert loaded is not None
        assert loaded.envelope.payload == payload
    shown = [row[0] for row in sql(database, "SELECT payload FROM S.messages ORDER BY seq")]
    assert shown == [{"a": [1.5], "b": 1}, None, None, {"a": 2}]
    store.close()


def test_partitions_of_past_months_are_dropped_with_their_events(database: str) -> None:
    store = PostgresStore(database)
    insert(store, 3)
    sql(
        database,
        "CREATE TABLE S.events_202001 PARTITION OF S.events FOR VALUES FROM ('2020-01-01') TO ('2020-02-01')",
    )
    sql(database, "UPDATE S.events SET at = '2020-01-05'")
    insert(store, 2)
    newest = store.newest_event()
    store.write(lambda transaction: transaction.events.forget(5))  # one of them is still needed
    assert sql(database, "SELECT count(*) FROM S.events_202001") == [(1,)]
    store.write(lambda transaction: transaction.events.forget(6))
    assert sql(database, "SELECT to_regclass('S.events_202001')") == [(None,)]
    assert [event.seq for event in store.events()] == list(range(7, newest + 1))
    store.close()


def test_counters_are_folded_and_stay_right(database: str) -> None:
    store = PostgresStore(database)
    for _ in range(2 * FOLD_COMMITS + 1):
        insert(store, 2, queue="org:acme")
    assert sql(database, "SELECT count(*) FROM S.count_changes") == [(1,)]
    assert sql(database, "SELECT n FROM S.counts WHERE queue = ''") == [(4 * FOLD_COMMITS,)]
    assert store.read(lambda transaction: transaction.lanes.total()) == {"P2": 4 * FOLD_COMMITS + 2}
    check_consistency(store)
    for queue in ("org:acme", "org:b"):  # counters that are folded, in part folded, and not folded
        insert(store, 1, queue=queue)
        assert store.read(lambda transaction: transaction.lanes.count_active()) == 1 + (queue == "org:b")
    store.close()


def test_migration_runs_while_older_workers_write(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = PostgresStore(database)
    insert(old)
    schema = database.partition("?schema=")[2]
    scripts = postgres_connection.migrations(schema)
    number = max(scripts) + 1
    known = {**scripts, number: f"ALTER TABLE {schema}.records ADD COLUMN region text"}
    monkeypatch.setattr(postgres_connection, "migrations", lambda _schema: known)
    new = PostgresStore(database)
    insert(new)
    insert(old)
    assert sql(database, "SELECT max(version) FROM S.migrations") == [(number,)]
    known = scripts
    with pytest.raises(StoreDamaged, match="newer postroom"):
        insert(PostgresStore(database))
    check_consistency(old)
    for store in (old, new):
        store.close()


@pytest.mark.parametrize("number", [number for number in postgres_connection.migrations("s") if number > 1])
def test_a_migration_only_adds_because_older_workers_go_on(number: int) -> None:
    script = re.sub(r"--.*", "", postgres_connection.migrations("s")[number])
    assert not re.search(r"\b(DROP|DELETE|UPDATE|RENAME|TRUNCATE|TYPE|SET NOT NULL)\b", script, re.IGNORECASE)


def test_nodes_of_an_unreleased_version_are_refused_and_kept(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {1: postgres_connection.migrations(database.partition("?schema=")[2])[1]}
    with closing(PostgresStore(database)) as old, closing(PostgresStore(database)) as new:
        monkeypatch.setattr(postgres_connection, "migrations", lambda _schema: first)
        old.write(lambda transaction: transaction.cells.put("graph.main", "node", b"{}"))
        monkeypatch.undo()
        with pytest.raises(StoreDamaged, match="knowledge graph is that of an unreleased version"):
            new.identity()
        old.write(lambda transaction: transaction.cells.put("graph.main", "other", b"{}"))
    assert sql(database, "SELECT count(*), (SELECT max(version) FROM S.migrations) FROM S.cells") == [(2, 1)]


def test_clients_of_an_upgraded_store_know_numbers_up_to_the_newest_one(database: str) -> None:
    with closing(PostgresStore(database)) as store:
        assert store.read(lambda transaction: transaction.ids.rule).plain_max == 0
        store.write(lambda transaction: transaction.insert([Envelope(queue="a", payload=b"1")] * 3))
        newest = store.newest_event()
        with store.connected() as connection:
            connection.execute(f"DELETE FROM {store.address.schema}.facts WHERE name = '{IDS_FACT}'")  # noqa: S608
    with closing(PostgresStore(database)) as store:
        assert store.read(lambda transaction: transaction.ids.rule).plain_max >= newest
        store.write(lambda transaction: transaction.insert([Envelope(queue="a", payload=b"1")]))
    with closing(PostgresStore(database)) as store:
        assert store.read(lambda transaction: transaction.ids.rule).plain_max < store.newest_event()


def test_pages_of_cells_show_each_key_once_also_keys_with_nul(database: str) -> None:
    keys = [f"a{character}" for character in ("\0", "\x01", "\x19", "\x1a", "\x1b", "b")]
    with closing(PostgresStore(database)) as store:
        store.write(lambda transaction: [transaction.cells.put("k", key, b"1") for key in keys[::2]])

        def pages(transaction: Transaction) -> list[str]:
            for key in keys[1::2]:
                transaction.cells.put("k", key, b"2")
            found: list[str] = []
            while page := transaction.cells.page("k", found[-1] if found else "", 2):
                found += [key for key, _ in page]
            return found

        assert sorted(store.write(pages)) == keys
        assert [key for key, _ in store.read(lambda transaction: transaction.cells.page("k"))] == store.write(
            pages
        )


def test_queue_near_its_limit_is_never_overfilled_by_several_handles(database: str) -> None:
    stores = [PostgresStore(database) for _ in range(3)]
    stores[0].write(lambda transaction: transaction.set_limits("q", Limits(max_depth=20)))

    def fill(store: Store) -> None:
        for _ in range(15):
            store.write_many([lambda transaction: transaction.insert([Envelope(queue="q", payload=b"1")])])

    threads = [threading.Thread(target=fill, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    assert stores[0].count()["q"] == {"QUEUED": 20}
    for store in stores:
        store.close()


def test_connection_in_use_is_closed_after_the_store(database: str) -> None:
    begun, go_on = threading.Event(), threading.Event()
    found: list[Any] = []

    def look(transaction: Transaction) -> None:
        found.append(transaction.lanes.depth("a"))
        begun.set()
        go_on.wait(HANG_GUARD_S)

    store = open_store(database)
    assert isinstance(store, PostgresStore)
    reader = threading.Thread(target=store.read, args=(look,))
    reader.start()
    assert begun.wait(HANG_GUARD_S)
    store.close()
    go_on.set()
    reader.join(HANG_GUARD_S)
    assert not store._pool._idle  # the collector would find it open
    assert store.count() is not None  # a later call opens the store again, and keeps its connection
    assert store._pool._idle
    store.close()
    assert not store._pool._idle


def test_forked_child_uses_its_own_connections(database: str, no_child_left: None) -> None:
    store = PostgresStore(database)
    insert(store)
    children.run(lambda: insert(store))
    insert(store)
    assert len(store.find(Listing())) == 3
    store.close()


def test_clock_follows_the_last_answer_and_is_read_again_later(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, uptime = PostgresStore(database), ManualClock()
    reads: list[int] = []
    read = store.read

    def read_clock(work: Callable[[Transaction], int]) -> int:
        reads.append(read(work))
        return reads[-1]

    monkeypatch.setattr(store, "_uptime", uptime)
    monkeypatch.setattr(store, "read", read_clock)
    assert store.wall_us() == reads[0]
    uptime.advance(CLOCK_KEPT_S - 1)
    assert store.wall_us() == reads[0] + (CLOCK_KEPT_S - 1) * MICROS_PER_S
    assert len(reads) == 1
    uptime.advance(1)
    assert store.wall_us() == reads[1] > reads[0]
    store.close()


def test_statements_of_a_failed_trip_can_be_used_again(postgres: PostgresServer) -> None:
    with PostgresStore(postgres.new_store()).connected() as connection:
        for _ in range(2):
            with pytest.raises(psycopg.errors.DivisionByZero):
                connection.trip([("SELECT 1 / %s::int", (0,)), ("SELECT %s::text", ("later",))])
        assert connection.trip([("SELECT %s::text", ("later",))])[0].rows == [("later",)]
