"""Messages that are submitted and handled while something happens to a broker."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from postroom import Engine
from postroom.errors import Unavailable

TYPE = "tool_call"
PATIENCE_S = 40.0
LOAD_PAUSE_S = 0.01


class Load:
    """Submits to two organizations in every priority while something goes wrong."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.accepted: list[str] = []
        self.refused = 0
        self.healed: float | None = None
        self.done: Counter[str] = Counter()
        self._times: list[float] = []
        self._stopping = False

        @engine.handler(TYPE)
        async def handle(message: Any, _context: Any) -> None:
            self.done[message.message_id] += 1
            self._times.append(time.monotonic())

    async def submit(self) -> None:
        for number in itertools.count():
            if self._stopping:
                return
            try:
                handle = await self._engine.submit(
                    type=TYPE, org_id=f"org{number % 2}", payload={}, priority=number % 4
                )
                self.accepted.append(handle.message_id)
            except Unavailable:
                self.refused += 1
            await asyncio.sleep(LOAD_PAUSE_S)

    async def finish(self) -> None:
        """Stop submitting, and wait until everything accepted is done."""
        self._stopping = True
        deadline = time.monotonic() + PATIENCE_S
        while set(self.accepted) - set(self.done) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    @property
    def pause_s(self) -> float:
        """The longest time without a handled message."""
        return max((after - before for before, after in itertools.pairwise(self._times)), default=0.0)

    def report(self, name: str) -> str:
        """What a fault did, in one line."""
        lost = len(set(self.accepted) - set(self.done))
        doubled = sum(times - 1 for times in self.done.values())
        text = f"{name}: accepted {len(self.accepted)}, lost {lost}, doubled {doubled}, "
        text += f"longest pause {self.pause_s:.1f} s"
        healed = self.healed
        if healed is None:
            return text
        first = next((at - healed for at in self._times if at > healed), None)
        return f"{text}, first delivery {'never' if first is None else f'{first:.2f} s'} after the heal"


async def under_load(url: str, fault: Callable[[Load], Awaitable[float | None]]) -> Load:
    """Run a fault while messages are submitted and worked on."""
    engine = Engine.open(url)
    load = Load(engine)
    worker = asyncio.create_task(engine.run())
    submitting = asyncio.create_task(load.submit())
    try:
        await asyncio.sleep(0.5)
        load.healed = await fault(load)
        await asyncio.sleep(0.5)
        await load.finish()
    finally:
        submitting.cancel()
        await engine.stop()
        await worker
        engine.close()
    return load
