"""A store behind PgBouncer in transaction mode: no LISTEN, no prepared statements, sessions that change."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from postroom import Tasks
from postroom.core.lifecycle import lifecycle
from postroom.message import Envelope
from postroom.stores.base import ByIds, Listing
from postroom.stores.postgres.store import PostgresStore
from postroom.stores.postgres.watchdog import WaitLimits
from postroom.stores.transaction import Transaction
from postroom.testing import World
from tests.pgbouncer import behind, program, running_bouncer
from tests.postgresload import under_load
from tests.postgresserver import database, postgres
from tests.privatepostgres import PostgresServer
from tests.tcpproxy import TcpProxy
from tests.waiting import HANG_GUARD_S, until

__all__ = ["database", "postgres"]  # fixtures

POOL = 2
NEVER_S = 3_600.0  # longer than a test may run
PROBES_ALONE = WaitLimits(suspect_s=0.3, watch_s=0.1, answer_timeout_s=NEVER_S)
"""Connections are looked up on the server early, and the client gives none up for another reason."""
_SESSION = "SELECT 1 FROM pg_stat_activity WHERE pid = %s::int"
WORKING_S = 1.2  # of a server; longer than it takes to look up and close a connection here


@pytest.fixture(scope="module")
def bouncer(postgres: PostgresServer) -> Iterator[int]:
    """The port of a PgBouncer with two connections to the server."""
    if program() is None:
        pytest.skip("PgBouncer was NOT tested: install the Debian package pgbouncer")
    with running_bouncer(postgres, size=POOL) as port:
        yield port


@pytest.fixture
def url(bouncer: int, database: str) -> str:
    return behind(bouncer, database)


def insert(store: PostgresStore) -> str:
    envelope = Envelope(queue="q", payload=b"{}", durability="group")
    return store.write(lambda transaction: transaction.insert([envelope]))[0].message_id


def setting_of_commits(url: str) -> str:
    """`synchronous_commit` as a session of the pool has it between two transactions."""
    with psycopg.connect(url.partition("?")[0], autocommit=True) as connection:
        found = connection.execute("SELECT current_setting('synchronous_commit') FROM pg_sleep(0.3)")
        [(value,)] = found.fetchall()
    return str(value)


def test_handles_share_two_sessions_and_poll(url: str) -> None:
    handles = [Tasks.open(url) for _ in range(4)]
    found: list[str] = []

    def work(tasks: Tasks, turns: int) -> None:
        for number in range(turns):
            tasks.enqueue(agent="a", payload=number)
            held = tasks.claim(agent="a", limit=2, wait_s=5)
            tasks.complete_many([(task.task_id, task.lease, None) for task in held])
            found.extend(task.task_id for task in held)

    threads = [threading.Thread(target=work, args=(tasks, 10)) for tasks in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    assert len(found) == len(set(found)) == 40
    assert not any(tasks.notifier.hears_other_processes for tasks in handles)
    for tasks in handles:
        tasks.close()


def test_store_that_listens_behind_a_pooler_notices_it_and_polls(url: str) -> None:
    url = url.replace("&listen=off", "")
    with Tasks.open(url) as sender, Tasks.open(url) as receiver:
        waiting = threading.Thread(target=lambda: found.extend(receiver.claim(agent="a", wait_s=60)))
        found: list[Any] = []
        waiting.start()
        task_id = sender.enqueue(agent="a", payload=1)
        waiting.join(HANG_GUARD_S)
        assert [task.task_id for task in found] == [task_id]
        assert not receiver.notifier.hears_other_processes
        with ThreadPoolExecutor(POOL) as pool:  # all sessions of the pool at once
            assert [*pool.map(setting_of_commits, [url] * POOL)] == ["on"] * POOL


def test_seeded_world_keeps_every_rule(url: str) -> None:
    report = World(7, store=url).run()
    assert report.ok, str(report)


def test_half_open_connections_are_found_by_their_locks(
    bouncer: int, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with TcpProxy(bouncer) as proxy:
        report = under_load(behind(proxy.port, database), lambda _report: proxy.freeze_all(), PROBES_ALONE)
    with capsys.disabled():
        print(f"\nhalf-open connections to PgBouncer: {report}")
    assert (report.lost, report.duplicated) == (0, 0)


def test_half_open_transactions_give_the_sessions_of_the_pool_back(bouncer: int, database: str) -> None:
    """Frozen transactions hold every session of the pool, so that even the probe has to wait for one."""
    direct = PostgresStore(database)
    names = [insert(direct) for _ in range(POOL)]
    with TcpProxy(bouncer) as proxy:
        stores = [PostgresStore(behind(proxy.port, database), waits=PROBES_ALONE) for _ in names]
        everybody, freezes = threading.Barrier(POOL, action=proxy.freeze_all), [True] * POOL

        def defer(store: PostgresStore, message_id: str) -> None:
            def work(transaction: Transaction) -> None:
                transaction.records.find(ByIds((message_id,)))
                if freezes:
                    freezes.pop()
                    everybody.wait(HANG_GUARD_S)
                transaction.apply(
                    ByIds((message_id,)), lambda record, moment: lifecycle.defer(record, moment, 1, "x")
                )

            store.write(work)

        threads = [threading.Thread(target=defer, args=pair) for pair in zip(stores, names, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_GUARD_S)
        assert [record.state for record in direct.find(Listing())] == ["SCHEDULED"] * POOL
        for store in (*stores, direct):
            store.close()


def test_watchdog_interrupts_no_working_server_and_no_session_queue(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A call that waits for a session of the pool is not half open: the probe waits behind it."""
    stores = [PostgresStore(url, waits=PROBES_ALONE) for _ in range(POOL + 1)]
    for store in stores:
        insert(store)
    asked: list[int] = []

    def work(transaction: Transaction) -> None:
        asked.append(1)
        transaction.ledger.connection.trip([(f"SELECT pg_sleep({WORKING_S})", ())])  # type: ignore[attr-defined]
        transaction.insert([Envelope(queue="q", payload=b"")])

    threads = [threading.Thread(target=store.write, args=(work,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    assert len(asked) == len(stores), "a transaction was done again"
    assert "half open" not in caplog.text
    for store in stores:
        store.close()


@pytest.mark.parametrize("address", ["url", "database"])
def test_transaction_that_pauses_for_too_long_is_done_again(
    address: str, database: str, request: pytest.FixtureRequest
) -> None:
    store, watching = PostgresStore(request.getfixturevalue(address)), PostgresStore(database)
    pauses = [True]

    def work(transaction: Transaction) -> str:
        if pauses:
            pauses.pop()
            connection = transaction.ledger.connection  # type: ignore[attr-defined]
            connection.run("SET LOCAL idle_in_transaction_session_timeout = 100")
            [(pid,)] = connection.trip([("SELECT pg_backend_pid()::text", ())])[0].rows
            with watching.connected() as other:
                until(lambda: not other.execute(_SESSION, [pid]).fetchall())
        return transaction.insert([Envelope(queue="q", payload=b"")])[0].message_id

    message_id = store.write(work)
    assert [record.message_id for record in store.find(Listing())] == [message_id]
    store.close()
    watching.close()
