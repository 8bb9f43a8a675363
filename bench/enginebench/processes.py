"""How fast several worker processes drain a queue, beside one."""

import time
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, Goal, compare, readable

from enginebench.engines import TYPE, await_completed, batches, fresh, open_engine, url_in, workers
from enginebench.sizes import Sizes


def figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    many = sizes.workers
    for name, kind, count, goal in (
        ("empty handlers", "empty", sizes.empty, 0.7),
        ("handlers of 2 ms CPU", "burning", sizes.burning, 1.6),
    ):
        speed = compare(
            lambda kind=kind, count=count: drained(fresh(folder), kind, count, many),  # type: ignore[misc]
            lambda kind=kind, count=count: drained(fresh(folder), kind, count, 1),  # type: ignore[misc]
        )
        yield Figure(
            f"{many} worker processes, {name}",
            speed.ours,
            "messages/s",
            f"one process: {readable(speed.theirs)} messages/s",
            speed.ratio,
            [Goal("ratio", ">=", goal)],
        )


def drained(folder: Path, kind: str, count: int, processes: int) -> float:
    """Messages a second by so many processes, from their begin to the last commit."""
    url = url_in(folder)
    with open_engine(url) as engine, workers(url, kind, processes) as begin:
        for size in batches(count):
            engine.blocking.submit_many([{"type": TYPE, "org_id": "acme", "payload": {}}] * size)
        started = time.perf_counter()
        begin()
        await_completed(engine, count)
        return count / (time.perf_counter() - started)
