"""The load generator of an engine."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from postroom import Backpressure, Engine, Policy, Retry
from postroom.errors import InvalidSetting
from postroom.server.up.engine_load import (
    PROBE_TYPE,
    TARGETS_MS,
    ClassLatency,
    LoadReport,
    register_probe,
    run_load,
    targets_ms,
)
from tests.engines import soon


async def loaded(engine: Engine, **options: Any) -> LoadReport:
    """The report of a load on a worker in the same loop."""
    worker = asyncio.create_task(engine.run())
    report = await run_load(engine, **{"rate": 400.0, "duration_s": 0.1, **options})
    await engine.stop()
    await worker
    return report


def run(engine: Engine, **options: Any) -> LoadReport:
    with engine:
        return soon(loaded(engine, **options))


def test_report_has_the_latencies_of_each_priority() -> None:
    engine = Engine.open("memory://")
    register_probe(engine, work_s=0.0)
    report = run(engine, orgs=3)
    assert report.submitted == 40
    assert report.refused == report.unfinished == 0
    assert [each.count for each in report.classes] == [4, 16, 16, 4]
    for each, target_ms in zip(report.classes, TARGETS_MS, strict=True):
        assert 0 < each.p50_ms <= each.p99_ms <= each.max_ms
        assert each.target_ms == target_ms


def test_mix_can_leave_out_priorities() -> None:
    engine = Engine.open("memory://")
    register_probe(engine, work_s=0.0)
    report = run(engine, mix=(0, 1, 0, 0))
    assert [each.priority for each in report.classes] == [1]


def test_refused_submits_are_counted() -> None:
    engine = Engine.open(
        "memory://", Policy(backpressure=Backpressure(scale=1, light=1, heavy=1, emergency=1))
    )
    register_probe(engine, work_s=0.1)
    report = run(engine, rate=2_000.0, mix=(0, 0, 0, 1))
    assert report.refused
    assert report.submitted + report.refused == 200


def test_messages_that_fail_are_counted() -> None:
    engine = Engine.open("memory://", Policy(retries={PROBE_TYPE: Retry(max_retries=0)}))

    @engine.handler(PROBE_TYPE)
    async def probe(message: Any, _ctx: Any) -> float:
        if message.priority:
            raise ValueError("boom")
        return 1.0

    report = run(engine, mix=(1, 1, 0, 0))
    assert report.unfinished == 20
    assert [(each.priority, each.count) for each in report.classes] == [(0, 20)]


@pytest.mark.statement("latency-classes")
def test_p99_is_compared_with_the_target() -> None:
    assert ClassLatency(0, 1, 1.0, 5.0, 9.0, 5.0).is_within_target
    assert not ClassLatency(0, 1, 1.0, 5.1, 9.0, 5.0).is_within_target


def test_target_of_p0_is_lower_on_a_fast_disk() -> None:
    assert targets_ms(0.49) == (5.0, *TARGETS_MS[1:])
    assert targets_ms(0.5) == TARGETS_MS


@pytest.mark.parametrize(
    ("rate", "duration_s", "orgs", "mix"),
    [
        (0, 1, 1, (1, 1, 1, 1)),
        (1, 0, 1, (1, 1, 1, 1)),
        (1, 1, 0, (1, 1, 1, 1)),
        (1, 1, 1, (1, 1, 1)),
        (1, 1, 1, (0, 0, 0, 0)),
        (1, 1, 1, (-1, 1, 1, 1)),
        (1e6, 2, 1, (1, 1, 1, 1)),
    ],
)
def test_invalid_load_is_refused(rate: float, duration_s: float, orgs: int, mix: Sequence[float]) -> None:
    with Engine.open("memory://") as engine, pytest.raises(InvalidSetting):
        soon(run_load(engine, rate=rate, duration_s=duration_s, orgs=orgs, mix=mix))
