"""PostgreSQL under the store, beside raw SQL, procrastinate and pgqueuer on the same server.

Every side commits synchronously. A figure of ours is that of a store handle: the contracts above it are
measured by the benches of `Tasks` and `Engine`.
"""

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import procrastinate
import psycopg
from figures import Figure, Goal, compare, median_of
from pgqueuer import PgQueuer, PsycopgDriver, Queries

from postroom import Engine
from postroom.message import Envelope
from postroom.runtime.engine_load import register_probe, run_load
from postroom.stores.postgres import PostgresStore
from postroom.stores.transaction import Claim
from postroom.testing.postgres_server import PostgresServer, running_postgres

PAYLOAD = b'{"issue": 7, "text": "' + b"x" * 90 + b'"}'
PUT_AT_ONCE = 100
TAKEN_AT_ONCE = 50
LEASE_NS = 60_000_000_000
WORKERS = 4
MIX = (100.0, 0.0, 0.0, 0.0)

RAW_TABLE = """CREATE TABLE IF NOT EXISTS raw (id bigserial PRIMARY KEY, state text NOT NULL DEFAULT 'ready',
    priority int NOT NULL DEFAULT 2, payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now(),
    lease_until timestamptz, attempts int NOT NULL DEFAULT 0, worker text, done_at timestamptz)"""
RAW_READY = "CREATE INDEX IF NOT EXISTS raw_ready ON raw (priority, id) WHERE state = 'ready'"
RAW_LEASED = "CREATE INDEX IF NOT EXISTS raw_leased ON raw (lease_until) WHERE state = 'leased'"
RAW_CLAIM = """UPDATE raw SET state = 'leased', lease_until = now() + interval '60 s',
    attempts = attempts + 1, worker = 'w' WHERE id IN (SELECT id FROM raw WHERE state = 'ready'
    ORDER BY priority, id LIMIT %s FOR UPDATE SKIP LOCKED) RETURNING id, payload"""
RAW_DONE = "UPDATE raw SET state = 'done', done_at = now() WHERE id = ANY(%s) AND state = 'leased'"


@dataclass(frozen=True)
class Sizes:
    messages: int = 20_000
    slow_messages: int = 1_000
    backlog: int = 1_000_000
    small_backlog: int = 1_000
    seconds: float = 10.0


QUICK = Sizes(messages=1_000, slow_messages=100, backlog=5_000, small_backlog=500, seconds=2.0)


def figures(sizes: Sizes, only: str = "") -> Iterator[Figure]:
    """All figures, or those of one part."""
    with running_postgres({"shared_buffers": "256MB", "max_wal_size": "4GB"}) as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            for query in (RAW_TABLE, RAW_READY, RAW_LEASED):
                connection.execute(query)
        for name, part in PARTS.items():
            if only in ("", name):
                yield from part(server, sizes)


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
    for _ in range(count // PUT_AT_ONCE):
        with connection.transaction():
            connection.cursor().executemany(
                "INSERT INTO raw (payload) VALUES (%s)", [(PAYLOAD.decode(),)] * PUT_AT_ONCE
            )


def take_raw(connection: Any, most: int) -> None:
    taken = 0
    while taken < most:
        with connection.transaction():
            rows = connection.execute(RAW_CLAIM, (TAKEN_AT_ONCE,)).fetchall()
        if not rows:
            break
        with connection.transaction():
            connection.execute(RAW_DONE, ([row[0] for row in rows],))
        taken += len(rows)


def _throughput(server: PostgresServer, sizes: Sizes) -> Iterator[Figure]:
    store, count = PostgresStore(server.new_store()), sizes.messages
    with psycopg.connect(server.url(), autocommit=True, prepare_threshold=0) as raw:
        found = compare(
            lambda: timed(count, lambda: put(store, count)), lambda: timed(count, lambda: put_raw(raw, count))
        )
        against = f"raw SQL, {found.theirs:,.0f}/s"
        yield Figure(
            "insert, 100 in a commit", found.ours, "/s", against, found.ratio, [Goal("ratio", ">=", 0.7)]
        )
        found = compare(
            lambda: timed(count, lambda: take(store, count)),
            lambda: timed(count, lambda: take_raw(raw, count)),
        )
        against = f"raw SKIP LOCKED, {found.theirs:,.0f}/s"
        yield Figure(
            "claim 50 and complete", found.ours, "/s", against, found.ratio, [Goal("ratio", ">=", 0.7)]
        )
    store.close()


# ---- peers -----------------------------------------------------------------------------------------


def _peers(server: PostgresServer, sizes: Sizes) -> Iterator[Figure]:
    count = sizes.slow_messages
    for name, peer, bound in (("procrastinate", procrastinate_rate, 8.0), ("pgqueuer", pgqueuer_rate, 1.2)):
        store, url = PostgresStore(server.new_store()), server.new_database()

        def ours(store: PostgresStore = store) -> float:
            put(store, sizes.messages)
            return timed(sizes.messages, lambda: take(store, sizes.messages))

        found = compare(ours, lambda peer=peer, url=url: asyncio.run(peer(url, count)))  # type: ignore[misc]
        yield Figure(
            "claim and complete", found.ours, "/s", f"{name}, {found.theirs:,.0f}/s", found.ratio,
            [Goal("ratio", ">=", bound)],
        )  # fmt: skip
        store.close()


async def procrastinate_rate(url: str, count: int) -> float:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))

    @app.task(name="nothing")
    async def nothing(**_facts: Any) -> None:
        pass

    async with app.open_async():
        if not await app.check_connection_async():
            await app.schema_manager.apply_schema_async()
        for _ in range(count):
            await nothing.defer_async(issue=7)
        began = time.perf_counter()
        await app.run_worker_async(wait=False, concurrency=10, install_signal_handlers=False)
        return count / (time.perf_counter() - began)


async def pgqueuer_rate(url: str, count: int) -> float:
    connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
    async with connection:
        driver = PsycopgDriver(connection)
        queries = Queries(driver)
        if not await queries.has_table("pgqueuer"):
            await queries.install()
        await queries.enqueue(["nothing"] * count, [PAYLOAD] * count, [0] * count)
        queuer, done = PgQueuer(driver), 0

        @queuer.entrypoint("nothing")
        async def nothing(_job: Any) -> None:
            nonlocal done
            done += 1
            if done == count:
                queuer.shutdown.set()

        began = time.perf_counter()
        await queuer.run(batch_size=10)
        return count / (time.perf_counter() - began)


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
        return _rate_of_processes(_work, url, workers, sizes.messages)

    def raw(workers: int) -> float:
        with psycopg.connect(server.url(), autocommit=True, prepare_threshold=0) as connection:
            put_raw(connection, sizes.messages)
        return _rate_of_processes(_work_raw, server.url(), workers, sizes.messages)

    found = compare(lambda: ours(WORKERS), lambda: ours(1))
    yield Figure(
        "claim and complete, 4 processes", found.ours, "/s", f"1 process, {found.theirs:,.0f}/s", found.ratio,
        [Goal("ratio", ">=", 1.0)],
    )  # fmt: skip
    peer = compare(lambda: raw(WORKERS), lambda: raw(1))
    yield Figure(
        "raw SKIP LOCKED, 4 processes", peer.ours, "/s", f"1 process, {peer.theirs:,.0f}/s", peer.ratio
    )


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
    small, large = PostgresStore(server.new_store()), PostgresStore(server.new_store())
    put(large, sizes.backlog)
    each = sizes.small_backlog

    def rate(store: PostgresStore) -> float:
        put(store, each)
        return timed(each, lambda: take(store, each))

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
