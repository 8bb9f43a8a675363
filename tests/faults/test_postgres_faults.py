"""A store on PostgreSQL under kills, resets, black holes, deadlocks and conflicts.

Each long fault prints how many messages were accepted, lost and duplicated, and the longest pause.
"""

import asyncio
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from postroom.core.lifecycle import lifecycle
from postroom.errors import InvalidMessage, StoreRefused, StoreUnreachable, Unavailable
from postroom.message import Envelope, Record
from postroom.stores.base import ByIds, Listing
from postroom.stores.postgres.store import PostgresStore
from postroom.stores.postgres.watchdog import WaitLimits
from postroom.stores.transaction import Claim, Transaction
from postroom.system.crypto.tls import make_self_signed
from postroom.testing import check_consistency
from tests import rabbitmqload
from tests.postgresload import Report, under_load
from tests.postgresserver import database, postgres
from tests.privatepostgres import PostgresServer, running_postgres, running_standby
from tests.tcpproxy import TcpProxy
from tests.tlsproxy import TlsProxy
from tests.waiting import HANG_GUARD_S, until

__all__ = ["database", "postgres"]  # fixtures

COMMIT = b"COMMIT"
LEASE_NS = 60 * lifecycle.NANOS_PER_S
PHASES_MAX = 12  # more chunks than any of these calls sends
WISHES = ("reset", "reset-after")
HOLE_S = 2.0  # longer than clients with `SHORT_WAITS` wait for an answer
RESETS = 10  # of each kind
RESET_SHARE = 0.1  # of the chunks that clients send
NEVER_S = 3_600.0  # longer than a test may run
SHORT_WAITS = WaitLimits(answer_timeout_s=0.5, connect_timeout_s=2, watch_s=0.1)  # 2 is the least of libpq
EARLY_PROBES = WaitLimits(suspect_s=0.3, watch_s=0.1)
"""Connections are looked up on the server early."""
PROBES_ALONE = WaitLimits(suspect_s=0.3, watch_s=0.1, answer_timeout_s=NEVER_S, statement_timeout_s=0)
"""No timeout of the client or of the server ends a wait: only a probe does."""


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


def test_black_hole_ends_in_an_error_and_heals(proxy: TcpProxy, database: str) -> None:
    store = hasty_store(through(proxy, database))
    first = insert(store)
    proxy.is_hole = True
    with pytest.raises(StoreUnreachable):
        insert(store)
    proxy.is_hole = False
    second = insert(store)
    assert messages(store) == [first, second]
    store.close()


def hasty_store(url: str) -> PostgresStore:
    return PostgresStore(url, reconnect_s=1.0, waits=SHORT_WAITS)


def insert_many(store: PostgresStore) -> None:
    [outcome] = store.write_many([lambda transaction: transaction.insert([Envelope(queue="q", payload=b"")])])
    if isinstance(outcome, Exception):
        raise outcome


def connect(store: PostgresStore) -> None:
    with store.connected():
        pass


PUBLIC_CALLS: dict[str, Callable[[PostgresStore], object]] = {
    "write": insert,
    "write_many": insert_many,
    "read": lambda store: store.read(lambda transaction: transaction.records.find(Listing())),
    "load": lambda store: store.load("x"),
    "find": lambda store: store.find(Listing()),
    "events": lambda store: store.events(),
    "newest_event": lambda store: store.newest_event(),
    "depths": lambda store: store.depths(),
    "count": lambda store: store.count(),
    "steady_ns": lambda store: store.steady_ns(),
    "next_work_ns": lambda store: store.next_work_ns("q"),
    "connected": connect,
}
"""Every call of a store that needs its server. `identity` and `wall_us` need none after its first answer."""


