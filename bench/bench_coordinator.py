"""The speed of `Coordinator`: requests of 1,000 agents, streams, and the memory of idle agents.

The worker is a process of its own. Requests are stored as they come by default (P2, a shared fsync), and as
P0, which are acknowledged without an fsync.
"""

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginebench.probe import fsync_figure
from figures import REPEATS, Figure, Goal, machine, percentile, readable, run
from parts import parser_of, show

from postroom import Backpressure, Coordinator, Engine, Organization, Policy
from postroom.engine.agents.agent import Agent

SLOTS = 120
ORG = "acme"
NEVER = 10**9
POLICY = Policy(
    organization=Organization(max_agents=NEVER, max_depth=NEVER),
    backpressure=Backpressure(scale=NEVER, light=NEVER, heavy=NEVER, emergency=NEVER),
)
P50_MS, P99_MS = 5.0, 20.0
FIRST_CHUNK_MS = 5.0
CHUNKS_PER_S = 20_000
IDLE_MB = 100.0


@dataclass(frozen=True)
class Sizes:
    """The quick one only shows that everything runs."""

    agents: int = 1_000
    rate: float = 500.0
    duration_s: float = 20.0
    firsts: int = 200
    streams: int = 100
    chunks: int = 1_000
    idle: int = 10_000
    repeats: int = REPEATS


QUICK = Sizes(agents=20, rate=100.0, duration_s=0.5, firsts=3, streams=4, chunks=20, idle=100, repeats=1)


def open_engine(url: str) -> Engine:
    engine = Engine.open(url, POLICY)

    @engine.handler("tool_call")
    async def nothing(_message: Any, _context: Any) -> None:
        return None

    @engine.handler("model_call")
    async def stream(message: Any, context: Any) -> None:
        for number in range(message.payload["chunks"]):
            await context.stream(f"{time.time_ns()}" if not number else f"token {number} ")

    return engine


def work(url: str) -> None:
    """The worker process."""
    engine = open_engine(url)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: asyncio.ensure_future(engine.stop()))
        running = asyncio.create_task(engine.run(concurrency=SLOTS))
        await asyncio.sleep(0)
        print("ready", flush=True)
        await running

    asyncio.run(main())
    engine.close()


