"""The engine with its lanes in RabbitMQ: beside bare aio-pika, dramatiq and Celery on the same broker.

One process submits and one works, at the same time. Every side has stored a message when its submit returns,
except dramatiq as it comes. The engine stores each message twice: in the ledger and in the broker.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from enginebench import finish, peers
from enginebench.engines import fresh, open_engine, url_in, workers
from enginebench.probe import fsync_figure
from enginebench.throughput import rate
from enginebench.worker import PROBE
from figures import Figure, Goal, compare, load_figure, median_of, readable
from peersbench import brokers
from tests.privatepostgres import PostgresServer

from brokersbench.aiopikaapp import AioPika
from postroom.calls.submit import SubmitFields
from postroom.server.up.engine_load import run_load

P0_MS_GOAL = 10.0
P3 = 3
FLAT = 0.7
WARM_PER_S = 50.0

Ledger = tuple[str, Callable[[Path], AbstractContextManager[str]], float]


@dataclass(frozen=True)
class Sizes:
    """The quick one only shows that everything runs."""

    ours: int = 5_000
    peer: int = 2_000
    load_per_s: float = 200.0
    load_s: float = 15.0
    backlogs: tuple[int, int] = (1_000, 100_000)
    drained: int = 2_000


QUICK = Sizes(ours=100, peer=50, load_per_s=100.0, load_s=1.0, backlogs=(100, 500), drained=100)


@contextlib.contextmanager
def sqlite(folder: Path) -> Iterator[str]:
    yield url_in(folder)


@contextlib.contextmanager
def postgres(_folder: Path) -> Iterator[str]:
    server = PostgresServer().start()
    try:
        yield server.new_store()
    finally:
        server.remove()


LEDGERS: tuple[Ledger, ...] = (("SQLite", sqlite, 0.8), ("PostgreSQL", postgres, 0.6))


def figures(folder: Path, sizes: Sizes, only: str = "") -> Iterator[Figure]:
    """All figures, or those of one part."""
    yield fsync_figure(folder)
    with brokers.rabbitmq(folder) as broker:
        for name, part in PARTS.items():
            if only in ("", name):
                yield load_figure()
                yield from part(folder, broker, sizes)
    yield load_figure()


@contextlib.contextmanager
def over(ledger: Ledger, folder: Path, broker: str) -> Iterator[str]:
    """The URL of a new engine."""
    with ledger[1](fresh(folder)) as url:
        yield f"{broker.removesuffix('//')}/?ledger={url}"


# ---- throughput ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine_side(folder: Path, url: str) -> Iterator[peers.Ours]:
    side = peers.Ours.__new__(peers.Ours)
    side.engine = open_engine(url)
    with workers(url, "noting", slots=peers.SLOTS, variables={finish.FOLDER: str(folder)}) as begin:
        begin()
        yield side
    side.engine.close()


@contextlib.contextmanager
def bare(folder: Path, broker: str) -> Iterator[AioPika]:
    url = broker.removesuffix("//") + "/"
    words = ["-m", "brokersbench.aiopikaapp", url]
    with peers.child(words, {finish.FOLDER: str(folder)}, waits=True):
        side = AioPika(url, peers.CALLERS)
        yield side
        side.close()


def _throughput(folder: Path, broker: str, sizes: Sizes) -> Iterator[Figure]:
    for ledger in LEDGERS:
        with over(ledger, folder, broker) as url:
            yield from _beside_peers(ledger[0], fresh(folder), broker, url, ledger[2], sizes)


def _beside_peers(
    name: str, folder: Path, broker: str, url: str, goal: float, sizes: Sizes
) -> Iterator[Figure]:
    sides: tuple[tuple[str, peers.Opener, float], ...] = (
        ("aio-pika", bare, goal),
        ("dramatiq", peers.dramatiq_as_it_comes, 1.5),
        ("Celery", peers.celery, 3.0),
    )
    with engine_side(folder, url) as ours:
        rate(ours, folder, 1)
        for peer, opened, bound in sides:
            with opened(folder, broker) as theirs:
                rate(theirs, folder, 1)
                speed = compare(
                    lambda: rate(ours, folder, sizes.ours),
                    lambda theirs=theirs: rate(theirs, folder, sizes.peer),  # type: ignore[misc]
                )
            against = f"{peer}: {readable(speed.theirs)} messages/s"
            yield Figure(
                f"RabbitMQ over {name} / {peer}", speed.ours, "messages/s", against, speed.ratio,
                [Goal("ratio", ">=", bound)],
            )  # fmt: skip


def _cluster(folder: Path, broker: str, sizes: Sizes) -> Iterator[Figure]:
    """Quorum queues on three nodes of this machine, beside classic queues on one node."""
    classic_folder, quorum_folder, ledger = fresh(folder), fresh(folder), LEDGERS[0]
    with (
        brokers.rabbitmq_cluster(fresh(folder)) as nodes,
        over(ledger, folder, broker) as classic_url,
        over(ledger, folder, nodes) as quorum_url,
        engine_side(classic_folder, classic_url) as classic,
        engine_side(quorum_folder, quorum_url) as quorum,
    ):
        for side, where in ((classic, classic_folder), (quorum, quorum_folder)):
            rate(side, where, 1)
        speed = compare(
            lambda: rate(quorum, quorum_folder, sizes.ours), lambda: rate(classic, classic_folder, sizes.ours)
        )
    against = f"one node, classic queues: {readable(speed.theirs)} messages/s"
    yield Figure("three nodes, quorum queues", speed.ours, "messages/s", against, speed.ratio)


# ---- latency and backlog -------------------------------------------------------------------------------


def _latencies(folder: Path, broker: str, sizes: Sizes) -> Iterator[Figure]:
    for ledger in LEDGERS:
        with over(ledger, folder, broker) as url:
            yield _latency(ledger[0], url, sizes)


def _latency(name: str, url: str, sizes: Sizes) -> Figure:
    with workers(url, PROBE) as begin, open_engine(url) as engine:
        begin()
        asyncio.run(run_load(engine, rate=WARM_PER_S, duration_s=1.0, orgs=10))  # lanes are set up
        report = asyncio.run(run_load(engine, rate=sizes.load_per_s, duration_s=sizes.load_s, orgs=10))
    p0 = report.classes[0]
    goals = [Goal("value", "<", P0_MS_GOAL)]
    return Figure(f"RabbitMQ over {name}, P0 p99 at {sizes.load_per_s:g}/s", p0.p99_ms, "ms", goals=goals)


def _backlogs(folder: Path, broker: str, sizes: Sizes) -> Iterator[Figure]:
    for ledger in LEDGERS:
        with over(ledger, folder, broker) as url:
            yield _backlog(ledger[0], fresh(folder), url, sizes)


def _backlog(name: str, folder: Path, url: str, sizes: Sizes) -> Figure:
    """How fast a worker drains a small and a large backlog of one organization."""

    def drain(waiting: int) -> float:
        run = f"drained-{waiting}-{time.monotonic_ns()}"
        with open_engine(url) as engine:
            messages: list[SubmitFields] = [
                {"type": "tool_call", "org_id": "acme", "priority": P3,
                 "payload": {"run": run, "number": number, "count": sizes.drained}}
                for number in range(waiting)
            ]  # fmt: skip
            for first in range(0, waiting, 1_000):
                engine.blocking.submit_many(messages[first : first + 1_000])
        with workers(url, "noting", slots=peers.SLOTS, variables={finish.FOLDER: str(folder)}) as begin:
            began = time.perf_counter()
            begin()
            return sizes.drained / (finish.wait(folder, run) - began)

    small, large = sizes.backlogs
    few = median_of(lambda: drain(small + sizes.drained))
    many = drain(large)
    return Figure(
        f"RabbitMQ over {name}, {large:,} waiting", many, "messages/s", f"{small:,}: {readable(few)}",
        many / few, [Goal("ratio", ">=", FLAT)],
    )  # fmt: skip


PARTS: dict[str, Callable[[Path, str, Sizes], Iterator[Figure]]] = {
    "throughput": _throughput,
    "latency": _latencies,
    "backlog": _backlogs,
    "cluster": _cluster,
}
