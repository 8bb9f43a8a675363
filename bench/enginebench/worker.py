"""One worker process of an engine: `python -m enginebench.worker URL KIND SLOTS`.

It prints a line when it is ready, begins at a line on its standard input, and stops at the end of that input.
"""

import asyncio
import sys
import time
from typing import Any

from enginebench import finish
from enginebench.engines import TYPE, open_engine
from postroom import Engine
from postroom.server.up.engine_load import register_probe

BURN_S = 0.002


async def _do_nothing(_message: Any, _ctx: Any) -> None:
    """The engine is what is measured."""


async def _burn(_message: Any, _ctx: Any) -> None:
    """Use up 2 ms of CPU time, however busy the machine is."""
    end = time.thread_time() + BURN_S
    while time.thread_time() < end:
        pass


async def _note(message: Any, _ctx: Any) -> None:
    payload = message.payload
    finish.note(payload["run"], payload["number"], payload["count"])


HANDLERS = {"empty": _do_nothing, "burning": _burn, "noting": _note}
PROBE = "probe"


async def _work(engine: Engine, slots: int) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    running = asyncio.create_task(engine.run(concurrency=slots))
    await ended.wait()
    await engine.stop()
    await running


def main(url: str, kind: str, slots: str) -> None:
    engine = open_engine(url)
    if kind == PROBE:
        register_probe(engine)
    else:
        engine.handler(TYPE)(HANDLERS[kind])
    engine.store.steady_ns()  # opens the file, which is not measured
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(_work(engine, int(slots)))
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
