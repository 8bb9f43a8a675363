"""Long polls: many requests that wait for a task, without a thread each.

Those who wait for one agent's tasks stand in a line, which looks for all of them: when the bell rings, when
something falls due, and now and then because a ring may be lost. The first in line is served first.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from typing import cast

from postroom.contracts.tasks import Task, Tasks
from postroom.runtime.agents import Identity
from postroom.runtime.writer import StoreWriter
from postroom.stores.transaction import Claim

WAITERS_MAX = 10_000  # whoever calls `claim` sees to it
SERVED_AT_ONCE_MAX = 32
EMPTY_HANDED_PAUSE_S = 0.005  # somebody else was quicker: do not look again in the same moment

Read = Callable[[Callable[[], float]], Awaitable[float]]
"""Runs a look at the store where it may block."""


class _Waiter:
    """One request in a line."""

    __slots__ = ("future", "identity", "leaving", "served", "terms")

    def __init__(self, terms: Claim, identity: Identity, loop: asyncio.AbstractEventLoop) -> None:
        self.terms = terms
        self.identity = identity
        self.future: asyncio.Future[list[Task]] = loop.create_future()
        self.served = False
        self.leaving = False


class LongPolls:
    """All lines of a server."""

    def __init__(
        self, tasks: Tasks, writer: StoreWriter, read: Read, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._tasks = tasks
        self._writer = writer
        self._read = read
        self._loop = loop
        self._lines: dict[str, _Line] = {}
        self.count = 0
        """Requests that wait at present."""
        self.ending = loop.create_future()

    def end(self) -> None:
        """Nobody waits any longer: everyone leaves with what there is."""
        if not self.ending.done():
            self.ending.set_result(None)

    async def claim(
        self, terms: Claim, identity: Identity, wait_s: float, disconnected: "asyncio.Future[None]"
    ) -> list[Task]:
        """Lease tasks as soon as there are any, unless `wait_s` passes or whoever asked is `disconnected`."""
        waiter = _Waiter(terms, identity, self._loop)
        line = self._lines.get(terms.queue)
        if line is None:
            line = self._lines[terms.queue] = _Line(self, terms.queue)
        line.join(waiter)
        self.count += 1
        try:
            await asyncio.wait(
                (waiter.future, disconnected, self.ending),
                timeout=wait_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            return await line.leave(waiter)
        finally:
            self.count -= 1

    def subscribed(self, agent: str, wake: Callable[[], None]) -> AbstractContextManager[None]:
        """Have `ring` called in the event loop at every ring of the agent's bell."""

        def pass_on() -> None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(wake)

        return self._tasks.notifier.subscribed(agent, pass_on)

    def closed(self, agent: str) -> None:
        """A line has ended."""
        del self._lines[agent]

    async def claim_now(self, terms: Claim, identity: Identity) -> list[Task]:
        """What can be leased at once."""
        return cast("list[Task]", await self._writer.submit(terms, identity))

    async def look(self, agent: str) -> float:
        """How long nothing will come, rings aside; 0 when there is something."""
        return await self._read(lambda: self._tasks.pause_s(agent))


class _Line:
    """Those who wait for one agent's tasks."""

    def __init__(self, long_polls: LongPolls, agent: str) -> None:
        self._long_polls = long_polls
        self._agent = agent
        self._waiters: deque[_Waiter] = deque()
        self._news = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())

    def join(self, waiter: _Waiter) -> None:
        self._waiters.append(waiter)

    async def leave(self, waiter: _Waiter) -> list[Task]:
        """What the waiter got. A claim under way is waited for, so that nothing is leased to nobody."""
        if not waiter.future.done() and not waiter.served:
            self._waiters.remove(waiter)
            if not self._waiters:
                self._news.set()
            return []
        waiter.leaving = True
        return await waiter.future

    async def _run(self) -> None:
        try:
            with self._long_polls.subscribed(self._agent, self._news.set):
                while self._waiters:
                    await self._look()
        except Exception as error:  # noqa: BLE001 - each request gets it as its answer
            for waiter in self._waiters:
                waiter.future.set_exception(error)
            self._waiters.clear()
        finally:
            self._long_polls.closed(self._agent)

    async def _look(self) -> None:
        self._news.clear()
        pause_s = await self._long_polls.look(self._agent)
        if pause_s <= 0 and await self._serve():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s or EMPTY_HANDED_PAUSE_S):
                await self._news.wait()

    async def _serve(self) -> bool:
        """Claim for the first in line, then for more of them as long as each gets something."""
        at_once = 1
        while self._waiters:
            served = [self._waiters.popleft() for _ in range(min(at_once, len(self._waiters)))]
            if not await self._claim_for(served):
                return False
            at_once = min(at_once * 2, SERVED_AT_ONCE_MAX)
        return True

    async def _claim_for(self, served: list[_Waiter]) -> bool:
        for waiter in served:
            waiter.served = True
        outcomes = await asyncio.gather(
            *(self._long_polls.claim_now(waiter.terms, waiter.identity) for waiter in served),
            return_exceptions=True,
        )
        got_none = []
        for waiter, outcome in zip(served, outcomes, strict=True):
            waiter.served = False
            if isinstance(outcome, BaseException):
                waiter.future.set_exception(outcome)
            elif outcome or waiter.leaving:
                waiter.future.set_result(outcome)
            else:
                got_none.append(waiter)
        self._waiters.extendleft(reversed(got_none))
        return not got_none