@contextmanager
def working(folder: Path) -> Iterator[str]:
    """Start a worker process on a new store. Gives the address of the store."""
    url = f"sqlite:///{tempfile.mkdtemp(dir=folder)}/queue.db"
    command = [sys.executable, __file__, "--worker", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield url
        finally:
            process.send_signal(signal.SIGTERM)


async def registered(coordinator: Coordinator, count: int) -> list[Agent]:
    """Register `count` agents, a hundred at a time."""
    agents: list[Agent] = []
    for first in range(0, count, 100):
        names = [f"agent-{number}" for number in range(first, min(count, first + 100))]
        agents += await asyncio.gather(*(coordinator.register(name, ORG) for name in names))
    return agents


# ---- requests ----------------------------------------------------------------------------------------


def request_figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    yield fsync_figure(folder)
    for name, priority in (("", 2), (" of P0", 0)):
        with working(folder) as url:
            latencies = asyncio.run(_requests(url, sizes, priority))
        count = f"{len(latencies):,} requests of {sizes.agents:,} agents at {sizes.rate:g}/s"
        p50, p99 = (1000 * percentile(latencies, share) for share in (0.5, 0.99))
        yield Figure(f"request to response{name}, p50", p50, "ms", count, goals=[Goal("value", "<", P50_MS)])
        yield Figure(f"request to response{name}, p99", p99, "ms", count, goals=[Goal("value", "<", P99_MS)])


async def _requests(url: str, sizes: Sizes, priority: int) -> list[float]:
    latencies: list[float] = []
    async with Engine.open(url, POLICY) as engine, Coordinator(engine) as coordinator:
        agents = await registered(coordinator, sizes.agents)

        async def ask(agent: Agent) -> None:
            begun = time.perf_counter()
            await agent.request(type="tool_call", payload={}, priority=priority, timeout_s=60)
            latencies.append(time.perf_counter() - begun)

        begun, tasks = time.perf_counter(), []
        for number in range(int(sizes.rate * sizes.duration_s)):
            await asyncio.sleep(max(0.0, begun + number / sizes.rate - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(agents[number % len(agents)])))
        await asyncio.gather(*tasks)
    return latencies


# ---- streams -----------------------------------------------------------------------------------------


def stream_figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    with working(folder) as url:
        firsts = asyncio.run(_first_chunks(url, sizes))
    yield Figure(
        "first chunk from the handler to the agent, p50",
        1000 * statistics.median(firsts),
        "ms",
        f"p99: {readable(1000 * percentile(firsts, 0.99))} ms, of {len(firsts):,}",
        goals=[Goal("value", "<=", FIRST_CHUNK_MS)],
    )
    rates = []
    for _ in range(sizes.repeats):
        with working(folder) as url:
            rates.append(asyncio.run(_chunks_per_s(url, sizes)))
    yield Figure(
        "chunks of concurrent streams",
        statistics.median(rates),
        "chunks/s",
        f"{sizes.streams:,} streams of {sizes.chunks:,} chunks",
        goals=[Goal("value", ">=", CHUNKS_PER_S)],
    )


async def _first_chunks(url: str, sizes: Sizes) -> list[float]:
    async with Engine.open(url, POLICY) as engine, Coordinator(engine) as coordinator:
        [agent] = await registered(coordinator, 1)
        found: list[float] = []
        for _ in range(sizes.firsts):
            stream = agent.stream(type="model_call", payload={"chunks": 1}, priority=0)
            found += [
                (time.time_ns() - int(part.chunk)) / 1e9
                async for part in stream
                if part.type == "stream_chunk"
            ]
        return found


async def _chunks_per_s(url: str, sizes: Sizes) -> float:
    async with Engine.open(url, POLICY) as engine, Coordinator(engine) as coordinator:
        agents = await registered(coordinator, sizes.streams)

        async def read(agent: Agent) -> int:
            stream = agent.stream(type="model_call", payload={"chunks": sizes.chunks}, timeout_s=120)
            return sum([1 async for part in stream if part.type == "stream_chunk"])

        begun = time.perf_counter()
        counts = await asyncio.gather(*map(read, agents))
        assert counts == [sizes.chunks] * sizes.streams
        return sum(counts) / (time.perf_counter() - begun)


# ---- memory ------------------------------------------------------------------------------------------


def memory_figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    command = [sys.executable, __file__, "--idle", f"sqlite:///{folder}/idle.db", str(sizes.idle)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    before, after = map(float, done.stdout.split())
    yield Figure(
        f"{sizes.idle:,} registered idle agents, memory of the process",
        after,
        "MB",
        f"before them: {readable(before)} MB",
        goals=[Goal("value", "<", IDLE_MB)],
    )


async def idle(url: str, count: int) -> None:
    """Register agents that do nothing, and print the memory of the process before and after."""
    async with Engine.open(url, POLICY) as engine, Coordinator(engine) as coordinator:
        before = resident_mb()
        agents = await registered(coordinator, count)
        await asyncio.sleep(2)
        print(before, resident_mb())
        assert len(agents) == count


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


BENCHES: dict[str, Callable[[Path, Sizes], Iterator[Figure]]] = {
    "requests": request_figures,
    "streams": stream_figures,
    "memory": memory_figures,
}


def main() -> None:
    parser = parser_of(__doc__, BENCHES)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--idle", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
    elif options.idle:
        asyncio.run(idle(options.idle[0], int(options.idle[1])))
    else:
        title = f"Coordinator: {machine()}; rates are medians of {REPEATS}"
        show(title, BENCHES, options.only, QUICK if options.quick else Sizes())


if __name__ == "__main__":
    run(main)
