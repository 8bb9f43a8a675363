"""PostgreSQL under the store, beside raw SQL, procrastinate and pgqueuer on the same server.

Rule 1: every side commits synchronously.
Rule 2: each turn of each side begins with empty tables. They are analyzed once they are full, so that neither
        side plans for another size.
Rule 3: beside raw SQL, ours is a store handle that claims 50 at a time. Beside a worker of a peer, it is a
        worker of `Engine`.
"""

import asyncio
import importlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from figures import Comparison, Figure, Goal, compare, load_figure, median_of, readable
from tests.privatepostgres import PostgresServer, running_postgres

from postroom import Engine
from postroom.message import Envelope
from postroom.server.up.engine_load import register_probe, run_load
from postroom.stores.postgres.store import PostgresStore
from postroom.stores.transaction import Claim

PAYLOAD = b'{"issue": 7, "text": "' + b"x" * 90 + b'"}'
PUT_AT_ONCE = 100
TAKEN_AT_ONCE = 50
LEASE_NS = 60_000_000_000
WORKERS = 4
MIX = (100.0, 0.0, 0.0, 0.0)

RAW_TABLE = """CREATE TABLE raw (id bigserial PRIMARY KEY, state text NOT NULL DEFAULT 'ready',
    priority int NOT NULL DEFAULT 2, payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now(),
    lease_until timestamptz, attempts int NOT NULL DEFAULT 0, worker text, done_at timestamptz)"""
RAW_READY = "CREATE INDEX raw_ready ON raw (priority, id) WHERE state = 'ready'"
RAW_LEASED = "CREATE INDEX raw_leased ON raw (lease_until) WHERE state = 'leased'"
RAW_INSERT = "INSERT INTO raw (payload) SELECT unnest(%s::jsonb[])"
RAW_CLAIM = """UPDATE raw SET state = 'leased', lease_until = now() + interval '60 s',
    attempts = attempts + 1, worker = 'w' WHERE id IN (SELECT id FROM raw WHERE state = 'ready'
    ORDER BY priority, id LIMIT %s FOR UPDATE SKIP LOCKED) RETURNING id, payload"""
RAW_DONE = "UPDATE raw SET state = 'done', done_at = now() WHERE id = ANY(%s) AND state = 'leased'"


@dataclass(frozen=True)
class Sizes:
    messages: int = 20_000
    turn_messages: int = 5_000
    slow_messages: int = 1_000
    backlog: int = 1_000_000
    small_backlog: int = 1_000
    seconds: float = 10.0
    turns: int = 3


QUICK = Sizes(
    messages=1_000, turn_messages=500, slow_messages=100, backlog=5_000, small_backlog=500, seconds=1.0
)


def figures(sizes: Sizes, only: str = "") -> Iterator[Figure]:
    """All figures, or those of one part."""
    with running_postgres({"shared_buffers": "256MB", "max_wal_size": "4GB"}) as server:
        for name, part in PARTS.items():
            if only in ("", name):
                yield load_figure()
                yield from part(server, sizes)
    yield load_figure()


def timed(count: int, work: Callable[[], object]) -> float:
    """Messages a second."""
    began = time.perf_counter()
    work()
    return count / (time.perf_counter() - began)


# ---- ours and raw SQL ------------------------------------------------------------------------------


