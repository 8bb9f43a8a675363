"""The agent's side of a task queue: claim tasks from a harness over HTTP, and report how they ended.

    with TaskClient("http://127.0.0.1:8800", agent="triage", token=TOKEN) as client:
        client.work(lambda task: {"label": "bug"})

Rule 1: imports only the standard library, msgspec and `postroom.errors` and
        `postroom.calls`.
Rule 2: every call about a task carries its lease. Repeating a call under the same lease changes nothing, so a
        call is repeated when its answer is lost. A claimed task whose answer is lost is redelivered when its
        lease ends.
Rule 3: no secret is logged or shown.
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from postroom.calls.tasks import (
    Complete,
    Enqueue,
    Fail,
    Heartbeat,
    Holder,
    NewTaskAnswer,
    Next,
    Release,
    ShowTask,
)
from postroom.client import arguments
from postroom.client.calls import RETRIES, TIMEOUT_S, HttpClient, deadline_after
from postroom.client.connections import LongPolls
from postroom.client.worker import LEASE_OVER, LEASE_S, Task, TaskEnd, TaskWorker
from postroom.errors import (
    InvalidMessage,
    NoResult,
    NotHeld,
    PostroomError,
    Rejected,
)

LEASE_AT_WORK_S = 75.0  # shorter, because `work` sends heartbeats: a dead worker is noticed sooner
HEARTBEAT_EVERY_S = 25.0
HEARTBEATS_PER_LEASE = 3  # at least, so that two may be lost
POLL_EVERY_S = 10.0  # the longest delay that a lost nudge causes
WAIT_S_MAX = 30.0  # of one long poll; a longer wait is several of them
GRACE_S = 20.0  # for the tasks that are in flight when a worker is stopped
LEASES_REMEMBERED_MAX = 10_000
CONCURRENCY_MAX = 1_000
PORT_MAX = 65_535

_log = logging.getLogger("postroom.client")

_SUCCEEDED = ("COMPLETED", "EXECUTING", "DONE")
_ENDED = (*_SUCCEEDED, "DEAD_LETTER", "CANCELLED", "EXPIRED", "QUARANTINED")


# ---- tasks ---------------------------------------------------------------------------------------------


class TaskView(msgspec.Struct, frozen=True):
    """A task as its sender, its agent and operators see it."""

    task_id: str
    agent: str
    status: str
    state: str
    payload: Any = None
    result: Any = None
    errors: list[str] = []
    attempt: int = 0
    retry_count: int = 0
    sender: str = ""
    type: str = ""
    parent: str = ""
    created_at: datetime | None = None
    claimed_at: datetime | None = None
    completed_at: datetime | None = None
    last_heartbeat: datetime | None = None
    lease_ends_at: datetime | None = None

    @property
    def ended(self) -> bool:
        """Whether the task has a result or failed for good."""
        return self.state in _ENDED

    @property
    def succeeded(self) -> bool:
        """Whether the task has a result."""
        return self.state in _SUCCEEDED


class _ClaimedTask(msgspec.Struct, frozen=True):
    task_id: str
    payload: Any
    lease: int
    attempt: int
    lease_s: float = LEASE_S
    type: str = ""
    parent: str = ""


class _ClaimedTasks(msgspec.Struct, frozen=True):
    tasks: list[_ClaimedTask] = []


class _Heartbeats:
    """The heartbeats of one lease, sent until `stopped` is set."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.ending = False
        """Set before the call that ends the lease is sent; cleared when the harness refuses that call."""


# ---- the client ----------------------------------------------------------------------------------------


