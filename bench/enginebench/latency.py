"""From `submit` to the start of the handler in another process, by priority.

The messages that have waited for a minute are submitted with a store clock that is a minute slow. The worker
and the load read the same store with the clock of the machine, so that they see their age.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, Goal, readable

from enginebench.engines import ADMIT_ALL, batches, fresh, open_engine, url_in, workers
from enginebench.probe import fsync_figure
from enginebench.sizes import Sizes
from enginebench.worker import PROBE
from postroom import Engine
from postroom.server.up.engine_load import ClassLatency, LoadReport, probe_message, run_load, targets_ms
from postroom.system.clock import SystemClock

AGE_S = 60
ORGANIZATIONS = 10
P3 = 3


class SlowClock(SystemClock):
    """The clock of the machine as it was a minute ago."""

    def boot_ns(self) -> int:
        return super().boot_ns() - AGE_S * 1_000_000_000

    def wall_us(self) -> int:
        return super().wall_us() - AGE_S * 1_000_000


def figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    probe = fsync_figure(folder)
    yield probe
    targets = targets_ms(probe.value)
    yield from _classes("", loaded(fresh(folder), sizes, targets, aged=0))
    aged = sizes.aged
    name = f", {aged:,} P3 waiting for {AGE_S} s"
    yield from _classes(name, loaded(fresh(folder), sizes, targets, aged=aged))


def loaded(folder: Path, sizes: Sizes, targets: tuple[float, ...], aged: int) -> LoadReport:
    """One load on a new store, in which so many messages wait already."""
    url = url_in(folder)
    _submit_aged(url, aged)
    with workers(url, PROBE) as begin, open_engine(url) as engine:
        begin()
        report = asyncio.run(
            run_load(
                engine,
                rate=sizes.rate,
                duration_s=sizes.duration_s,
                orgs=ORGANIZATIONS,
                targets=targets,
            )
        )
    assert not report.refused
    assert not report.unfinished
    return report


def _submit_aged(url: str, count: int) -> None:
    with Engine.open(url, ADMIT_ALL, clock=SlowClock()) as engine:
        engine.register_type(probe_message("aged", P3)["type"])
        for size in batches(count):
            engine.blocking.submit_many([probe_message("aged", P3)] * size)


def _classes(name: str, report: LoadReport) -> Iterator[Figure]:
    return (_figure(name, each) for each in report.classes)


def _figure(name: str, measured: ClassLatency) -> Figure:
    return Figure(
        f"P{measured.priority} submit to handler, p99{name}",
        measured.p99_ms,
        "ms",
        f"p50: {readable(measured.p50_ms)} ms, of {measured.count:,}",
        goals=[Goal("value", "<=", measured.target_ms)],
    )