def put(store: PostgresStore, count: int) -> None:
    batch = [Envelope(queue="a", payload=PAYLOAD, durability="group")] * PUT_AT_ONCE
    for _ in range(count // PUT_AT_ONCE):
        store.write(lambda transaction: transaction.insert(batch))


def take(store: PostgresStore, most: int) -> int:
    taken, terms = 0, Claim("a", "w", TAKEN_AT_ONCE, LEASE_NS)
    while taken < most:
        held = store.write(lambda transaction: transaction.claim(terms))
        if not held:
            break
        done = {one.message_id: (one.lease, b"null") for one in held}
        store.write(lambda transaction, done=done: transaction.complete(done))  # type: ignore[misc]
        taken += len(held)
    return taken


def put_raw(connection: Any, count: int) -> None:
    batch = [PAYLOAD.decode()] * PUT_AT_ONCE
    for _ in range(count // PUT_AT_ONCE):
        connection.execute(RAW_INSERT, (batch,))


def take_raw(connection: Any, most: int) -> None:
    """Two statements a batch, each of which is a transaction of its own and one trip."""
    taken = 0
    while taken < most:
        rows = connection.execute(RAW_CLAIM, (TAKEN_AT_ONCE,)).fetchall()
        if not rows:
            break
        connection.execute(RAW_DONE, ([row[0] for row in rows],))
        taken += len(rows)


@contextmanager
def raw_table(server: PostgresServer) -> Iterator[Any]:
    """A connection to a new table."""
    with psycopg.connect(server.url(), autocommit=True, prepare_threshold=0) as connection:
        for query in ("DROP TABLE IF EXISTS raw", RAW_TABLE, RAW_READY, RAW_LEASED):
            connection.execute(query)
        yield connection


@contextmanager
def new_store(server: PostgresServer) -> Iterator[PostgresStore]:
    """An open store without messages."""
    store = PostgresStore(server.new_store())
    store.identity()
    yield store
    store.close()


def analyze(server: PostgresServer) -> None:
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")


def drained(server: PostgresServer, count: int) -> float:
    """Claims and completions a second of a store handle."""
    with new_store(server) as store:
        put(store, count)
        analyze(server)
        return timed(count, lambda: take(store, count))


def drained_raw(server: PostgresServer, count: int) -> float:
    with raw_table(server) as raw:
        put_raw(raw, count)
        analyze(server)
        return timed(count, lambda: take_raw(raw, count))


def _throughput(server: PostgresServer, sizes: Sizes) -> Iterator[Figure]:
    count = sizes.turn_messages

    def inserted() -> float:
        with new_store(server) as store:
            return timed(count, lambda: put(store, count))

    def inserted_raw() -> float:
        with raw_table(server) as raw:
            return timed(count, lambda: put_raw(raw, count))

    found = compare(inserted, inserted_raw, turns=sizes.turns)
    yield _beside("insert, 100 in a commit", "raw SQL", found, 0.7)
    found = compare(lambda: drained(server, count), lambda: drained_raw(server, count), turns=sizes.turns)
    yield _beside("claim 50 and complete", "raw SKIP LOCKED", found, 0.7)


def _beside(name: str, peer: str, found: Comparison, bound: float) -> Figure:
    against = f"{peer}, {readable(found.theirs)}/s"
    return Figure(name, found.ours, "/s", against, found.ratio, [Goal("ratio", ">=", bound)])


# ---- peers -----------------------------------------------------------------------------------------


def _peers(server: PostgresServer, sizes: Sizes) -> Iterator[Figure]:
    rivals = importlib.import_module("brokersbench.postgrespeers")  # worker processes need none of this
    peers = (
        ("procrastinate", rivals.procrastinate_worker, sizes.slow_messages, sizes.turn_messages, 8.0),
        ("pgqueuer", rivals.pgqueuer, sizes.messages, sizes.messages, 1.2),
    )
    for name, worker, their_count, count, bound in peers:

        def theirs(worker: Any = worker, count: int = their_count) -> float:
            return float(rivals.rate(worker, server.new_database(), PAYLOAD, count))

        def ours(count: int = count) -> float:
            return float(rivals.rate(rivals.ours, server.new_store(), PAYLOAD, count))

        yield _beside("a worker of Engine, 50 slots", name, compare(ours, theirs), bound)


# ---- processes, backlog and latency ----------------------------------------------------------------


def _work(url: str, ready: Any, ended: Any) -> None:
    store = PostgresStore(url)
    store.identity()
    ready.wait()
    take(store, sys.maxsize)
    ended.put(time.perf_counter())
    store.close()


def _work_raw(url: str, ready: Any, ended: Any) -> None:
    with psycopg.connect(url, autocommit=True, prepare_threshold=0) as raw:
        ready.wait()
        take_raw(raw, sys.maxsize)
        ended.put(time.perf_counter())


def _processes(server: PostgresServer, sizes: Sizes) -> Iterator[Figure]:
    """Four processes to one, of ours and of raw SQL: both meet the cores and the disk of the same machine."""

    def ours(workers: int) -> float:
        url = server.new_store()
        store = PostgresStore(url)
        put(store, sizes.messages)
        store.close()
        analyze(server)
        return _rate_of_processes(_work, url, workers, sizes.messages)

    def raw(workers: int) -> float:
        with raw_table(server) as connection:
            put_raw(connection, sizes.messages)
        analyze(server)
        return _rate_of_processes(_work_raw, server.url(), workers, sizes.messages)

    found = compare(lambda: ours(WORKERS), lambda: ours(1))
    yield _beside("claim and complete, 4 processes", "1 process", found, 1.0)
    peer = compare(lambda: raw(WORKERS), lambda: raw(1))
    against = f"1 process, {readable(peer.theirs)}/s"
    yield Figure("raw SKIP LOCKED, 4 processes", peer.ours, "/s", against, peer.ratio)


def _rate_of_processes(work: Callable[[str, Any, Any], None], url: str, workers: int, count: int) -> float:
    """Messages a second, from the common start until the last process finds no more work."""
    context = multiprocessing.get_context("spawn")
    ready, ended = context.Barrier(workers + 1), context.Queue()
    processes = [context.Process(target=work, args=(url, ready, ended)) for _ in range(workers)]
    for process in processes:
        process.start()
    ready.wait()
    began = time.perf_counter()  # of one clock for all processes
    last = max(ended.get() for _ in processes)
    for process in processes:
        process.join()
    return float(count / (last - began))


def _backlog(server: PostgresServer, sizes: Sizes) -> Iterator[Figure]:
    each = sizes.small_backlog

    def rate(store: PostgresStore) -> float:
        put(store, each)
        return timed(each, lambda: take(store, each))

    with new_store(server) as small, new_store(server) as large:
        put(large, sizes.backlog - each)  # with each turn's messages it is as full as a queue may be
        found = compare(lambda: rate(large), lambda: rate(small), turns=3)
    name = f"claim and complete, {sizes.backlog:,} waiting"
    against = f"{each:,} waiting, {found.theirs:,.0f}/s"
    yield Figure(name, found.ours, "/s", against, found.ratio, [Goal("ratio", ">=", 0.8)])


def _latency(server: PostgresServer, sizes: Sizes) -> Iterator[Figure]:
    def p99_ms() -> float:
        async def load() -> float:
            with Engine.open(server.new_store()) as engine:
                register_probe(engine)
                worker = asyncio.create_task(engine.run())
                report = await run_load(engine, rate=200.0, orgs=10, mix=MIX, duration_s=sizes.seconds)
                await engine.stop()
                await worker
                return float(report.classes[0].p99_ms)

        return asyncio.run(load())

    yield Figure("P0 at 200/s, p99 to the handler", median_of(p99_ms), "ms", goals=[Goal("value", "<", 10.0)])


PARTS: dict[str, Callable[[PostgresServer, Sizes], Iterator[Figure]]] = {
    "throughput": _throughput,
    "peers": _peers,
    "processes": _processes,
    "backlog": _backlog,
    "latency": _latency,
}
