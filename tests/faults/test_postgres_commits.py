"""When a commit on PostgreSQL waits for the disk, and whose clock its times come from."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import psycopg
import pytest

from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.message import Durability, Envelope
from postroom.stores.base import FOREVER_NS, Listing
from postroom.stores.own_ids import EARLIER_RULE
from postroom.stores.postgres.known import PostgresKnown
from postroom.stores.postgres.store import PostgresStore
from postroom.stores.transaction import Claim, Transaction
from postroom.system.clock import SystemClock
from tests.pgbouncer import behind
from tests.postgresserver import database, postgres
from tests.privatepostgres import PostgresServer, running_postgres
from tests.tcpproxy import TcpProxy

__all__ = ["database", "postgres"]  # fixtures

HOUR_NS = 3_600 * NANOS_PER_S
WITHOUT_SYNC = b"synchronous_commit = off"


@pytest.mark.parametrize(
    ("classes", "waits"),
    [(["os"], False), (["group"], True), (["fsync"], True), (["os", "group"], True)],
)
def test_only_a_commit_of_class_os_alone_does_not_wait_for_the_disk(
    postgres: PostgresServer, database: str, classes: list[Durability], waits: bool
) -> None:
    sent: list[bytes] = []

    def watch(chunk: bytes) -> str:
        sent.append(chunk)
        return "pass"

    envelopes = [Envelope(queue="q", payload=b"{}", durability=each) for each in classes]
    with TcpProxy(postgres.port) as proxy:
        store = PostgresStore(behind(proxy.port, database))  # its statements are sent as text each time
        store.identity()
        proxy.watch = watch
        store.write(lambda transaction: transaction.insert(envelopes))
        proxy.watch = lambda _chunk: "pass"
        assert (WITHOUT_SYNC not in b"".join(sent)) is waits
        store.close()


_NOTE_AT_COMMIT = """
    CREATE TABLE {schema}.commits (synchronous_commit text);
    CREATE FUNCTION {schema}.note_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO {schema}.commits VALUES (current_setting('synchronous_commit'));
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER note_commit AFTER INSERT ON {schema}.events DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION {schema}.note_commit();
"""

_COMMITS = "SELECT * FROM {schema}.commits"


@pytest.fixture
def role(postgres: PostgresServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """A role whose sessions begin with a value of synchronous_commit."""
    name = f"role_{request.param}"
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN SUPERUSER")  # type: ignore[arg-type, unused-ignore]
        connection.execute(f"ALTER ROLE {name} SET synchronous_commit = {request.param}")  # type: ignore[arg-type, unused-ignore]
        yield name
        connection.execute(f"REASSIGN OWNED BY {name} TO postroom; DROP ROLE {name}")  # type: ignore[arg-type, unused-ignore]


@pytest.mark.parametrize(
    ("role", "durability", "value"),
    [
        ("off", "fsync", "on"),
        ("off", "group", "on"),
        ("off", "os", "off"),
        ("local", "group", "local"),
        ("remote_apply", "group", "remote_apply"),
        ("on", "group", "on"),
    ],
    indirect=["role"],
)
def test_a_role_without_synchronous_commit_loses_nothing_that_was_promised(
    role: str, postgres: PostgresServer, database: str, durability: Durability, value: str
) -> None:
    url = database.replace("postroom@", f"{role}@")
    with closing(PostgresStore(url)) as store:
        store.identity()
        with psycopg.connect(postgres.url()) as connection:
            connection.execute(_NOTE_AT_COMMIT.format(schema=store.address.schema))  # type: ignore[arg-type, unused-ignore]
        envelope = Envelope(queue="q", payload=b"{}", durability=durability)
        store.write(lambda transaction: transaction.insert([envelope]))
        with psycopg.connect(postgres.url()) as connection:
            found = connection.execute(_COMMITS.format(schema=store.address.schema)).fetchall()  # type: ignore[arg-type, unused-ignore]
    assert found == [(value,)]


def test_killed_postgres_without_synchronous_commit_keeps_its_promises() -> None:
    settings = {"synchronous_commit": "off", "wal_writer_delay": "10s"}
    classes: tuple[Durability, ...] = ("group", "fsync", "group")
    with running_postgres(settings) as server, closing(PostgresStore(server.new_store())) as store:
        for each in classes:
            store.write(partial(_insert, Envelope(queue="q", payload=b"{}", durability=each)))
            server.kill()
            server.start()
        assert [record.durability for record in store.find(Listing())] == [*classes]


def _insert(envelope: Envelope, transaction: Transaction) -> None:
    transaction.insert([envelope])


def test_worker_pause_needs_no_round_trip_and_ends_at_the_deadline(database: str) -> None:
    with closing(PostgresStore(database)) as store:
        assert store.known_deadline_ns() is None  # it has asked nothing yet
        store.write(lambda transaction: transaction.put_back(10))
        assert store.known_deadline_ns() == pytest.approx(FOREVER_NS, rel=0.5)
        delayed = Envelope(queue="q", payload=b"{}", delay_ns=60 * NANOS_PER_S)
        store.write(partial(_insert, delayed))
        store.write(lambda transaction: transaction.put_back(10))
        found = store.known_deadline_ns()
        assert found is not None
        assert 30 * NANOS_PER_S < found <= 60 * NANOS_PER_S


def test_a_deadline_of_a_commit_under_way_is_not_forgotten_by_a_read() -> None:
    known = PostgresKnown("t1", EARLIER_RULE)
    known.note_deadline(5_000, now_ns=1_000)  # its commit is not over when another thread reads
    known.set_deadlines([9_000, None], now_ns=2_000)
    assert known.deadlines == (5_000, 2_000)
    known.set_deadlines([9_000, None], now_ns=6_000)  # it is over, or has happened
    assert known.deadlines == (9_000, 6_000)
    known.note_deadline(2 * HOUR_NS, now_ns=7_000)
    known.set_deadlines([], now_ns=HOUR_NS)  # by now a read shows what was committed
    assert known.deadlines == (FOREVER_NS, HOUR_NS)


def test_the_clock_is_that_of_the_database_on_every_host(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = PostgresStore(database), PostgresStore(database)
    terms = Claim("q", "w", 1, 60 * NANOS_PER_S)
    here.write(lambda transaction: transaction.insert([Envelope(queue="q", payload=b"{}")]))
    assert here.write(lambda transaction: transaction.claim(terms))
    now_us = here.write(lambda transaction: transaction.wall_us)
    boot_ns = SystemClock.boot_ns
    monkeypatch.setattr(SystemClock, "boot_ns", lambda self: boot_ns(self) + HOUR_NS)
    monkeypatch.setattr(SystemClock, "wall_us", lambda _self: 0)
    there.write(lambda transaction: transaction.put_back(10))
    assert not there.write(lambda transaction: transaction.claim(terms)), "a lease ended by another clock"
    assert there.write(lambda transaction: transaction.wall_us) >= now_us
    assert [record.state for record in there.find(Listing())] == ["PROCESSING"]
    here.close()
    there.close()
