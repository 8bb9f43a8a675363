"""A worker: claims tasks, calls a handler with each, and reports how they ended.

Rule 1: a nudge is only a wake-up. On every wake and at start the queue is drained until it is empty.
Rule 2: completing a task and claiming the next is one request. A worker that is stopping claims nothing, and
        releases at once a task that arrives with the answer to an earlier request.
Rule 3: heartbeats run from the moment a task arrives until its report is accepted.
"""

import asyncio
import contextlib
import inspect
import itertools
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, Protocol

from postroom.client.connections import LongPolls, RetryPauses
from postroom.client.nudge_endpoint import nudge_endpoint
from postroom.errors import (
    NotAllowed,
    PostroomError,
    Rejected,
    StaleLease,
    Unavailable,
    UnknownTask,
    WrongState,
)

LEASE_S = 300.0
WAIT_AT_WORK_S_MAX = 5.0  # of an idle worker's long poll, so that a server that died silently is noticed
ERROR_CHARS_MAX = 8_000  # of a handler's error that are reported

LEASE_OVER = (StaleLease, UnknownTask, WrongState)
"""Errors that mean that another worker has the task, or that the task has ended."""

_log = logging.getLogger("postroom.client")


@dataclass(frozen=True, eq=False)
class Task:
    """A claimed task. `lost` is set when this client knows that the lease is over."""

    task_id: str
    payload: Any
    lease: int
    attempt: int
    lease_s: float = LEASE_S
    type: str = ""
    parent: str = ""
    lost: threading.Event = field(default_factory=threading.Event, repr=False)


class TaskCalls(Protocol):
    """The calls of a client that a worker makes."""

    poll_every_s: float
    pauses: RetryPauses

    def kept_alive(self, task: Task) -> contextlib.AbstractContextManager[Task]: ...

    def complete_task(self, task: Task, decision: Any, *, claim_next: int) -> list[Task]: ...

    def fail_task(self, task: Task, error: str, retry_in_s: float | None) -> None: ...

    def release_task(self, task: Task) -> None: ...


class TaskFailed(Exception):
    """Raised by a handler: the task failed, with this error and, if given, this pause before the retry."""

    def __init__(self, error: str, retry_in_s: float | None = None) -> None:
        self.retry_in_s = retry_in_s
        super().__init__(error)


class StopWork(Exception):
    """Raised by a handler that can handle no task: its task is released, and `work` ends."""


class TaskEnd(NamedTuple):
    """How a worker ended one task."""

    task: Task
    outcome: str
    """completed, failed, released, or lost."""
    duration_s: float
    error: str = ""


class _Wakeups:
    """Counts nudges, so that a nudge between a look at the queue and a wait is not missed."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def wake(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def wait_past(self, seen: int, timeout_s: float) -> bool:
        """Wait until the count differs from `seen`; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.count != seen, timeout_s)


class _Report(NamedTuple):
    """What is reported about a task: the call to the harness, and what `TaskEnd` says."""

    send: Callable[[], list[Task] | None]
    outcome: str
    error: str = ""


class _InFlight(NamedTuple):
    task: Task
    heartbeats: contextlib.ExitStack


