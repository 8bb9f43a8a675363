"""Long polls: many requests wait for tasks, or for tasks to end, without a thread each.

The requests for one agent's tasks form a queue. It claims for them after a wake-up, when a delayed task is
due, and on an interval because a wake-up may be lost. The first request is served first.

The requests for results share one loop. It checks every awaited task after a wake-up, and on an interval.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from itertools import islice
from typing import Protocol, TypeVar

from postroom.contracts.tasks.tasks import (
    LOOK_AGAIN_DEAF_S,
    LOOK_AGAIN_S,
    TASK_ENDED,
    LeasedTask,
    Tasks,
)
from postroom.nudges.notifier import QUIET_S
from postroom.server.access.registry import Identity
from postroom.server.http.writer import StoreWriter
from postroom.stores.transaction import Claim

T = TypeVar("T")

WAITERS_MAX = 10_000  # enforced by the caller of `claim`
SERVED_AT_ONCE_MAX = 32
EMPTY_HANDED_PAUSE_S = 0.005  # before the next claim when another worker was quicker
GATHER_S = 0.005  # tasks that end within this are checked together
TASKS_A_READ = 500


class Read(Protocol):
    """Runs a read of the store in a thread."""

    def __call__(self, look: Callable[[], T]) -> Awaitable[T]: ...


class _Waiter:
    """One waiting request."""

    __slots__ = ("claiming", "future", "identity", "leaving", "terms")

    def __init__(self, terms: Claim, identity: Identity, loop: asyncio.AbstractEventLoop) -> None:
        self.terms = terms
        self.identity = identity
        self.future: asyncio.Future[list[LeasedTask]] = loop.create_future()
        self.claiming = False
        self.leaving = False


class TaskPolls:
    """The requests of a server that wait for tasks, by agent."""

    def __init__(
        self, tasks: Tasks, writer: StoreWriter, read: Read, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.tasks = tasks
        self.writer = writer
        self.read = read
        self._loop = loop
        self.queues: dict[str, _WaitQueue] = {}
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
        queue = self.queues.get(terms.queue)
        if queue is None:
            queue = self.queues[terms.queue] = _WaitQueue(self, terms.queue)
        queue.waiters.append(waiter)
        await self.first_of(waiter.future, left, wait_s)
        return await queue.leave(waiter)

    async def first_of(
        self, wanted: "asyncio.Future[T]", left: "asyncio.Future[None]", wait_s: float
    ) -> None:
        """Wait for what a request wants, the end of its client or of the server, or `wait_s`."""
        self.count += 1
        try:
            await asyncio.wait(
                (wanted, left, self.ending), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            self.count -= 1

    def subscribed(self, agent: str, wake: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `wake` in the event loop at every wake-up for the agent."""

        def pass_on() -> None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(wake)

        return self.tasks.notifier.subscribed(agent, pass_on)


class _WaitQueue:
    """The requests that wait for one agent's tasks."""

    def __init__(self, polls: TaskPolls, agent: str) -> None:
        self._polls = polls
        self._agent = agent
        self.waiters: deque[_Waiter] = deque()
        self._woken = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())

    async def leave(self, waiter: _Waiter) -> list[LeasedTask]:
        """Remove a waiter and return its tasks. A claim under way is awaited, so that no lease is lost."""
        if not waiter.future.done() and not waiter.claiming:
            self.waiters.remove(waiter)
            if not self.waiters:
                self._woken.set()
            return []
        waiter.leaving = True
        return await waiter.future

    async def _run(self) -> None:
        try:
            with self._polls.subscribed(self._agent, self._woken.set):
                while self.waiters:
                    await self._look()
        except Exception as error:  # noqa: BLE001 - every waiting request gets the error
            for waiter in self.waiters:
                waiter.future.set_exception(error)
            self.waiters.clear()
        finally:
            del self._polls.queues[self._agent]

    async def _look(self) -> None:
        self._woken.clear()
        pause_s = await self._polls.read(lambda: self._polls.tasks.pause_s(self._agent))
        if pause_s <= 0 and await self._serve():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s or EMPTY_HANDED_PAUSE_S):
                await self._woken.wait()

    async def _serve(self) -> bool:
        """Claim for the first waiter, then for growing groups, as long as every claim finds tasks."""
        at_once = 1
        while self.waiters:
            served = [self.waiters.popleft() for _ in range(min(at_once, len(self.waiters)))]
            if not await self._claim_for(served):
                return False
            at_once = min(at_once * 2, SERVED_AT_ONCE_MAX)
        return True

    async def _claim_for(self, served: list[_Waiter]) -> bool:
        for waiter in served:
            waiter.claiming = True
        outcomes = await asyncio.gather(
            *(self._polls.writer.submit(waiter.terms, waiter.identity) for waiter in served),
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
        self.waiters.extendleft(reversed(empty_handed))
        return not empty_handed


class ResultPolls:
    """The requests that wait for tasks to end."""

    def __init__(self, polls: TaskPolls) -> None:
        self._polls = polls
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._woken = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    async def wait(self, task_id: str, wait_s: float, left: "asyncio.Future[None]") -> None:
        """Return when the task has ended, `wait_s` has passed, or the client has `left`."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(task_id, set()).add(ended)
        self._woken.set()
        if self._loop is None:
            self._loop = asyncio.ensure_future(self._run())
        try:
            await self._polls.first_of(ended, left, wait_s)
            if ended.done():
                ended.result()
        finally:
            waiters = self._waiters.get(task_id, set())
            waiters.discard(ended)
            if not waiters:
                self._waiters.pop(task_id, None)
            if not self._waiters:
                self._woken.set()  # nothing is left to wait for, so the loop ends

    async def _run(self) -> None:
        try:
            with self._polls.subscribed(TASK_ENDED, self._woken.set):
                pause_s = 2 * QUIET_S  # another process may not see this waiter before
                while self._waiters:
                    await self._check(pause_s)
                    hears = self._polls.tasks.notifier.hears_other_processes
                    pause_s = LOOK_AGAIN_S if hears else LOOK_AGAIN_DEAF_S
        except Exception as error:  # noqa: BLE001 - every waiting request gets the error
            for waiters in self._waiters.values():
                for ended in waiters:
                    ended.set_exception(error)
            self._waiters.clear()
        finally:
            self._loop = None

    async def _check(self, pause_s: float) -> None:
        self._woken.clear()
        awaited = iter([*self._waiters])
        while task_ids := list(islice(awaited, TASKS_A_READ)):
            for task_id in await self._polls.read(lambda ids=task_ids: self._polls.tasks.ended(ids)):  # type: ignore[misc]
                for ended in self._waiters.pop(task_id, ()):
                    if not ended.done():
                        ended.set_result(None)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._woken.wait()
                await asyncio.sleep(GATHER_S)
