"""How long a message of one organization waits while another one floods the queue, beside an idle queue."""

import asyncio
import statistics
from collections.abc import Iterator
from pathlib import Path

from figures import REPEATS, Figure, Goal, percentile, readable

from enginebench.engines import batches, fresh, open_engine, url_in, workers
from enginebench.sizes import Sizes
from enginebench.worker import PROBE
from postroom import Engine
from postroom.server.up.engine_load import probe_message

PRIORITY = 2
PAUSE_S = 0.02
"""Between two messages of the quiet organization."""


def figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    measured = [asyncio.run(_measured(url_in(fresh(folder)), sizes)) for _ in range(REPEATS)]
    idle_ms = statistics.median(idle for idle, _ in measured)
    yield Figure(
        f"message beside a flood of {sizes.flood:,}, p99",
        statistics.median(flooded for _, flooded in measured),
        "ms",
        f"without a flood, p99: {readable(idle_ms)} ms",
        statistics.median(flooded / idle for idle, flooded in measured),
        [Goal("ratio", "<=", 3)],
    )


async def _measured(url: str, sizes: Sizes) -> tuple[float, float]:
    """p99 of the waits of single messages: of an idle engine, and during the flood."""
    with workers(url, PROBE) as begin:
        begin()
        async with open_engine(url) as engine:
            engine.register_type(probe_message("quiet", PRIORITY)["type"])
            await _waits_ms(engine, 1)
            idle = await _waits_ms(engine, sizes.idle)
            for size in batches(sizes.flood):
                await engine.submit_many([probe_message("noisy", PRIORITY)] * size)
            flooded = await _waits_ms(engine, sizes.singles)
    return percentile(idle, 0.99), percentile(flooded, 0.99)


async def _waits_ms(engine: Engine, count: int) -> list[float]:
    """From submit to the start of the handler, of messages that are submitted one after the other."""
    waits: list[float] = []
    for _ in range(count):
        await asyncio.sleep(PAUSE_S)
        handle = await engine.submit(**probe_message("quiet", PRIORITY))
        waits.append(await handle.result())
    return waits