class TaskClient(HttpClient):
    """One agent's client of its harness. Safe to share between threads.

    A call about a task takes the task or its id. With an id, the client sends the latest lease that it was
    given for that id; where several threads share a client, pass the task.
    """

    def __init__(
        self,
        url: str,
        agent: str,
        token: str,
        *,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        heartbeat_every_s: float = HEARTBEAT_EVERY_S,
        poll_every_s: float = POLL_EVERY_S,
        worker: str | None = None,
    ) -> None:
        super().__init__(url, token, timeout_s=timeout_s, retries=retries)
        self.agent = arguments.text("agent", agent)
        self._identity = {"agent": agent} if agent else {}  # the token alone names the agent, too
        self.heartbeat_every_s = arguments.positive_seconds("heartbeat_every_s", heartbeat_every_s)
        self.poll_every_s = arguments.positive_seconds("poll_every_s", poll_every_s)
        self._worker = None if worker is None else arguments.text("worker", worker)
        self._leases: OrderedDict[str, int] = OrderedDict()
        self._leases_lock = threading.Lock()
        self._heartbeats: dict[int, _Heartbeats] = {}  # by lease
        self._workers: set[TaskWorker] = set()

    def __repr__(self) -> str:
        return f"TaskClient({self._connections.url!r}, agent={self.agent!r})"

    # ---- claiming ------------------------------------------------------------------------------

    def next_task(self, wait_s: float = 0.0, lease_s: float = LEASE_S) -> Task | None:
        """Claim the next task of this agent. Waits up to `wait_s` for one; None when there is none."""
        tasks = self.next_tasks(1, wait_s, lease_s)
        return tasks[0] if tasks else None

    def next_tasks(self, limit: int, wait_s: float = 0.0, lease_s: float = LEASE_S) -> list[Task]:
        """Claim up to `limit` tasks, the oldest first."""
        arguments.count("limit", limit, least=1)
        arguments.positive_seconds("lease_s", lease_s)
        deadline = time.monotonic() + arguments.seconds("wait_s", wait_s)
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            tasks = self._claim(limit, lease_s, min(left_s, WAIT_S_MAX))
            if tasks or left_s <= WAIT_S_MAX:
                return tasks

    def _claim(
        self, limit: int, lease_s: float, wait_s: float, long_polls: LongPolls | None = None
    ) -> list[Task]:
        claim = Next(**self._identity, limit=limit, lease_s=lease_s, wait_s=wait_s, worker=self.worker)
        answer = self.call(claim, timeout_s=self.timeout_s + wait_s, long_polls=long_polls)
        if answer is None:
            return []
        # With a limit of 1 the answer is the task itself.
        many = isinstance(answer, dict) and "tasks" in answer
        return self._claimed(answer if many else {"tasks": [answer]})

    def _claimed(self, answer: Any) -> list[Task]:
        """The tasks of an answer. Their leases are remembered."""
        claimed = self.converted(answer, _ClaimedTasks).tasks
        with self._leases_lock:
            for task in claimed:
                self._leases[task.task_id] = task.lease
                self._leases.move_to_end(task.task_id)
            while len(self._leases) > LEASES_REMEMBERED_MAX:
                self._leases.popitem(last=False)
        return [Task(**msgspec.structs.asdict(task)) for task in claimed]

    @property
    def worker(self) -> str:
        """The name of the lease holder, as `status` shows it."""
        return self._worker or f"{socket.gethostname()}:{os.getpid()}"

    # ---- calls of a lease holder ---------------------------------------------------------------

    def complete_task(
        self, task: str | Task, decision: Any = None, *, lease: int | None = None, claim_next: int = 0
    ) -> list[Task]:
        """Complete a task with a decision, its result.

        `claim_next` claims up to that many further tasks in the same request, with leases as long, and
        returns them.
        """
        arguments.count("claim_next", claim_next)
        held = self._held(task, lease)
        answer = self._end_lease(Complete(**held, decision=decision, claim_next=claim_next))
        return self._claimed(answer) if claim_next and answer else []

    def heartbeat(self, task: str | Task, *, lease: int | None = None) -> None:
        """Renew a lease: it runs its whole length from now."""
        self.call(Heartbeat(**self._held(task, lease)))

    def fail_task(
        self, task: str | Task, error: str, retry_in_s: float | None = None, *, lease: int | None = None
    ) -> None:
        """Report a failure. The task is retried after a pause, or becomes a dead letter."""
        if retry_in_s is not None:
            arguments.seconds("retry_in_s", retry_in_s)
        held = self._held(task, lease)
        self._end_lease(Fail(**held, error=arguments.text("error", error), retry_in_s=retry_in_s))

    def release_task(self, task: str | Task, *, lease: int | None = None) -> None:
        """Give a task back. It keeps its place in the queue, and no failure is counted."""
        self._end_lease(Release(**self._held(task, lease)))

    def _end_lease(self, verb: Holder) -> Any:
        """Send the call that ends a lease. A heartbeat that is refused after it does not set `lost`."""
        heartbeats = self._heartbeats.get(verb.lease) or _Heartbeats()
        heartbeats.ending = True
        try:
            answer = self.call(verb)
        except Rejected:
            heartbeats.ending = False
            raise
        heartbeats.stopped.set()
        return answer

    def _held(self, task: str | Task, lease: int | None) -> dict[str, Any]:
        """The fields of a call of the lease holder."""
        if isinstance(task, Task):
            return {**self._identity, "task_id": task.task_id, "lease": task.lease}
        arguments.text("task", task)
        known = self._leases.get(task) if lease is None else arguments.count("lease", lease)
        if known is None:
            raise NotHeld(task)
        return {**self._identity, "task_id": task, "lease": known}

    @contextlib.contextmanager
    def kept_alive(self, task: Task) -> Iterator[Task]:
        """Send heartbeats from a thread while the block runs. `task.lost` is set when the lease is over."""
        heartbeats = self._heartbeats[task.lease] = _Heartbeats()
        beat = partial(self._send_heartbeats, task, heartbeats)
        threading.Thread(target=beat, name="heartbeat", daemon=True).start()
        try:
            yield task
        finally:
            heartbeats.stopped.set()
            self._heartbeats.pop(task.lease, None)

    def _send_heartbeats(self, task: Task, heartbeats: _Heartbeats) -> None:
        every_s = min(self.heartbeat_every_s, task.lease_s / HEARTBEATS_PER_LEASE)
        confirmed = time.monotonic()
        wait_s = every_s
        while not heartbeats.stopped.wait(wait_s):
            sent = time.monotonic()
            try:
                # Without retries: the next heartbeat is the retry.
                self.call(
                    Heartbeat(**self._held(task, None)), timeout_s=min(self.timeout_s, every_s), retries=0
                )
                confirmed, wait_s = sent, every_s
            except LEASE_OVER as error:
                wait_s = every_s
                if not heartbeats.ending:  # else the answer to the ending call shows whether it was in time
                    self._mark_lost(task, heartbeats, f"is lost: {error}")
                    return
            except PostroomError as error:
                _log.warning("no heartbeat for task %s: %s", task.task_id, error)
                wait_s = min(every_s, self.pauses.longest_s)
                if time.monotonic() - confirmed > task.lease_s:
                    self._mark_lost(task, heartbeats, _unconfirmed(heartbeats))
                    return

    @staticmethod
    def _mark_lost(task: Task, heartbeats: _Heartbeats, reason: str) -> None:
        if not heartbeats.stopped.is_set():
            _log.warning("task %s %s", task.task_id, reason)
            task.lost.set()

    # ---- sending -------------------------------------------------------------------------------

    def enqueue(
        self,
        agent: str,
        payload: Any,
        *,
        task_id: str | None = None,
        delay_s: float = 0.0,
        idempotency_key: str | None = None,
        type: str = "",  # noqa: A002 - the protocol's word
        parent: str = "",
        max_retries: int | None = None,
    ) -> str:
        """Send a task to an agent and return its id. For operators, and for agents that may send to it."""
        # The client makes the id, so that the call can be repeated: the same id stores one task.
        new = Enqueue(
            agent=arguments.text("agent", agent),
            payload=payload,
            task_id=f"t-{uuid.uuid4().hex}" if task_id is None else arguments.text("task_id", task_id),
            delay_s=arguments.seconds("delay_s", delay_s),
            type=arguments.text("type", type),
            parent=arguments.text("parent", parent),
            idempotency_key=None
            if idempotency_key is None
            else arguments.text("idempotency_key", idempotency_key),
            max_retries=None if max_retries is None else arguments.count("max_retries", max_retries),
        )
        stored = self.converted(self.call(new), NewTaskAnswer)
        if stored.warning:
            _log.warning("task %s: %s", stored.task_id, stored.warning)
        return stored.task_id

    def get(self, task_id: str) -> TaskView:
        """Return a task. Raises `UnknownTask` unless this agent received or sent it."""
        return self.converted(self.call(ShowTask(task_id=task_id)), TaskView)

    def wait(self, task_id: str, timeout_s: float | None = None) -> TaskView:
        """Wait until a task has ended or `timeout_s` has passed, and return it as it is then."""
        deadline = deadline_after(timeout_s)
        while True:
            wait_s = min(max(0.0, deadline - time.monotonic()), WAIT_S_MAX)
            asked = ShowTask(task_id=task_id, wait_s=round(wait_s, 3))
            task = self.converted(self.call(asked, timeout_s=self.timeout_s + wait_s), TaskView)
            if task.ended or time.monotonic() >= deadline:
                return task

    def ask(self, agent: str, payload: Any, *, timeout_s: float | None = None, **options: Any) -> Any:
        """Send a task to an agent, wait for its result and return it. `options` are those of `enqueue`.

        Raises `NoResult` when the task fails for good, or when `timeout_s` has passed.
        """
        if timeout_s is not None:
            arguments.seconds("timeout_s", timeout_s)  # before anything is sent
        task = self.wait(self.enqueue(agent, payload, **options), timeout_s)
        if not task.succeeded:
            raise NoResult(task)
        return task.result

    # ---- the same, for asyncio -----------------------------------------------------------------

    async def anext_task(self, wait_s: float = 0.0, lease_s: float = LEASE_S) -> Task | None:
        """As `next_task`. A task that arrives for a cancelled call is released."""
        cancelled = threading.Event()

        def claim() -> Task | None:
            task = self.next_task(wait_s, lease_s)
            if task is not None and cancelled.is_set():
                self.release_task(task)
            return task

        try:
            return await asyncio.to_thread(claim)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def acomplete_task(
        self, task: str | Task, decision: Any = None, *, lease: int | None = None, claim_next: int = 0
    ) -> list[Task]:
        complete = partial(self.complete_task, task, decision, lease=lease, claim_next=claim_next)
        return await asyncio.to_thread(complete)

    async def aheartbeat(self, task: str | Task, *, lease: int | None = None) -> None:
        await asyncio.to_thread(self.heartbeat, task, lease=lease)

    async def afail_task(
        self, task: str | Task, error: str, retry_in_s: float | None = None, *, lease: int | None = None
    ) -> None:
        await asyncio.to_thread(self.fail_task, task, error, retry_in_s, lease=lease)

    async def aenqueue(self, agent: str, payload: Any, **options: Any) -> str:
        return await asyncio.to_thread(self.enqueue, agent, payload, **options)

    async def aget(self, task_id: str) -> TaskView:
        return await asyncio.to_thread(self.get, task_id)

    async def aask(self, agent: str, payload: Any, *, timeout_s: float | None = None, **options: Any) -> Any:
        return await asyncio.to_thread(self.ask, agent, payload, timeout_s=timeout_s, **options)

    async def arelease_task(self, task: str | Task, *, lease: int | None = None) -> None:
        await asyncio.to_thread(self.release_task, task, lease=lease)

    # ---- working -------------------------------------------------------------------------------

    def work(
        self,
        handler: Callable[[Task], Any],
        *,
        nudge_port: int | None = None,
        nudge_host: str = "127.0.0.1",
        concurrency: int = 1,
        lease_s: float = LEASE_AT_WORK_S,
        grace_s: float = GRACE_S,
        until_empty: bool = False,
        on_end: Callable[[TaskEnd], None] | None = None,
    ) -> None:
        """Call `handler` with every task, until SIGTERM, SIGINT or `stop()`.

        The handler's return value is the decision; its exception is the failure. It may be an async function.
        It runs in a thread of its own, and heartbeats in another. A handler that raises `StopWork` ends the
        worker. `on_end` is called after each task, in the handler's thread.

        An idle worker waits in a long poll at the harness. With a `nudge_port` it waits for `POST /task` at
        that port instead, and polls every `poll_every_s`. A stopping worker claims nothing more; tasks in
        flight have `grace_s` to finish and are then released. With `until_empty` it ends when its queue is
        empty.
        """
        if not callable(handler):
            raise InvalidMessage(f"handler must be a function that takes a task, not {handler!r}")
        if arguments.count("concurrency", concurrency, least=1) > CONCURRENCY_MAX:
            raise InvalidMessage(f"concurrency must be from 1 to {CONCURRENCY_MAX}, not {concurrency!r}")
        arguments.positive_seconds("lease_s", lease_s)
        arguments.seconds("grace_s", grace_s)
        if nudge_port is not None and arguments.count("nudge_port", nudge_port) > PORT_MAX:
            raise InvalidMessage(f"nudge_port must be from 0 to {PORT_MAX}, not {nudge_port!r}")
        worker = TaskWorker(
            self,
            handler,
            partial(self._claim, 1, lease_s),
            concurrency=concurrency,
            grace_s=grace_s,
            until_empty=until_empty,
            on_end=on_end,
            nudge_address=None if nudge_port is None else (nudge_host, nudge_port),
        )
        self._workers.add(worker)
        try:
            worker.run()
        finally:
            self._workers.discard(worker)

    def stop(self) -> None:
        """End every `work` of this client, as SIGTERM does. From any thread."""
        for worker in list(self._workers):
            worker.stop()

    def close(self) -> None:
        """End every `work`, and close every connection. A later call opens new ones."""
        self.stop()
        super().close()


def _unconfirmed(heartbeats: _Heartbeats) -> str:
    if heartbeats.ending:
        return "was reported, but no answer came in time: whether the report arrived is not known"
    return "is lost: no heartbeat was confirmed in time"
