"""An engine for tests of handlers: in memory, on a clock that tests move, and without background work."""

from collections.abc import Iterable, Mapping
from typing import Any

from postroom.contracts.engine.core import EngineCore
from postroom.contracts.engine.engine import Engine
from postroom.contracts.engine.operations import Submitted
from postroom.contracts.engine.worker import Worker
from postroom.core.lifecycle import NANOS_PER_S
from postroom.stores.base import FOREVER_NS, Ending
from postroom.stores.memory import MemoryStore
from postroom.stores.transaction import Transaction
from postroom.system.manual_clock import ManualClock

ROUNDS_MAX = 100_000
WAIT_S_MAX = 400 * 86_400.0


class InlineCore(EngineCore):
    """A submit runs handlers inline. Waiting for a result moves the clock from deadline to deadline."""

    clock: ManualClock
    _worker: Worker | None = None

    async def submit(self, messages: Iterable[Mapping[str, Any]]) -> list[Submitted]:
        submitted = await super().submit(messages)
        await self.drain()
        return submitted

    async def drain(self) -> None:
        """Run handlers until nothing can run without moving the clock."""
        if self._worker is not None:
            return  # a handler submits: the worker runs the child after it
        self._worker = worker = Worker(self, worker_id="inline", slots=1)
        try:
            for _ in range(ROUNDS_MAX):
                if not await worker.step() and worker.is_idle:
                    return
        finally:
            self._worker = None

    async def wait_for_end(self, message_id: str, timeout_s: float | None) -> None:
        left_s = WAIT_S_MAX if timeout_s is None else timeout_s
        await self.drain()
        while not await self.has_ended(message_id):
            step_s = self.store.read(_next_s) if self._worker is None else None
            if step_s is None or step_s > left_s:
                raise TimeoutError(
                    f"message {message_id} has not ended within {left_s:g} s of the test clock"
                )
            left_s -= step_s
            self.clock.advance(step_s)
            await self.drain()


class InlineEngine(Engine):
    """As `Engine`, with the handlers of another engine. `clock` is the clock that tests move."""

    def __init__(self, engine: Engine) -> None:
        self.clock = ManualClock()
        super().__init__(MemoryStore(clock=self.clock), engine.policy)
        self._core.registry = engine._core.registry  # noqa: SLF001 - the same class
        self._core.handlers = engine._core.handlers  # noqa: SLF001
        self._core.services = engine._core.services  # noqa: SLF001

    def _new_core(self, store: Any, policy: Any) -> EngineCore:
        core = InlineCore(store, policy)
        core.clock = self.clock
        self._inline = core
        return core

    async def drain(self) -> None:
        """Run handlers until nothing can run without moving the clock."""
        await self._inline.drain()

    async def advance(self, seconds: float) -> None:
        """Move the clock, and run what becomes due."""
        self.clock.advance(seconds)
        await self.drain()


def _next_s(transaction: Transaction) -> float | None:
    ends = [record.due for record in transaction.find(Ending("delay", FOREVER_NS, 1))]
    ends += [record.lease_until for record in transaction.find(Ending("lease", FOREVER_NS, 1))]
    return max(0, min(ends) - transaction.steady_ns + 1) / NANOS_PER_S if ends else None
