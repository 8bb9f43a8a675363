"""A worker of the global queue beside a server: in this process, on the same store."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from postroom import Engine, Policy
from tests.waiting import LOOK_EVERY_S, until

BUDGETS = {"providers": {"p": {"models": {"small": {"tokens_per_day": 1_000_000}}}}}


def open_engine(data: Path) -> Engine:
    """The engine of a data folder, with handlers for the tests."""
    engine = Engine.open(f"sqlite:///{data / 'queue.db'}", Policy(tokens=BUDGETS))

    @engine.handler("tool_call")
    async def run_tool(message: Any, ctx: Any) -> Any:
        for index in range(message.payload.get("chunks", 0)):
            await ctx.stream({"n": index})
        path = message.payload.get("waits_for")
        while path and not Path(path).exists():  # noqa: ASYNC110, ASYNC240 - a file of the test
            await asyncio.sleep(0.01)
        if message.payload.get("fails"):
            raise ValueError("no such thing")
        ctx.use_tokens(ctx.tokens // 2)
        return {"said": message.payload.get("say")}

    return engine


@contextmanager
def working(data: Path) -> Iterator[Engine]:
    """A worker in a thread."""
    engine = open_engine(data)
    thread = threading.Thread(target=engine.blocking.run, daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        until(lambda: _is_stopped(engine, thread))
        engine.close()


def _is_stopped(engine: Engine, thread: threading.Thread) -> bool:
    """Stop the worker. A worker that has not begun yet does not hear the first call."""
    engine.blocking.stop()
    thread.join(LOOK_EVERY_S)
    return not thread.is_alive()
