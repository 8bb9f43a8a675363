"""A store on PostgreSQL under kills, resets, black holes, deadlocks and conflicts.

Each long fault prints how many messages were accepted, lost and duplicated, and the longest pause.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from postroom.core import lifecycle
from postroom.errors import InvalidMessage, StoreUnreachable, Unavailable
from postroom.message import Envelope, Record
from postroom.stores import postgres_connection
from postroom.stores.base import ByIds, Listing
from postroom.stores.postgres import PostgresStore
from postroom.stores.transaction import Claim, Transaction
from postroom.testing import check_consistency
from postroom.testing.postgres_server import PostgresServer, running_postgres
from tests.postgresload import under_load
from tests.postgresserver import database, postgres
from tests.tcpproxy import TcpProxy

__all__ = ["database", "postgres"]  # fixtures

COMMIT = b"COMMIT"
LEASE_NS = 60 * lifecycle.NANOS_PER_S
PHASES_MAX = 12  # more chunks than any of these calls sends
WISHES = ("reset", "reset-after")


def through(proxy: TcpProxy, url: str) -> str:
    """The address of a store, reached through a proxy."""
    head, _, path = url.rpartition("/")
    return f"{head.rpartition(':')[0]}:{proxy.port}/{path}"


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[TcpProxy]:
    with TcpProxy(postgres.port) as proxy:
        yield proxy


def insert(store: PostgresStore, **facts: Any) -> str:
    envelope = Envelope(**{"queue": "q", "payload": b"{}", "durability": "group", **facts})
    return store.write(lambda transaction: transaction.insert([envelope]))[0].message_id


def messages(store: PostgresStore) -> list[str]:
    return [record.message_id for record in store.find(Listing(limit=10_000))]


def once(wish: str, matches: Callable[[bytes], bool]) -> Callable[[bytes], str]:
    """Do it to the first chunk that matches."""
    left = [wish]
    return lambda chunk: left.pop() if left and matches(chunk) else "pass"


def nth(phase: int, wish: str) -> Callable[[bytes], str]:
    """Do it to the chunk of this number."""
    seen = itertools.count()
    return once(wish, lambda _: next(seen) == phase)


def complete(store: PostgresStore, record: Record) -> None:
    words = {record.message_id: (record.lease, b"1")}
    store.write(lambda transaction: transaction.complete(words))


@pytest.mark.parametrize("wish", WISHES)
def test_lost_answer_of_a_commit_is_looked_up(proxy: TcpProxy, database: str, wish: str) -> None:
    store = PostgresStore(through(proxy, database))
    insert(store)
    proxy.watch = once(wish, lambda chunk: COMMIT in chunk)
    second = insert(store)
    assert messages(store)[1:] == [second], "a commit was lost or done twice"
    check_consistency(store)
    store.close()


def test_resets_in_every_phase_of_submit_claim_and_complete(proxy: TcpProxy, database: str) -> None:
    store = PostgresStore(through(proxy, database))
    accepted = [insert(store)]

    def claim() -> None:
        terms = Claim("q", "w", 1, LEASE_NS)
        while not store.write(lambda transaction: transaction.claim(terms)):
            time.sleep(0.01)  # the lost transaction still holds the record

    for phase, wish in itertools.product(range(PHASES_MAX), WISHES):
        proxy.watch = nth(phase, wish)
        accepted.append(insert(store))
        proxy.watch = nth(phase, wish)
        claim()
        proxy.watch = lambda _: "pass"
    held = store.find(Listing(state="PROCESSING", limit=1_000))
    assert len(held) == 2 * PHASES_MAX
    for record, (phase, wish) in zip(held, itertools.product(range(PHASES_MAX), WISHES), strict=True):
        proxy.watch = nth(phase, wish)
        complete(store, record)
    proxy.watch = lambda _: "pass"
    assert sorted(messages(store)) == sorted(accepted)
    assert store.count()["q"] == {"QUEUED": 1, "COMPLETED": 2 * PHASES_MAX}
    check_consistency(store)
    store.close()


def test_black_hole_ends_in_an_error_and_heals(
    proxy: TcpProxy, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_connection, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(postgres_connection, "CONNECT_TIMEOUT_S", 2)
    monkeypatch.setattr(postgres_connection, "WATCH_S", 0.1)
    store = PostgresStore(through(proxy, database), reconnect_s=1.0)
    first = insert(store)
    proxy.is_hole = True
    with pytest.raises(StoreUnreachable):
        insert(store)
    proxy.is_hole = False
    second = insert(store)
    assert messages(store) == [first, second]
    store.close()


def test_kill_of_the_server_under_load_loses_nothing_acknowledged(capsys: pytest.CaptureFixture[str]) -> None:
    with running_postgres() as server:

        def kill_and_start() -> None:
            server.kill()
            server.start()

        report = under_load(server.url(), kill_and_start)
    with capsys.disabled():
        print(f"\nkill -9 of the server: {report}")
    assert (report.lost, report.duplicated) == (0, 0)
    assert len(report.accepted) > 10


def test_deadlocks_are_resolved_inside(database: str) -> None:
    stores = [PostgresStore(database), PostgresStore(database)]
    first, second = insert(stores[0]), insert(stores[0])
    both = threading.Barrier(2)

    def renew(store: PostgresStore, *names: str) -> None:
        waits = [True]

        def work(transaction: Transaction) -> None:
            transaction.find(ByIds(names[:1]))
            if waits.pop() if waits else False:
                both.wait(10)
            transaction.apply(
                ByIds(names[1:]), lambda record, moment: lifecycle.defer(record, moment, 1, "x")
            )

        store.write(work)

    threads = [
        threading.Thread(target=renew, args=(stores[0], first, second)),
        threading.Thread(target=renew, args=(stores[1], second, first)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [record.state for record in stores[0].find(Listing())] == ["SCHEDULED"] * 2
    check_consistency(stores[0])
    for store in stores:
        store.close()


def test_cells_that_several_processes_change_lose_no_change(database: str) -> None:
    stores = [PostgresStore(database) for _ in range(4)]

    def add_one(transaction: Transaction) -> None:
        transaction.put_cell("n", "n", b"%d" % (int(transaction.cell("n", "n") or b"0") + 1))

    def add(store: PostgresStore) -> None:
        for _ in range(15):
            store.write(add_one)

    threads = [threading.Thread(target=add, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert stores[0].read(lambda transaction: transaction.cell("n", "n")) == b"60"
    for store in stores:
        store.close()


def test_password_is_in_no_error_no_log_and_no_address(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "hunter2%2Fx"  # noqa: S105 - it must not be found
    for url in (
        f"postgres://me:{secret}@127.0.0.1:1/none",
        f"postgres://me@127.0.0.1:1/none?password={secret}",
        f"postgres://me:{secret}@127.0.0.1:{postgres.port}/none",
    ):
        store = PostgresStore(url, reconnect_s=0.2)
        with pytest.raises(Unavailable) as caught:
            insert(store)
        said = f"{caught.value} {caught.value!r} {store.url} {caplog.text} {store.trouble}"
        assert "hunter2" not in said
    with pytest.raises(InvalidMessage) as refused:
        PostgresStore(f"postgres://me:{secret}@127.0.0.1/none?nonsense=1")
    assert "hunter2" not in str(refused.value)
