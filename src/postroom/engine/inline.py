"""An engine for tests of handlers: in memory, on a clock that tests move, and without background work."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial

from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.engine.core import EngineCore
from postroom.engine.messages import Message
from postroom.engine.rules.claims import Claimed
from postroom.engine.rules.outcomes import Outcome
from postroom.engine.rules.policy import Policy
from postroom.engine.wakeups import Wakeups
from postroom.engine.work.context import Context
from postroom.engine.work.handlers import Handler, completed, limited, timeout_of
from postroom.engine.work.worker import Worker
from postroom.stores.base import FOREVER_NS, Ending
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction
from postroom.system.manual_clock import ManualClock

ROUNDS_MAX = 100_000
WAIT_S_MAX = 400 * 86_400.0
LOOK_S = 0.001  # how often a wait looks whether another wait has run its message


class InlineWorker(Worker):
    """Runs every handler in this process, so that a debugger and a test see what it does."""

    failure_level = logging.INFO  # tests let handlers fail on purpose

    async def _alone(self, claimed: Claimed, handler: Handler, message: Message, context: Context) -> Outcome:
        call = self._batches.call if handler.batch > 1 else self._call
        result = await limited(call(handler, message, context), timeout_of(handler, message))
        await context.flush()
        return completed(claimed, handler, result, context.used)


class InlineWakeups(Wakeups):
    """A wait for the end of a message runs handlers, and moves the clock from deadline to deadline."""

    def __init__(self, core: "InlineCore") -> None:
        super().__init__(core.store, core.commits)
        self._core = core

    async def wait_for_end(self, message_id: str, timeout_s: float | None) -> None:
        await self._core.run_to_end(message_id, timeout_s, self.has_ended)


class InlineCore(EngineCore):
    """A submit runs handlers inline. Waiting for a result moves the clock from deadline to deadline.

    A handler that waits for a child is held by one worker while another worker runs the child.
    """

    clock: ManualClock

    def __init__(self, store: Store, policy: Policy) -> None:
        super().__init__(store, policy)
        self.wakeups = InlineWakeups(self)
        self.submits.after = self.drain
        self.workers: list[Worker] = []
        """The workers that run handlers now: one, and one more for each wait inside a handler."""
        self.new_worker: Callable[[], Worker] = partial(InlineWorker, self, worker_id="inline", slots=1)

    async def drain(self) -> None:
        """Run handlers until nothing can run without moving the clock."""
        if not self.workers:  # else a handler submits: its worker runs the child after it
            await self._run_ready()

    async def _run_ready(self) -> None:
        worker = self.new_worker()
        self.workers.append(worker)
        try:
            for _ in range(ROUNDS_MAX):
                if not await worker.step() and worker.is_idle:
                    return
        finally:
            self.workers.remove(worker)

    async def run_to_end(
        self, message_id: str, timeout_s: float | None, has_ended: Callable[[str], Awaitable[bool]]
    ) -> None:
        """Run handlers until a message has ended. Raises `TimeoutError` of the test clock."""
        left_s = WAIT_S_MAX if timeout_s is None else timeout_s
        await self._run_ready()
        while not await has_ended(message_id):
            if any(worker.has(message_id) for worker in self.workers):
                await asyncio.sleep(LOOK_S)  # another wait runs the message
                continue
            step_s = self.store.read(partial(_next_s, held=self._held()))
            if step_s is None or step_s > left_s:
                raise TimeoutError(
                    f"message {message_id} has not ended within {left_s:g} s of the test clock"
                )
            left_s -= step_s
            await self._advance(step_s)
            await self._run_ready()

    async def _advance(self, seconds: float) -> None:
        """Move the clock. The leases of handlers that wait are renewed, as in a real worker."""
        while self.workers and seconds > 0:
            step_s = min(seconds, self.policy.lease_s / 3)
            self.clock.advance(step_s)
            seconds -= step_s
            for worker in self.workers:
                await worker.renew_leases()
        self.clock.advance(seconds)

    def _held(self) -> set[str]:
        return {message_id for worker in self.workers for message_id in worker.held()}


def _next_s(transaction: Transaction, held: Collection[str]) -> float | None:
    """After how long a delay ends, or a lease of a message that no handler holds; None when none does."""
    ends = [record.due for record in transaction.records.find(Ending("delay", FOREVER_NS, 1))]
    leased = transaction.records.find(Ending("lease", FOREVER_NS, len(held) + 1))
    ends += [record.lease_until for record in leased if record.message_id not in held]
    return max(0, min(ends) - transaction.steady_ns + 1) / NANOS_PER_S if ends else None