class Fate:
    """How a call ended."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def ended(self) -> bool:
        self._thread.join(HANG_GUARD_S)
        return not self._thread.is_alive()


@pytest.mark.parametrize("is_open", [True, False])
def test_every_call_ends_when_the_server_does_not_answer(
    proxy: TcpProxy, database: str, is_open: bool
) -> None:
    """The calls run beside each other, on a store each and on one store that they share."""
    own = {name: hasty_store(through(proxy, database)) for name in PUBLIC_CALLS}
    shared = hasty_store(through(proxy, database))
    for store in [*own.values(), shared] if is_open else []:
        insert(store)
    proxy.is_hole = True
    fates = {name: Fate(partial(call, own[name])) for name, call in PUBLIC_CALLS.items()}
    fates |= {f"shared {name}": Fate(partial(call, shared)) for name, call in PUBLIC_CALLS.items()}
    fates["identity"] = Fate(hasty_store(through(proxy, database)).identity)
    hanging = [name for name, fate in fates.items() if not fate.ended()]
    assert not hanging
    wrong = {name: fate.error for name, fate in fates.items() if not isinstance(fate.error, Unavailable)}
    assert not wrong
    closing = [Fate(store.close) for store in [*own.values(), shared]]
    assert all(fate.ended() for fate in closing)
    proxy.is_hole = False
    insert(shared)
    shared.close()


def test_close_ends_while_unsent_bytes_wait_for_a_dead_server(proxy: TcpProxy, database: str) -> None:
    store = hasty_store(through(proxy, database))
    insert(store)
    proxy.is_stopped = True
    large = Fate(lambda: insert(store, payload=b"x" * 1_000_000))
    assert large.ended()
    assert isinstance(large.error, Unavailable)
    assert Fate(store.close).ended()
    proxy.is_stopped = False


def test_callers_share_the_time_of_a_server_that_is_away(database: str) -> None:
    store = PostgresStore(database.replace("@127.0.0.1:", "@127.0.0.1:1"), reconnect_s=0.5)
    with pytest.raises(Unavailable):
        insert(store)
    tries: list[None] = []
    store.address.connect = lambda: tries.append(None) or _refuse()  # type: ignore[func-returns-value, method-assign]
    with pytest.raises(StoreUnreachable):
        insert(store)
    assert len(tries) == 1, "the time of this server is over, and it was asked again"


def _refuse() -> Any:
    raise psycopg.OperationalError("refused")


def test_watchdog_leaves_the_descriptor_of_a_dropped_connection_alone(postgres: PostgresServer) -> None:
    address = PostgresStore(postgres.new_store()).address
    connection = address.connect()
    with address.watchdog.watching(connection):
        address.watchdog.drop(connection)
        assert not address.watchdog._watched


def check(report: Report, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{fault}: {report}")
    assert (report.lost, report.duplicated) == (0, 0)
    assert report.failed == 0, "a caller saw an outage that its call should have waited for"


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server of its own, to be killed."""
    with running_postgres() as server:
        yield server


