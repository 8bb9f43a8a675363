"""Several worker processes share one budget: no token is used twice, and the books add up at every look."""

import asyncio
from pathlib import Path
from typing import Any

from postroom import Engine, Policy
from postroom.calls.submit import SubmitFields
from postroom.engine.token_status import ModelTokens
from tests import children
from tests.children import no_child_left

__all__ = ["no_child_left"]  # a fixture

WORKERS = 3
LIMIT = 10_000
TOKENS = 100
BUDGETS = {
    "providers": {"p": {"models": {"small": {"tokens_per_day": LIMIT}}}},
    "tiers": [0.1, 0.1, 0.1, 0.1],
    "shortage": "queue",
}


def open_engine(folder: Path) -> Engine:
    engine = Engine.open(f"sqlite:///{folder}/queue.db", Policy(tokens=BUDGETS))

    @engine.handler("tool_call")
    async def handle(message: Any, ctx: Any) -> int:
        await asyncio.sleep(0)
        ctx.use_tokens(ctx.tokens)
        return int(ctx.attempt)

    return engine


def work_until_stopped(folder: Path) -> None:
    engine = open_engine(folder)

    async def work() -> None:
        running = asyncio.create_task(engine.run(concurrency=8))
        while not (folder / "stop").exists():  # noqa: ASYNC110 - a file of the test
            await asyncio.sleep(0.01)
        await engine.stop()
        await running

    asyncio.run(work())


def test_processes_share_a_budget(tmp_path: Path, no_child_left: None) -> None:
    engine = open_engine(tmp_path)
    most = LIMIT // TOKENS + 20  # more than the budget holds; P2 can have its pool and what no tier reserves
    message: SubmitFields = {"type": "tool_call", "org_id": "acme", "payload": {}, "tokens": TOKENS}
    engine.blocking.submit_many([message] * most)
    looks = list[ModelTokens]()

    def look() -> ModelTokens:
        looks.append(engine.blocking.tokens.status().providers["p"].models["small"])
        return looks[-1]

    pids = [children.start(lambda: work_until_stopped(tmp_path)) for _ in range(WORKERS)]
    while look().used < 0.7 * LIMIT:
        pass
    (tmp_path / "stop").touch()
    children.wait(*pids)
    assert (look().used, look().reserved, look().free) == (7_000, 0, 3_000)
    assert {found.used + found.reserved + found.free for found in looks} == {LIMIT}
    assert {found.limit for found in looks} == {LIMIT}
    assert all(min(found.used, found.reserved, found.free) >= 0 for found in looks)
    assert [found.used for found in looks] == sorted(found.used for found in looks)
    assert looks[-1].organizations["acme"].used == 7_000
    engine.close()