class TaskWorker:
    """One call of `TaskClient.work`.

    Each slot is a thread that handles tasks one after the other. The thread that called `work` waits for
    signals: "stop" from `stop`, "ended" from a slot.
    """

    def __init__(
        self,
        client: TaskCalls,
        handler: Callable[[Task], Any],
        claim: Callable[[float, LongPolls], list[Task]],
        *,
        concurrency: int,
        grace_s: float,
        until_empty: bool,
        on_end: Callable[[TaskEnd], None] | None,
        nudge_address: tuple[str, int] | None,
    ) -> None:
        self._client = client
        self._handler = handler
        self._claim = claim
        self._slots = concurrency
        self._grace_s = grace_s
        self._until_empty = until_empty
        self._on_end = on_end
        self._nudge_address = nudge_address
        self._wakeups = _Wakeups()
        self._long_polls = LongPolls()
        self._stopping = False
        self._in_flight: dict[int, _InFlight] = {}  # by lease
        self._failure: BaseException | None = None
        self._signals: queue.SimpleQueue[str] = queue.SimpleQueue()

    def stop(self) -> None:
        """Ask the worker to end. A second call also ends the grace of the tasks in flight.

        Safe in a signal handler: a flag and `SimpleQueue.put` are reentrant, `Event.set` is not.
        """
        self._stopping = True
        self._signals.put("stop")

    def run(self) -> None:
        with nudge_endpoint(self._nudge_address, self._wakeups.wake), self._signal_handlers():
            for number in range(self._slots):
                threading.Thread(target=self._slot, name=f"slot-{number}", daemon=True).start()
            running = self._slots - self._wait_for_stop()
            self._stopping = True
            self._wakeups.wake()
            self._long_polls.abort()
            deadline = time.monotonic() + self._grace_s  # until then slots may finish, or a second stop comes
            with contextlib.suppress(queue.Empty):
                while running and self._signals.get(timeout=max(0.0, deadline - time.monotonic())) != "stop":
                    running -= 1
        for each in list(self._in_flight.values()):
            self._release(each.task)  # before `lost` is set: a handler that gives up must report no failure
            each.task.lost.set()
        if self._failure is not None:
            raise self._failure

    # ---- in the thread that called work --------------------------------------------------------

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal handler's signature
            self.stop()

        numbers = (signal.SIGTERM, signal.SIGINT)
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers
            return
        before = [signal.signal(number, stop) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _wait_for_stop(self) -> int:
        """Wait until the worker has to stop or every slot has ended. Returns the number of ended slots."""
        for ended in itertools.count():
            if ended == self._slots or self._signals.get() == "stop":
                return ended
        raise AssertionError  # pragma: no cover - the loop has no end

    # ---- in a slot -----------------------------------------------------------------------------

    def _slot(self) -> None:
        try:
            while not self._stopping and self._turn():
                pass
        except BaseException as error:  # noqa: BLE001 - the thread that called work raises it
            self._failure = error
            self.stop()
        finally:
            self._signals.put("ended")

    def _turn(self) -> bool:
        """Handle tasks until a completion claims no further one, or wait for a task. False ends the slot."""
        nudged = self._nudge_address is not None
        seen = self._wakeups.count
        interval_s = self._client.poll_every_s
        if not nudged:
            interval_s = min(interval_s, WAIT_AT_WORK_S_MAX)
        until = time.monotonic() + interval_s
        task = self._take(0.0 if nudged or self._until_empty else interval_s)
        if task is not None:
            self._drain(task)
            return True
        if not self._until_empty:
            self._wakeups.wait_past(seen, max(0.0, until - time.monotonic()))
        return not self._until_empty

    def _take(self, wait_s: float) -> Task | None:
        try:
            return self._accept(self._claim(wait_s, self._long_polls))
        except Unavailable as error:
            if self._until_empty:
                raise
            if not self._long_polls.aborted:
                _log.warning("%s; trying again", error)
            return None

    def _accept(self, claimed: list[Task] | None) -> Task | None:
        """Put a claimed task in flight, with heartbeats; release it when the worker is stopping."""
        if not claimed:
            return None
        (task,) = claimed
        if self._stopping:
            self._release(task)
            return None
        heartbeats = contextlib.ExitStack()
        heartbeats.enter_context(self._client.kept_alive(task))
        self._in_flight[task.lease] = _InFlight(task, heartbeats)
        return task

    def _stop_heartbeats(self, task: Task) -> None:
        """Undo `_accept`: the task is no longer in flight."""
        in_flight = self._in_flight.pop(task.lease, None)
        if in_flight is not None:
            in_flight.heartbeats.close()

    def _release(self, task: Task) -> None:
        try:
            self._client.release_task(task)
        except PostroomError as error:
            _log.warning("could not release task %s, so its lease has to end: %s", task.task_id, error)
        finally:
            self._stop_heartbeats(task)

    def _drain(self, task: Task | None) -> None:
        """Handle a task, and then each task that was claimed together with a completion."""
        while task is not None and not self._stopping:
            task = self._handle(task)
        if task is not None:
            self._release(task)

    def _handle(self, task: Task) -> Task | None:
        """Handle a task in flight. Returns the task that was claimed with its completion, or None."""
        started_s = time.monotonic()
        try:
            report, following = self._send(task, self._run_handler(task))
        except BaseException:
            self._call_on_end(TaskEnd(task, "released", time.monotonic() - started_s))
            raise
        finally:
            self._stop_heartbeats(task)
        self._call_on_end(TaskEnd(task, report.outcome, time.monotonic() - started_s, report.error))
        return following

    def _call_on_end(self, end: TaskEnd) -> None:
        if self._on_end is not None:
            self._on_end(end)

    def _run_handler(self, task: Task) -> _Report:
        try:
            decision = self._handler(task)
            if inspect.iscoroutine(decision):
                decision = asyncio.run(decision)
        except TaskFailed as failure:
            return self._failed(task, str(failure), failure.retry_in_s)
        except StopWork:
            self._release(task)
            raise
        except Exception as failure:  # noqa: BLE001 - any exception of the handler is the task's failure
            return self._failed(task, f"{type(failure).__name__}: {failure}")
        except BaseException:
            self._release(task)
            raise

        def complete() -> list[Task]:
            return self._client.complete_task(task, decision, claim_next=0 if self._stopping else 1)

        return _Report(complete, "completed")

    def _failed(self, task: Task, error: str, retry_in_s: float | None = None) -> _Report:
        error = error[:ERROR_CHARS_MAX]
        return _Report(partial(self._client.fail_task, task, error, retry_in_s), "failed", error)

    def _send(self, task: Task, report: _Report) -> tuple[_Report, Task | None]:
        """Send a report until it is accepted or the lease is over.

        Returns the accepted report, and the task that came with its answer. A decision that cannot be
        stored, such as one that is not JSON, fails the task.
        """
        refused = False
        while True:
            try:
                claimed = report.send()
            except NotAllowed:
                raise
            except LEASE_OVER as error:
                _log.warning("task %s went to another worker: %s", task.task_id, error)
                return report._replace(outcome="lost"), None
            except Rejected as error:
                if refused:
                    _log.warning("task %s: %s", task.task_id, error)
                    return report, None
                refused, report = True, self._failed(task, str(error))
            except Unavailable as error:
                _log.warning("the report about task %s has to wait: %s", task.task_id, error)
                if task.lost.wait(self._client.pauses.longest_s):
                    return report._replace(outcome="lost"), None
            else:
                return report, self._accept(claimed)
