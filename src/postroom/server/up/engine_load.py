"""A load generator for an engine: submits messages at a fixed rate and reports how long they waited.

Rule 1: a latency is the time from the call of `submit` to the start of the handler. Both read the monotonic
        clock of the machine, so the worker must run on the same machine. It may be another process.
Rule 2: messages are submitted on schedule, also when earlier submits have not returned.
Rule 3: results are read after the last submit, so that reading them does not disturb the measurement.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from postroom.calls.submit import SubmitFields
from postroom.engine import Handle
from postroom.errors import InvalidSetting, MessageFailed, Overloaded
from postroom.goals.engine import Engine
from postroom.stores.base import LANES

PROBE_TYPE: Final = "load_probe"
MIX: Final = (10, 40, 40, 10)
"""Parts of P0 to P3."""
TARGETS_MS: Final = (10.0, 50.0, 100.0, 500.0)
"""The p99 latency that each priority should stay within."""
P0_TARGET_FAST_DISK_MS: Final = 5.0
FAST_FSYNC_MS: Final = 0.5
WORK_S: Final = 0.005
MESSAGES_LIMIT: Final = 1_000_000  # of one load; their handles are kept until the end
WARM_UP_TIMEOUT_S: Final = 30.0
RESULTS_TIMEOUT_S: Final = 60.0
NANOS_PER_MS: Final = 1e6


class ClassLatency(msgspec.Struct, frozen=True):
    """The latencies of one priority."""

    priority: int
    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    target_ms: float

    @property
    def is_within_target(self) -> bool:
        """Whether 99 of 100 messages started in time."""
        return self.p99_ms <= self.target_ms


class LoadReport(msgspec.Struct, frozen=True):
    """The outcome of one load. Priorities without a completed message have no entry in `classes`."""

    submitted: int
    refused: int
    """Submits that backpressure or a rate limit refused."""
    unfinished: int
    """Messages that failed, or had no result in time."""
    classes: tuple[ClassLatency, ...]


def targets_ms(fsync_ms: float) -> tuple[float, ...]:
    """The targets on a disk whose fsync takes `fsync_ms`."""
    p0_ms = P0_TARGET_FAST_DISK_MS if fsync_ms < FAST_FSYNC_MS else TARGETS_MS[0]
    return (p0_ms, *TARGETS_MS[1:])


def register_probe(engine: Engine, work_s: float = WORK_S) -> None:
    """Register the handler for the messages of `run_load`. It sleeps for `work_s`."""

    @engine.handler(PROBE_TYPE)
    async def probe(message: Any, _ctx: Any) -> float:
        waited_ms: float = (time.monotonic_ns() - message.payload["submitted_ns"]) / NANOS_PER_MS
        await asyncio.sleep(work_s)
        return waited_ms


def probe_message(org_id: str, priority: int) -> SubmitFields:
    """The fields of a message whose latency counts from now."""
    payload = {"submitted_ns": time.monotonic_ns()}
    return {"type": PROBE_TYPE, "org_id": org_id, "priority": priority, "payload": payload}


async def run_load(
    engine: Engine,
    *,
    rate: float,
    duration_s: float,
    orgs: int = 1,
    mix: Sequence[float] = MIX,
    targets: Sequence[float] = TARGETS_MS,
) -> LoadReport:
    """Submit `rate` messages a second for `duration_s`, and report the latency of each priority.

    A worker with the handler of `register_probe` must be running. Organizations are named load-0, load-1, ...
    """
    count = _checked_count(rate, duration_s, orgs, mix)
    engine.register_type(PROBE_TYPE)
    first = await engine.submit(**probe_message("load-0", 0))  # it opens files and starts threads
    await first.result(timeout_s=WARM_UP_TIMEOUT_S)  # raises `TimeoutError` without a worker
    handles: list[tuple[int, Handle]] = []
    refused = 0
    chooser = random.Random()  # noqa: S311 - a load needs no secrets
    parts = [round(count * part / sum(mix)) for part in mix]
    priorities = [priority for priority in range(LANES) for _ in range(parts[priority])]
    chooser.shuffle(priorities)

    async def submit(priority: int) -> None:
        nonlocal refused
        try:
            handle = await engine.submit(**probe_message(f"load-{chooser.randrange(orgs)}", priority))
        except Overloaded:
            refused += 1
        else:
            handles.append((priority, handle))

    started_s = time.monotonic()
    async with asyncio.TaskGroup() as submits:
        for number, priority in enumerate(priorities):
            await asyncio.sleep(max(0.0, started_s + number / rate - time.monotonic()))
            submits.create_task(submit(priority))
    latencies = await _latencies(handles)
    finished = sum(map(len, latencies))
    classes = tuple(
        _summary(priority, sorted(found), targets[priority])
        for priority, found in enumerate(latencies)
        if found
    )
    return LoadReport(len(handles), refused, len(handles) - finished, classes)


def _checked_count(rate: float, duration_s: float, orgs: int, mix: Sequence[float]) -> int:
    if len(mix) != LANES or min(mix) < 0 or not sum(mix):
        raise InvalidSetting(f"the mix is {LANES} numbers, the parts of P0 to P{LANES - 1}, not {mix!r}")
    if rate <= 0 or duration_s <= 0 or orgs < 1:
        raise InvalidSetting("a load needs a positive rate, a positive duration and at least 1 organization")
    count = max(1, round(rate * duration_s))
    if count > MESSAGES_LIMIT:
        raise InvalidSetting(f"a load has at most {MESSAGES_LIMIT} messages, not {count}")
    return count


async def _latencies(handles: Sequence[tuple[int, Handle]]) -> list[list[float]]:
    """The latencies of the messages that have a result, by priority."""
    found: list[list[float]] = [[] for _ in range(LANES)]
    deadline = time.monotonic() + RESULTS_TIMEOUT_S
    for priority, handle in handles:
        try:
            waited_ms = await handle.result(timeout_s=max(0.0, deadline - time.monotonic()))
        except (MessageFailed, TimeoutError):
            continue
        found[priority].append(waited_ms)
    return found


def _summary(priority: int, latencies_ms: Sequence[float], target_ms: float) -> ClassLatency:
    """The summary of sorted latencies."""
    count = len(latencies_ms)
    p50_ms, p99_ms = (latencies_ms[min(count - 1, int(count * share))] for share in (0.5, 0.99))
    return ClassLatency(priority, count, p50_ms, p99_ms, latencies_ms[-1], target_ms)
