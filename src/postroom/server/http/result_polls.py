"""Long polls for results: many requests wait for tasks to end, without a thread each.

All of them share one loop. It checks every awaited task after a wake-up, and on an interval because a wake-up
may be lost.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import islice

from postroom.contracts.tasks.tasks import LOOK_AGAIN_DEAF_S, LOOK_AGAIN_S, TASK_ENDED, Tasks
from postroom.nudges.notifier import QUIET_S
from postroom.server.http.long_polls import LongPolls

GATHER_S = 0.005  # tasks that end within this are checked together
TASKS_A_READ = 500

Read = Callable[[Callable[[], set[str]]], Awaitable[set[str]]]
"""Runs a read of the store in a thread."""


class ResultPolls:
    """The requests that wait for tasks to end."""

    def __init__(self, tasks: Tasks, read: Read, long_polls: LongPolls) -> None:
        self._tasks = tasks
        self._read = read
        self._long_polls = long_polls
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._woken = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    async def wait(self, task_id: str, wait_s: float, left: "asyncio.Future[None]") -> None:
        """Return when the task has ended, `wait_s` has passed, or the client has `left`."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(task_id, set()).add(ended)
        self._long_polls.count += 1
        self._woken.set()
        if self._loop is None:
            self._loop = asyncio.ensure_future(self._run())
        try:
            await asyncio.wait(
                (ended, left, self._long_polls.ending),
                timeout=wait_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if ended.done():
                ended.result()
        finally:
            self._long_polls.count -= 1
            self._leave(task_id, ended)

    def _leave(self, task_id: str, ended: "asyncio.Future[None]") -> None:
        waiters = self._waiters.get(task_id, set())
        waiters.discard(ended)
        if not waiters:
            self._waiters.pop(task_id, None)
        if not self._waiters:
            self._woken.set()  # nothing is left to wait for, so the loop ends

    async def _run(self) -> None:
        try:
            with self._long_polls.subscribed(TASK_ENDED, self._woken.set):
                pause_s = 2 * QUIET_S  # another process may not see this waiter before
                while self._waiters:
                    await self._check(pause_s)
                    pause_s = (
                        LOOK_AGAIN_S if self._tasks.notifier.hears_other_processes else LOOK_AGAIN_DEAF_S
                    )
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
            for task_id in await self._read(lambda ids=task_ids: self._tasks.ended(ids)):  # type: ignore[misc]
                self._resolve(task_id)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._woken.wait()
                await asyncio.sleep(GATHER_S)

    def _resolve(self, task_id: str) -> None:
        for ended in self._waiters.pop(task_id, ()):
            if not ended.done():
                ended.set_result(None)
