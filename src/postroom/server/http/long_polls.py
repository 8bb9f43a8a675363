"""Long polls: many requests wait for tasks, without a thread each.

The requests for one agent's tasks form a queue. It claims for them after a wake-up, when a delayed task is
due, and on an interval because a wake-up may be lost. The first request is served first.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from typing import cast

from postroom.contracts.tasks.tasks import LeasedTask, Tasks
from postroom.server.access.registry import Identity
from postroom.server.http.writer import StoreWriter
from postroom.stores.transaction import Claim

WAITERS_MAX = 10_000  # enforced by the caller of `claim`
SERVED_AT_ONCE_MAX = 32
EMPTY_HANDED_PAUSE_S = 0.005  # before the next claim when another worker was quicker

Read = Callable[[Callable[[], float]], Awaitable[float]]
"""Runs a read of the store in a thread."""


class _Waiter:
    """One waiting request."""

    __slots__ = ("claiming", "future", "identity", "leaving", "terms")

    def __init__(self, terms: Claim, identity: Identity, loop: asyncio.AbstractEventLoop) -> None:
        self.terms = terms
        self.identity = identity
        self.future: asyncio.Future[list[LeasedTask]] = loop.create_future()
        self.claiming = False
        self.leaving = False


class LongPolls:
    """The waiting requests of a server, by agent."""

    def __init__(
        self, tasks: Tasks, writer: StoreWriter, read: Read, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._tasks = tasks
        self._writer = writer
        self._read = read
        self._loop = loop
        self._queues: dict[str, _WaitQueue] = {}
        self.count = 0
        """Requests that wait now, for tasks or for results."""
        self.ending = loop.create_future()
        """Done when the server stops."""

    def end(self) -> None:
        """End all waits, because the server stops."""
        if not self.ending.done():
            self.ending.set_result(None)

    async def claim(
        self, terms: Claim, identity: Identity, wait_s: float, left: "asyncio.Future[None]"
    ) -> list[LeasedTask]:
        """Lease tasks as soon as there are any; none after `wait_s` or when the client has `left`."""
        waiter = _Waiter(terms, identity, self._loop)
        queue = self._queues.get(terms.queue)
        if queue is None:
            queue = self._queues[terms.queue] = _WaitQueue(self, terms.queue)
        queue.join(waiter)
        self.count += 1
        try:
            await asyncio.wait(
                (waiter.future, left, self.ending),
                timeout=wait_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            return await queue.leave(waiter)
        finally:
            self.count -= 1

    def subscribed(self, agent: str, wake: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `wake` in the event loop at every wake-up for the agent."""

        def pass_on() -> None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(wake)

        return self._tasks.notifier.subscribed(agent, pass_on)

    def closed(self, agent: str) -> None:
        """Forget the queue of an agent, because no request waits in it."""
        del self._queues[agent]

    async def claim_now(self, terms: Claim, identity: Identity) -> list[LeasedTask]:
        """Lease the tasks that are ready now."""
        return cast("list[LeasedTask]", await self._writer.submit(terms, identity))

    async def look(self, agent: str) -> float:
        """How long the queue may wait for a wake-up; 0 when a task is ready."""
        return await self._read(lambda: self._tasks.pause_s(agent))


class _WaitQueue:
    """The requests that wait for one agent's tasks."""

    def __init__(self, long_polls: LongPolls, agent: str) -> None:
        self._long_polls = long_polls
        self._agent = agent
        self._waiters: deque[_Waiter] = deque()
        self._woken = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())

    def join(self, waiter: _Waiter) -> None:
        self._waiters.append(waiter)

    async def leave(self, waiter: _Waiter) -> list[LeasedTask]:
        """Remove a waiter and return its tasks. A claim under way is awaited, so that no lease is lost."""
        if not waiter.future.done() and not waiter.claiming:
            self._waiters.remove(waiter)
            if not self._waiters:
                self._woken.set()
            return []
        waiter.leaving = True
        return await waiter.future

    async def _run(self) -> None:
        try:
            with self._long_polls.subscribed(self._agent, self._woken.set):
                while self._waiters:
                    await self._look()
        except Exception as error:  # noqa: BLE001 - every waiting request gets the error
            for waiter in self._waiters:
                waiter.future.set_exception(error)
            self._waiters.clear()
        finally:
            self._long_polls.closed(self._agent)

    async def _look(self) -> None:
        self._woken.clear()
        pause_s = await self._long_polls.look(self._agent)
        if pause_s <= 0 and await self._serve():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s or EMPTY_HANDED_PAUSE_S):
                await self._woken.wait()

    async def _serve(self) -> bool:
        """Claim for the first waiter, then for growing groups, as long as every claim finds tasks."""
        at_once = 1
        while self._waiters:
            served = [self._waiters.popleft() for _ in range(min(at_once, len(self._waiters)))]
            if not await self._claim_for(served):
                return False
            at_once = min(at_once * 2, SERVED_AT_ONCE_MAX)
        return True

    async def _claim_for(self, served: list[_Waiter]) -> bool:
        for waiter in served:
            waiter.claiming = True
        outcomes = await asyncio.gather(
            *(self._long_polls.claim_now(waiter.terms, waiter.identity) for waiter in served),
            return_exceptions=True,
        )
        empty_handed = []
        for waiter, outcome in zip(served, outcomes, strict=True):
            waiter.claiming = False
            if isinstance(outcome, BaseException):
                waiter.future.set_exception(outcome)
            elif outcome or waiter.leaving:
                waiter.future.set_result(outcome)
            else:
                empty_handed.append(waiter)
        self._waiters.extendleft(reversed(empty_handed))
        return not empty_handed
