"""Workers on PostgreSQL: `Engine`, procrastinate and pgqueuer, each with a handler that does nothing.

Rule 1: a queue is filled first, and statistics of its tables are taken, on each side. The clock runs from the
        start of the worker until its last handler, so that no side pays for being stopped.
Rule 2: a peer has the driver that its documentation recommends, and of its options those that were fastest:
        uvloop for all, a pool of asyncpg and batches as large as ours for pgqueuer (the default is 10), and
        the pool of psycopg for procrastinate.
Rule 3: every side commits synchronously.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import procrastinate
import uvloop
from enginebench.engines import open_engine
from pgqueuer import PgQueuer, Queries
from pgqueuer.db import AsyncpgPoolDriver

FILL_BATCH = 100
SLOTS = 50
PROCRASTINATE_SLOTS = 10  # more of them are slower on two cores
PROCRASTINATE_POOL = 4
TYPE = "nothing"

Work = Callable[[str, bytes, int], Awaitable[float]]


def rate(work: Work, url: str, payload: bytes, count: int) -> float:
    """Messages a second of one worker."""

    async def run() -> float:
        return await work(url, payload, count)

    return count / uvloop.run(run())


class Countdown:
    """The handler of every side: it knows when the last message was handled."""

    def __init__(self, count: int) -> None:
        self._left = count
        self.ended = asyncio.Event()
        self.at = 0.0

    def one_more(self) -> None:
        """One message was handled."""
        self._left -= 1
        if not self._left:
            self.at = time.perf_counter()
            self.ended.set()


async def ours(url: str, _payload: bytes, count: int) -> float:
    """A worker of `Engine` that admits a flood, with as many slots as pgqueuer takes messages at a time."""
    countdown = Countdown(count)
    engine = open_engine(url)

    @engine.handler(TYPE)
    async def nothing(_message: Any, _ctx: Any) -> None:
        countdown.one_more()

    for _ in range(0, count, FILL_BATCH):
        await engine.submit_many([{"type": TYPE, "org_id": "acme", "payload": {"issue": 7}}] * FILL_BATCH)
    await _analyze(url)
    began = time.perf_counter()
    running = asyncio.create_task(engine.run(concurrency=SLOTS))
    await countdown.ended.wait()
    await engine.stop()
    await running
    engine.close()
    return countdown.at - began


async def pgqueuer(url: str, payload: bytes, count: int) -> float:
    countdown = Countdown(count)
    async with asyncpg.create_pool(_for_libpq(url)) as pool:
        driver = AsyncpgPoolDriver(pool)
        queries = Queries(driver)
        if not await queries.has_table("pgqueuer"):
            await queries.install()
        for _ in range(0, count, FILL_BATCH):
            await queries.enqueue([TYPE] * FILL_BATCH, [payload] * FILL_BATCH, [0] * FILL_BATCH)
        await pool.execute("VACUUM ANALYZE")
        queuer = PgQueuer(driver)

        @queuer.entrypoint(TYPE)
        async def nothing(_job: Any) -> None:
            countdown.one_more()

        began = time.perf_counter()
        running = asyncio.create_task(queuer.run(batch_size=SLOTS))
        await countdown.ended.wait()
        queuer.shutdown.set()
        await running
    return countdown.at - began


async def procrastinate_worker(url: str, _payload: bytes, count: int) -> float:
    countdown = Countdown(count)
    connector = procrastinate.PsycopgConnector(
        conninfo=url, min_size=PROCRASTINATE_POOL, max_size=PROCRASTINATE_POOL
    )
    app = procrastinate.App(connector=connector)

    @app.task(name=TYPE)
    async def nothing(**_facts: Any) -> None:
        countdown.one_more()

    async with app.open_async():
        if not await app.check_connection_async():
            await app.schema_manager.apply_schema_async()
        tasks: list[dict[str, Any]] = [{"issue": 7}] * count
        await nothing.batch_defer_async(*tasks)
        await _analyze(url)
        began = time.perf_counter()
        await app.run_worker_async(wait=False, concurrency=PROCRASTINATE_SLOTS, install_signal_handlers=False)
        return countdown.at - began


async def _analyze(url: str) -> None:
    connection = await asyncpg.connect(_for_libpq(url))
    await connection.execute("VACUUM ANALYZE")
    await connection.close()


def _for_libpq(url: str) -> str:
    """The address of the database without what only our stores understand."""
    return url.partition("?")[0].replace("postgres://", "postgresql://")