def test_kill_of_the_server_under_load_loses_nothing_acknowledged(
    own_server: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill_and_start(_report: Report) -> None:
        own_server.kill()
        own_server.start()

    check(under_load(own_server.new_store(), kill_and_start), "kill -9 of the server", capsys)


def test_kill_of_the_server_under_an_engine_loses_nothing_accepted(
    own_server: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async def kill_and_start(load: rabbitmqload.Load) -> None:
        own_server.kill()
        await asyncio.to_thread(own_server.start)
        load.heal()

    load = asyncio.run(rabbitmqload.under_load(own_server.new_store(), kill_and_start))
    own_server.restart()  # a server ends with the thread that started it
    with capsys.disabled():
        print(f"\n{load.report('kill -9 of the server under an engine')}")
    assert load.accepted
    assert (load.lost, load.doubled, load.refused) == (0, 0, 0)


def test_black_hole_under_load_loses_nothing_acknowledged(
    proxy: TcpProxy, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def swallow(_report: Report) -> None:
        proxy.is_hole = True
        time.sleep(HOLE_S)
        proxy.is_hole = False

    check(under_load(through(proxy, database), swallow, SHORT_WAITS), "black hole", capsys)


def test_resets_in_random_phases_under_load_lose_nothing_acknowledged(
    proxy: TcpProxy, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, left = random.Random(7), [wish for wish in WISHES for _ in range(RESETS)]

    def watch(_chunk: bytes) -> str:
        return left.pop() if left and chance.random() < RESET_SHARE else "pass"

    def reset(_report: Report) -> None:
        proxy.watch = watch
        until(lambda: not left)

    check(under_load(through(proxy, database), reset), "resets in random phases", capsys)


def test_promotion_of_a_standby_while_writing_loses_nothing_acknowledged(
    own_server: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_standby(own_server) as (standby, url):

        def promote(_report: Report) -> None:
            own_server.kill()
            standby.promote()

        check(under_load(url, promote), "promotion of the standby", capsys)
    own_server.start()


def test_tls_checks_the_certificate_of_the_server(
    postgres: PostgresServer, database: str, tmp_path: Path
) -> None:
    certificate, key = make_self_signed(tmp_path / "tls", (), 1)
    other, _ = make_self_signed(tmp_path / "other", (), 1)
    with TlsProxy(postgres.port, certificate, key) as proxy:
        url = f"{database}&sslmode=verify-full".replace(f":{postgres.port}/", f":{proxy.port}/")
        store = PostgresStore(f"{url}&sslrootcert={certificate}")
        insert(store)
        with store.connected() as connection:
            assert connection.pgconn.ssl_in_use
        store.close()
        assert proxy.handshakes
        with pytest.raises(StoreRefused, match="certificate verify failed"):
            insert(PostgresStore(f"{url}&sslrootcert={other}", reconnect_s=3_600))
        wrong_name = f"{url}&sslrootcert={certificate}".replace("@127.0.0.1:", "@db.invalid:")
        with pytest.raises(StoreRefused, match="does not match host name"):
            insert(PostgresStore(f"{wrong_name}&hostaddr=127.0.0.1", reconnect_s=3_600))


def test_half_open_connections_are_found_by_asking_the_server(
    proxy: TcpProxy, database: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    report = under_load(through(proxy, database), lambda _report: proxy.freeze_all(), PROBES_ALONE)
    check(report, "half-open connections", capsys)
    assert "is half open and is closed" in caplog.text


def test_half_open_transaction_holds_no_locks_on_the_server(
    proxy: TcpProxy, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The session that the server still keeps has locked the record. Only a probe can end this session."""
    store = PostgresStore(through(proxy, database), waits=PROBES_ALONE)
    other = PostgresStore(database)
    message_id = insert(store)
    freezes = [proxy.freeze_all]

    def work(transaction: Transaction) -> None:
        transaction.records.find(ByIds((message_id,)))
        if freezes:
            freezes.pop()()
        transaction.apply(
            ByIds((message_id,)), lambda record, moment: lifecycle.defer(record, moment, 1, "x")
        )

    writing = Fate(lambda: store.write(work))
    assert writing.ended(), "the write waits for a half-open connection or for its locks"
    assert writing.error is None
    assert caplog.text.count("is half open and is closed") == 1
    assert [record.state for record in other.find(Listing())] == ["SCHEDULED"]
    store.close()
    other.close()


def test_server_that_works_is_not_interrupted_by_a_probe(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = PostgresStore(database, waits=EARLY_PROBES)
    insert(store)
    asked = []

    def work(transaction: Transaction) -> None:
        asked.append(transaction.ledger.connection.trip([("SELECT pg_sleep(1.5)", ())]))  # type: ignore[attr-defined]
        time.sleep(0.5)  # the client works, and the server is idle in the transaction
        transaction.insert([Envelope(queue="q", payload=b"")])

    store.write(work)
    assert len(asked) == 1, "the transaction was done again"
    assert "half open" not in caplog.text
    store.close()


def test_deadlocks_are_resolved_inside(database: str) -> None:
    stores = [PostgresStore(database), PostgresStore(database)]
    first, second = insert(stores[0]), insert(stores[0])
    both = threading.Barrier(2)

    def renew(store: PostgresStore, *names: str) -> None:
        waits = [True]

        def work(transaction: Transaction) -> None:
            transaction.records.find(ByIds(names[:1]))
            if waits.pop() if waits else False:
                both.wait(HANG_GUARD_S)
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
        thread.join(HANG_GUARD_S)
    assert [record.state for record in stores[0].find(Listing())] == ["SCHEDULED"] * 2
    check_consistency(stores[0])
    for store in stores:
        store.close()


def test_cells_that_several_processes_change_lose_no_change(database: str) -> None:
    stores = [PostgresStore(database) for _ in range(4)]

    def add_one(transaction: Transaction) -> None:
        transaction.cells.put("n", "n", b"%d" % (int(transaction.cells.get("n", "n") or b"0") + 1))

    def add(store: PostgresStore) -> None:
        for _ in range(15):
            store.write(add_one)

    threads = [threading.Thread(target=add, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    assert stores[0].read(lambda transaction: transaction.cells.get("n", "n")) == b"60"
    for store in stores:
        store.close()


PASSWORD = "hunter2%2Fx"  # noqa: S105 - it must not be found


@pytest.fixture
def locked_role(postgres: PostgresServer) -> str:
    """A role that needs a password and may create nothing."""
    rules = postgres.data / "pg_hba.conf"
    line = "host all locked 127.0.0.1/32 scram-sha-256\n"
    if line not in rules.read_text():
        rules.write_text(line + rules.read_text())
        with psycopg.connect(postgres.url(), autocommit=True) as connection:
            connection.execute("CREATE ROLE locked LOGIN PASSWORD 'hunter2/x'")
            connection.execute("SELECT pg_reload_conf()")
        until(lambda: not _can_connect(f"postgres://locked@127.0.0.1:{postgres.port}/postroom"))
    return "locked"


def _can_connect(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.mark.usefixtures("locked_role")
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("locked:wrong@HOST/postroom", 'password authentication failed for user "locked"'),
        ("locked@HOST/postroom", "no password supplied"),
        ("nobody@HOST/postroom", 'role "nobody" does not exist'),
        (f"locked:{PASSWORD}@HOST/none", 'database "none" does not exist'),
        (f"locked:{PASSWORD}@HOST/postroom", "permission denied for database postroom"),
        ("postroom@HOST/postroom?sslmode=require", "server does not support SSL"),
    ],
)
def test_server_that_refuses_gives_a_one_line_error_at_once(
    postgres: PostgresServer, address: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    host = f"127.0.0.1:{postgres.port}"
    store = PostgresStore("postgres://" + address.replace("HOST", host), reconnect_s=3_600.0)
    with pytest.raises(StoreRefused) as refused:
        insert(store)
    said = str(refused.value)
    assert says in said
    assert "\n" not in said
    assert "hunter2" not in f"{said} {refused.value!r} {caplog.text}"
    with pytest.raises(StoreRefused), store.connected():
        store.identity()


def test_server_that_is_full_is_asked_again(postgres: PostgresServer) -> None:
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("CREATE ROLE crowded LOGIN SUPERUSER CONNECTION LIMIT 1")
        connection.execute("ALTER ROLE crowded NOSUPERUSER")
    url = f"postgres://crowded@127.0.0.1:{postgres.port}/postroom"
    with psycopg.connect(url), pytest.raises(StoreUnreachable, match="too many connections"):
        insert(PostgresStore(url, reconnect_s=0.2))


def test_password_is_in_no_error_no_log_and_no_address(
    postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = PASSWORD
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
