"""The wake-ups of one engine: of workers, of readers of answers, and of callers that wait for an end."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from postroom.contracts.tasks.tasks import LOOK_AGAIN_DEAF_S, LOOK_AGAIN_S, TASK_ENDED, notifier_of
from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.times import checked_seconds
from postroom.engine.commits import Commits
from postroom.engine.messages import checked_message_id, unknown_message
from postroom.errors import PostroomError
from postroom.message import org_of
from postroom.nudges.notifier import QUIET_S
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction

READY = ".engine"  # no agent has a name that begins with a dot
PARTS_ADDED = ".parts"


class EndWaiters:
    """Coroutines that wait for the end of messages."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def add(self, message_id: str) -> "asyncio.Future[None]":
        """A future that is done when the message may have ended: the caller looks at the store."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(message_id, set()).add(future)
        return future

    def remove(self, message_id: str, future: "asyncio.Future[None]") -> None:
        """The caller waits no longer."""
        waiting = self._waiting.get(message_id, set())
        waiting.discard(future)
        if not waiting:
            self._waiting.pop(message_id, None)

    def wake(self, message_ids: list[str]) -> None:
        """Wake the coroutines that wait for these messages. May be called from any thread."""
        for message_id in message_ids:
            for future in list(self._waiting.get(message_id, ())):
                with suppress(RuntimeError):  # its loop is closed: nobody waits any more
                    future.get_loop().call_soon_threadsafe(_done, future)


def _done(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether an event is set within `timeout_s`.

    Not `asyncio.wait_for`: Python 3.11 loses a cancellation there that comes together with the event.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    return False


def set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set an event of a loop from any thread."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(event.set)


class Wakeups:
    """Tells the coroutines of this process, and other processes, that there is something to look at."""

    def __init__(self, store: Store, commits: Commits) -> None:
        self._store = store
        self._commits = commits
        self._end_waiters = EndWaiters()
        self._notifier = notifier_of(store)
        store.add_commit_listener(self._committed)

    def _committed(self, transaction: Transaction) -> None:
        if any(org_of(queue) for queue in transaction.ready):
            self._notifier.notify(READY)
        if transaction.ended:
            self._notifier.notify_rarely_awaited(TASK_ENDED)

    def wake_workers(self) -> None:
        """Wake the workers: there may be messages to claim."""
        self._notifier.notify(READY)

    @contextmanager
    def listening_for_work(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener`, from any thread, when there may be messages to claim."""
        with self._notifier.subscribed(READY, listener), self._store.receiving(listener):
            yield

    def wake_readers(self) -> None:
        """Wake the readers of answers and inboxes: something came for an agent."""
        self._notifier.notify_rarely_awaited(PARTS_ADDED)

    @contextmanager
    def listening_for_answers(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener`, from any thread, when messages may have ended or parts may have been stored."""
        with (
            self._notifier.subscribed(TASK_ENDED, listener),
            self._notifier.subscribed(PARTS_ADDED, listener),
        ):
            yield

    @property
    def look_again_s(self) -> float:
        """How long a reader waits for a wake-up before it looks anyway."""
        return LOOK_AGAIN_S if self._notifier.hears_other_processes else LOOK_AGAIN_DEAF_S

    async def pause_s(self) -> float:
        """How long a worker may wait for a wake-up without missing a deadline."""
        longest = self.look_again_s
        due_ns = self._store.known_deadline_ns()
        try:
            if due_ns is None:
                due_ns = await self._commits.read(lambda one: one.transaction.next_deadline_ns())
        except PostroomError:
            return longest
        return longest if due_ns is None else min(longest, due_ns / NANOS_PER_S + 0.001)

    def wake_waiting(self, message_ids: list[str]) -> None:
        """Wake the coroutines of this process that wait for these messages: they may have ended."""
        self._end_waiters.wake(message_ids)

    async def wait_for_end(self, message_id: str, timeout_s: float | None) -> None:
        """Return when a message has ended. Raises `TimeoutError`."""
        checked_message_id(message_id)
        deadline = None if timeout_s is None else time.monotonic() + checked_seconds("timeout_s", timeout_s)
        with self._notifier.subscribed(TASK_ENDED, partial(self._end_waiters.wake, [message_id])):
            pause_s = 2 * QUIET_S  # another process may not know yet that somebody waits
            while True:
                future = self._end_waiters.add(message_id)
                try:
                    if await self.has_ended(message_id):
                        return
                    left_s = None if deadline is None else deadline - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        raise TimeoutError(f"message {message_id} has not ended within {timeout_s:g} s")
                    await asyncio.wait([future], timeout=pause_s if left_s is None else min(pause_s, left_s))
                finally:
                    self._end_waiters.remove(message_id, future)
                pause_s = self.look_again_s

    async def has_ended(self, message_id: str) -> bool:
        """Whether no worker gets a message again."""
        record = await self._commits.read(lambda operations: operations.transaction.records.get(message_id))
        if record is None or not org_of(record.queue):
            raise unknown_message(message_id)
        return record.state in lifecycle.ENDED

    async def wait_for_news(self, message_id: str, pause_s: float) -> None:
        """Return when a message may have ended or a part of its answer was stored here, or after a pause."""
        future = self._end_waiters.add(message_id)
        try:
            await asyncio.wait([future], timeout=pause_s)
        finally:
            self._end_waiters.remove(message_id, future)

    def close(self) -> None:
        """Close the sockets. They are opened again when they are needed."""
        self._notifier.close()
