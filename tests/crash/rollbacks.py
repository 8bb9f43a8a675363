"""Rollbacks of a goal on one SQLite file, in processes that are killed -9.

`kills-rollback`: each round does effects of a goal and rolls them back. The process that rolls back, and
undoes the effects as a worker, is killed at random instants. Its successor calls the same rollback again.
At the end, every effect was undone once, in reverse order; goal, branch and context are as without a kill.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

from postroom import Engine, Policy
from postroom.calls.submit import SubmitFields
from postroom.engine.rules.cells import Kind
from postroom.goals.goal_cells import EFFECTS, NOTIFIED, ROLLBACKS, UNDOES
from postroom.testing import check_consistency
from tests.crash.ledger import Tally
from tests.crash.rounds import scratch
from tests.crash.workers import STUCK_S, Crew, Report, WorkerFailed

KILLS_PER_ROUND = 10
EFFECTS_DONE = 4
LINES_MAX = 8  # commits after which a kill comes
LOOK_S = 0.002
WORKER = "roller"
DONE = "done"
KINDS: tuple[Kind[Any], ...] = (EFFECTS, ROLLBACKS, UNDOES, NOTIFIED)

Tick = Callable[[int], None]


def run(kills: int, seed: int, tick: Tick = lambda _: None, sabotage: str = "") -> Tally:
    """Kill `kills` times, in rounds with a file each."""
    tally = Tally()
    rng = Random(f"kills-rollback/{seed}")
    left, number = kills, 0
    while left > 0:
        with scratch(number) as folder:
            killed = _round(folder, min(left, KILLS_PER_ROUND), rng, tally, sabotage)
        tally.count("kills", killed)
        tick(killed)
        left -= killed
        number += 1
    return tally


def open_engine(folder: str | Path) -> Engine:
    return Engine.open(f"sqlite:///{folder}/queue.db", policy=Policy(poison_crashes=10_000))


def log_of(folder: str | Path) -> list[str]:
    """The outside world: a line for each time that something was done or undone."""
    path = Path(folder) / "world.log"
    return path.read_text().splitlines() if path.exists() else []


def note(folder: str | Path, line: str) -> str:
    """One small write to a file is complete or absent, whenever the process is killed."""
    fd = os.open(Path(folder) / "world.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)
    return line


def register(engine: Engine, folder: str | Path, sabotage: str = "") -> None:
    @engine.handler("tool_call")
    async def do(message: Any, ctx: Any) -> None:
        name = message.payload["name"]
        undo = {"type": "model_call", "payload": {"name": name}}
        await ctx.effect(name, lambda: note(folder, name), reversal=undo, reversal_class="REVERSIBLE")

    @engine.handler("model_call")
    async def undo(message: Any, ctx: Any) -> None:
        line = f"undo {message.payload['name']}"
        if sabotage == "plain":
            note(folder, line)
            return
        await ctx.effect(
            "undo", lambda: note(folder, line), probe=lambda: line if line in log_of(folder) else None
        )


async def _worked(engine: Engine, is_done: Callable[[], Awaitable[bool]]) -> None:
    """Work in this process until a condition holds."""
    worker = asyncio.create_task(engine.run(worker_id=WORKER))
    try:
        deadline = time.monotonic() + STUCK_S
        while not await is_done():
            if time.monotonic() > deadline:
                raise WorkerFailed(f"the goal did not come on in {STUCK_S:g} s")
            await asyncio.sleep(LOOK_S)
    finally:
        await engine.stop()
        await worker


async def _prepared(engine: Engine) -> list[str]:
    """A goal with effects, facts and open messages behind its first checkpoint. Returns the open ones."""
    await engine.goals.start("acme", "g", context={"plan": "a"})
    branch = engine.graph.branch("g")
    await branch.save("fact", {"x": 1})
    await engine.goals.checkpoint("g")
    fields: SubmitFields = {
        "type": "tool_call", "org_id": "acme", "payload": {}, "goal_id": "g", "ordering_key": "steps",
    }  # fmt: skip
    names = [f"e{number}" for number in range(EFFECTS_DONE)]
    handles = await engine.submit_many([{**fields, "payload": {"name": name}} for name in names])

    async def is_done() -> bool:
        return (await engine.get(handles[-1].message_id)).state == "COMPLETED"

    await _worked(engine, is_done)
    await branch.save("fact", {"x": 2})
    await engine.goals.set_context("g", {"plan": "b"}, 1)
    later: SubmitFields = {**fields, "payload": {"name": "never"}, "ordering_key": None, "delay_s": 3600}
    return [(await engine.submit(**later)).message_id for _ in range(3)]


def roller(report: Report, *, folder: str, sabotage: str = "") -> None:
    """Roll back, or resume, and undo the effects. Each commit is reported."""
    with open_engine(folder) as engine:
        register(engine, folder, sabotage)
        for name in ("write_raw", "write_cycle"):
            setattr(engine.core.commits, name, _reported(report, getattr(engine.core.commits, name)))
        asyncio.run(_rolled_back(engine))
    report(DONE)


def _reported(report: Report, write: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def write_and_report(work: Any, **options: Any) -> Any:
        result = await write(work, **options)
        report("commit")
        return result

    return write_and_report


async def _rolled_back(engine: Engine) -> None:
    await engine.put_back(WORKER)  # the one before was killed
    await engine.goals.rollback("g#2")

    async def is_done() -> bool:
        return (await engine.goals.status("g")).state == "ACTIVE"

    await _worked(engine, is_done)


def _round(folder: Path, kills: int, rng: Random, tally: Tally, sabotage: str) -> int:
    """One goal. Returns how many kills there were; one that comes after the end counts, too."""
    with open_engine(folder) as engine:
        register(engine, folder)
        open_ones = asyncio.run(_prepared(engine))
    killed = 0
    with Crew() as crew:
        for _ in range(kills):
            worker = crew.start(WORKER, roller, folder=str(folder), sabotage=sabotage)
            try:
                crew.kill_at_random(worker, rng, LINES_MAX)
            except WorkerFailed:
                if DONE not in worker.lines:
                    raise
                worker.kill()
                break
            killed += 1
    with open_engine(folder) as engine:
        register(engine, folder)
        asyncio.run(_rolled_back(engine))
        _judge(engine, folder, open_ones, tally)
    return max(killed, 1)


def _judge(engine: Engine, folder: Path, open_ones: list[str], tally: Tally) -> None:
    done = [f"e{number}" for number in range(EFFECTS_DONE)]
    expected = [*done, *(f"undo {name}" for name in reversed(done))]
    happened = log_of(folder)
    tally.acknowledged += len(done)
    tally.lost += len(set(expected) - set(happened))
    tally.doubled += len(happened) - len(set(happened))
    left = {
        "order": happened == expected,
        "context": engine.blocking.wait(engine.goals.context("g"))[0]["plan"] == "a",
        "fact": _fact(engine) == {"x": 1},
        "open": all(engine.blocking.get(one).state == "CANCELLED" for one in open_ones),
        "cells": not any(engine.store.read(kind.all) for kind in KINDS),
    }
    for name, is_right in left.items():
        if not is_right:
            tally.breaks(f"{name} is not as without a kill: {happened}")
    check_consistency(engine.store)


def _fact(engine: Engine) -> dict[str, Any] | None:
    node = engine.blocking.wait(engine.graph.branch("g").get("fact"))
    return None if node is None else node.properties
