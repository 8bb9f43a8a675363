"""The agent's side of a task queue: take tasks from a harness over HTTP, and say how they went.

    with TaskClient("http://127.0.0.1:8800", agent="triage", token=TOKEN) as client:
        client.work(lambda task: {"label": "bug"})

Rule 1: the standard library and msgspec, and nothing of postroom: an agent embeds this file's package alone.
Rule 2: a nudge is only a wake-up. On every wake and at start the queue is drained until it is empty.
Rule 3: every word about a task shows its lease. Repeating a word under the same lease changes nothing, so
        every call is repeated when its answer is lost. A task whose answer is lost comes back with its lease.
Rule 4: no secret is logged or shown.

    TaskClientError
    ├── Refused              the harness said no: the same call will fail again
    │   ├── NotAllowed       no valid token, or a task of somebody else
    │   ├── UnknownTask      this agent has no such task
    │   ├── StaleLease       the task is no longer ours: stop working on it
    │   ├── WrongState       the task is not in a state in which this can be done
    │   └── InvalidArgument  an argument of the wrong kind: nothing was sent (also a ValueError)
    ├── NotHeld              this client was never given the task, and no lease was named
    ├── NoResult             a task that was asked for ended without a result, or not in time
    └── Unreachable          nobody answered, or only with an excuse: trying again can work
"""

import asyncio
import contextlib
import http.client
import inspect
import itertools
import logging
import math
import os
import queue
import random
import signal
import socket
import socketserver
import threading
import time
import urllib.parse
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

LEASE_S = 300.0
LEASE_AT_WORK_S = 75.0  # `work` sends heartbeats, so a dead worker is found out sooner
TIMEOUT_S = 10.0  # of one answer, the time of a long poll added
RETRIES = 4
HEARTBEAT_EVERY_S = 25.0
BEATS_A_LEASE = 3  # at least: two may be lost
POLL_EVERY_S = 10.0  # what a lost nudge costs
WAIT_S_MAX = 30.0  # of one long poll; a longer wait is several of them
WAIT_AT_WORK_S_MAX = 5.0  # of an idle worker's long poll: a server that is gone without a word is found out
GRACE_S = 20.0  # for what is held when the end is asked for
FIRST_PAUSE_S = 0.1  # before a call is repeated; doubled each time, with jitter
PAUSE_S_MAX = 2.0
RETRY_AFTER_S_MAX = 30.0  # of a server's wish that is obeyed
RESULT_NUDGE_TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 256 * 1024 * 1024
LEASES_REMEMBERED_MAX = 10_000
IDLE_CONNECTIONS_MAX = 64
CONCURRENCY_MAX = 1_000
PORT_MAX = 65_535
NUDGE_BODY_BYTES_MAX = 64 * 1024
NUDGE_READ_S = 5.0
NUDGES_AT_ONCE_MAX = 16
ERROR_CHARS_MAX = 8_000  # of a handler's error that is reported

_T = TypeVar("_T")

_log = logging.getLogger("postroom.client")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


# ---- errors ------------------------------------------------------------------------------------


class TaskClientError(Exception):
    """Base of what a client raises."""


class Refused(TaskClientError):
    """The harness said no. The same call will fail again."""

    def __init__(self, message: str, status: int = 0) -> None:
        self.status = status
        super().__init__(message)


class NotAllowed(Refused):
    """The token is not known, or does not allow this."""


class UnknownTask(Refused):
    """This agent has no task with that id."""


class StaleLease(Refused):
    """The lease is over: the task belongs to somebody else now, or is done. Stop working on it."""


class WrongState(Refused):
    """What was asked for cannot be done to a task in this state."""


class InvalidArgument(Refused, ValueError):
    """An argument that no harness would take. Nothing was sent."""


class NotHeld(TaskClientError):
    """This client was never given the task."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        super().__init__(f"this client was not given task {task_id!r}: name its lease")


class NoResult(TaskClientError):
    """A task that was asked for has no result. `task` is how it stood last."""

    def __init__(self, task: "TaskInfo") -> None:
        self.task = task
        why = f": {task.errors[-1]}" if task.errors else ""
        end = f"ended as {task.status}{why}" if task.ended else f"has not ended in time: it is {task.status}"
        super().__init__(f"task {task.task_id} of {task.agent} {end}")


class Unreachable(TaskClientError):
    """No answer, or one that says to come back later."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class TaskFailed(Exception):
    """What a handler raises to say in its own words that a task failed, and when to try it again."""

    def __init__(self, error: str, retry_in_s: float | None = None) -> None:
        self.retry_in_s = retry_in_s
        super().__init__(error)


class StopWork(Exception):
    """What a handler raises when no task can be handled: its task goes back untouched, and `work` ends."""


class TaskEnd(NamedTuple):
    """How `work` was done with one task."""

    task: "Task"
    outcome: str
    """completed, failed, released, or lost."""
    duration_s: float
    error: str = ""


_BY_NAME = {"StaleLease": StaleLease, "UnknownTask": UnknownTask, "WrongState": WrongState}
_BY_STATUS = {401: NotAllowed, 403: NotAllowed}
_TOO_MANY = 429
_SERVER_FAULT = 500
_OK_BELOW = 300


# ---- what goes over the wire -------------------------------------------------------------------


class _GivenTask(msgspec.Struct, frozen=True):
    task_id: str
    payload: Any
    lease: int
    attempt: int
    lease_s: float = LEASE_S
    type: str = ""
    parent: str = ""


class _GivenTasks(msgspec.Struct, frozen=True):
    tasks: list[_GivenTask]


class TaskInfo(msgspec.Struct, frozen=True):
    """How a task stands, as its sender, its agent and operators see it."""

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
        """Whether nobody will work on it any more: it has a result, or it failed for good."""
        return self.state in _ENDED

    @property
    def succeeded(self) -> bool:
        """Whether it has a result."""
        return self.state in _SUCCEEDED


_SUCCEEDED = ("COMPLETED", "EXECUTING", "DONE")
_ENDED = (*_SUCCEEDED, "DEAD_LETTER", "CANCELLED", "EXPIRED", "QUARANTINED")


class _Stored(msgspec.Struct, frozen=True):
    task_id: str
    warning: str = ""


class _ErrorAnswer(msgspec.Struct, frozen=True):
    error: str = ""
    message: str = ""


class _Call(NamedTuple):
    method: str
    path: str
    body: bytes | None
    headers: dict[str, str]
    timeout_s: float
    waits: "_Waits | None" = None

    @property
    def broken_off(self) -> bool:
        return self.waits is not None and self.waits.over


class _Waits:
    """Calls that wait at the harness, and can be broken off.

    Only our half of a connection is closed. A harness that sees that gives back what it has claimed for us;
    a task that was on its way by then still arrives.
    """

    def __init__(self) -> None:
        self._connections: set[http.client.HTTPConnection] = set()
        self.over = False

    def break_off(self) -> None:
        self.over = True
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)

    @contextlib.contextmanager
    def listed(self, connection: http.client.HTTPConnection) -> Iterator[None]:
        self._connections.add(connection)
        try:
            if self.over:
                self.break_off()
            yield
        finally:
            self._connections.discard(connection)


_Answer = tuple[int, http.client.HTTPMessage, bytes]


@dataclass(frozen=True, eq=False)
class Task:
    """A task that was given to this agent. `lost` is set when it is known to be ours no longer."""

    task_id: str
    payload: Any
    lease: int
    attempt: int
    lease_s: float = LEASE_S
    type: str = ""
    parent: str = ""
    lost: threading.Event = field(default_factory=threading.Event, repr=False)


# ---- the client --------------------------------------------------------------------------------


class TaskClient:
    """One agent's way to its harness. Safe to share between threads.

    A word about a task takes its id, or the task itself. The id stands for the lease that this client was
    given last for it; where several threads share a client, say it with the task.
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
        self.agent = _text("agent", agent)
        self._who = {"agent": agent} if agent else {}  # a token says by itself whose it is
        self.timeout_s = _positive("timeout_s", timeout_s)
        self.retries = _count("retries", retries)
        self.heartbeat_every_s = _positive("heartbeat_every_s", heartbeat_every_s)
        self.poll_every_s = _positive("poll_every_s", poll_every_s)
        self._worker = None if worker is None else _text("worker", worker)
        self._connections = _Connections(url)
        self._headers = {"Authorization": f"Bearer {_header_text(token)}", "Content-Type": "application/json"}
        self._leases: OrderedDict[str, int] = OrderedDict()
        self._leases_lock = threading.Lock()
        self._beats: dict[int, _Beats] = {}  # by lease
        self._shifts: set[_Shift] = set()

    def __repr__(self) -> str:
        return f"TaskClient({self._connections.url!r}, agent={self.agent!r})"

    # ---- taking --------------------------------------------------------------------------------

    def next_task(self, wait_s: float = 0.0, lease_s: float = LEASE_S) -> Task | None:
        """The next task of this agent, leased, or None. `wait_s` waits for one."""
        tasks = self.next_tasks(1, wait_s, lease_s)
        return tasks[0] if tasks else None

    def next_tasks(self, limit: int, wait_s: float = 0.0, lease_s: float = LEASE_S) -> list[Task]:
        """Up to `limit` tasks, the oldest first."""
        _count("limit", limit, least=1)
        _positive("lease_s", lease_s)
        deadline = time.monotonic() + _seconds("wait_s", wait_s)
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            tasks = self._next(limit, min(left_s, WAIT_S_MAX), lease_s)
            if tasks or left_s <= WAIT_S_MAX:
                return tasks

    def _next(self, limit: int, wait_s: float, lease_s: float, waits: "_Waits | None" = None) -> list[Task]:
        wish = {
            **self._who,
            "limit": limit,
            "lease_s": lease_s,
            "wait_s": wait_s,
            "worker": self.worker,
        }
        call = _Call("POST", "/queue/next", _encode(wish), self._headers, self.timeout_s + wait_s, waits)
        answer = self._call(call, self.retries)
        if answer is None:
            return []
        try:
            given = (
                msgspec.convert(answer, _GivenTasks).tasks
                if "tasks" in answer
                else [msgspec.convert(answer, _GivenTask)]
            )
        except (msgspec.ValidationError, TypeError) as error:
            raise Refused(f"the answer of {self._connections.url} is not a task: {error}") from None
        self._remember(given)
        return [Task(*(getattr(task, name) for name in _GivenTask.__struct_fields__)) for task in given]

    @property
    def worker(self) -> str:
        """Who holds the leases, as the status shows it."""
        return self._worker or f"{socket.gethostname()}:{os.getpid()}"

    def _remember(self, given: list[_GivenTask]) -> None:
        with self._leases_lock:
            for task in given:
                self._leases[task.task_id] = task.lease
                self._leases.move_to_end(task.task_id)
            while len(self._leases) > LEASES_REMEMBERED_MAX:
                self._leases.popitem(last=False)

    # ---- the words of a holder -----------------------------------------------------------------

    def complete_task(self, task: str | Task, decision: Any = None, *, lease: int | None = None) -> None:
        """The task is done, and this is the decision. Then the harness is nudged to look at it."""
        word = self._word(task, lease, decision=decision)
        self._say_last("/queue/complete", word)
        with contextlib.suppress(TaskClientError):  # the harness looks at its interval, too
            nudge = {"task_id": word["task_id"]}
            self.request("POST", "/harness/result", nudge, timeout_s=RESULT_NUDGE_TIMEOUT_S, retries=0)

    def heartbeat(self, task: str | Task, *, lease: int | None = None) -> None:
        """The lease runs its whole length from now."""
        self.request("POST", "/queue/heartbeat", self._word(task, lease))

    def fail_task(
        self, task: str | Task, error: str, retry_in_s: float | None = None, *, lease: int | None = None
    ) -> None:
        """The task failed. The harness tries it again after a pause, or buries it."""
        wish = {} if retry_in_s is None else {"retry_in_s": _seconds("retry_in_s", retry_in_s)}
        self._say_last("/queue/fail", self._word(task, lease, error=_text("error", error), **wish))

    def release_task(self, task: str | Task, *, lease: int | None = None) -> None:
        """Give the task back untouched."""
        self._say_last("/queue/release", self._word(task, lease))

    def _say_last(self, path: str, word: dict[str, Any]) -> None:
        """Send the word that ends a lease. A heartbeat that arrives after it is refused: that is no loss."""
        beats = self._beats.get(word["lease"]) or _Beats()
        beats.last_word_sent = True
        try:
            self.request("POST", path, word)
        except Refused:
            beats.last_word_sent = False
            raise
        beats.over.set()

    def _word(self, task: str | Task, lease: int | None, **facts: Any) -> dict[str, Any]:
        if isinstance(task, Task):
            return {**self._who, "task_id": task.task_id, "lease": task.lease, **facts}
        _text("task", task)
        shown = self._leases.get(task) if lease is None else _count("lease", lease)
        if shown is None:
            raise NotHeld(task)
        return {**self._who, "task_id": task, "lease": shown, **facts}

    @contextlib.contextmanager
    def kept_alive(self, task: Task) -> Iterator[Task]:
        """Heartbeats from a thread while the block runs. `task.lost` is set when it is ours no longer."""
        beats = self._beats[task.lease] = _Beats()
        threading.Thread(target=self._beat, args=(task, beats), name="heartbeat", daemon=True).start()
        try:
            yield task
        finally:
            beats.over.set()
            self._beats.pop(task.lease, None)

    def _beat(self, task: Task, beats: "_Beats") -> None:
        every_s = min(self.heartbeat_every_s, task.lease_s / BEATS_A_LEASE)
        heard = time.monotonic()
        pause_s = every_s
        while not beats.over.wait(pause_s):
            asked = time.monotonic()
            try:
                self._heartbeat_once(task, min(self.timeout_s, every_s))
                heard, pause_s = asked, every_s
            except (StaleLease, UnknownTask, WrongState) as error:
                pause_s = every_s
                if not beats.last_word_sent:  # else the answer to the last word tells whether it came in time
                    self._lose(task, beats, f"is lost: {error}")
                    return
            except TaskClientError as error:
                _log.warning("no heartbeat for task %s: %s", task.task_id, error)
                pause_s = min(every_s, PAUSE_S_MAX)
                if time.monotonic() - heard > task.lease_s:
                    self._lose(task, beats, _unconfirmed(beats))
                    return

    def _heartbeat_once(self, task: Task, timeout_s: float) -> None:
        """Without retries: the next beat is one."""
        self.request("POST", "/queue/heartbeat", self._word(task, None), timeout_s=timeout_s, retries=0)

    @staticmethod
    def _lose(task: Task, beats: "_Beats", what: str) -> None:
        if not beats.over.is_set():
            _log.warning("task %s %s", task.task_id, what)
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
        """Send a task to an agent and return its id: for operators, and agents that may send to it."""
        # With an id of our own the call can be repeated: the same id stores one task.
        wish: dict[str, Any] = {
            "agent": _text("agent", agent),
            "payload": payload,
            "task_id": f"t-{uuid.uuid4().hex}" if task_id is None else _text("task_id", task_id),
            "delay_s": _seconds("delay_s", delay_s),
            "type": _text("type", type),
            "parent": _text("parent", parent),
        }
        if idempotency_key is not None:
            wish["idempotency_key"] = _text("idempotency_key", idempotency_key)
        if max_retries is not None:
            wish["max_retries"] = _count("max_retries", max_retries)
        stored = self._answer(self.request("POST", "/queue/enqueue", wish), _Stored)
        if stored.warning:
            _log.warning("task %s: %s", stored.task_id, stored.warning)
        return stored.task_id

    def get(self, task_id: str) -> TaskInfo:
        """How a task stands. Raises `UnknownTask` when it is neither ours nor sent by us."""
        return self._answer(self.request("GET", _task_path(task_id)), TaskInfo)

    def wait(self, task_id: str, timeout_s: float | None = None) -> TaskInfo:
        """Return the task when it has ended, or as it is when `timeout_s` has passed."""
        deadline = float("inf") if timeout_s is None else time.monotonic() + _seconds("timeout_s", timeout_s)
        while True:
            wait_s = min(max(0.0, deadline - time.monotonic()), WAIT_S_MAX)
            path = f"{_task_path(task_id)}?wait_s={wait_s:.3f}"
            answer = self.request("GET", path, timeout_s=self.timeout_s + wait_s)
            task = self._answer(answer, TaskInfo)
            if task.ended or time.monotonic() >= deadline:
                return task

    def ask(self, agent: str, payload: Any, *, timeout_s: float | None = None, **wishes: Any) -> Any:
        """Send a task to an agent, wait for its result and return it. `wishes` are as for `enqueue`.

        Raises `NoResult` when the task fails for good, or when `timeout_s` has passed.
        """
        if timeout_s is not None:
            _seconds("timeout_s", timeout_s)  # before anything is sent
        task = self.wait(self.enqueue(agent, payload, **wishes), timeout_s)
        if not task.succeeded:
            raise NoResult(task)
        return task.result

    def _answer(self, answer: Any, kind: type[_T]) -> _T:
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise Refused(f"the answer of {self._connections.url} does not fit: {error}") from None

    # ---- the same, for asyncio -----------------------------------------------------------------

    async def anext_task(self, wait_s: float = 0.0, lease_s: float = LEASE_S) -> Task | None:
        """As `next_task`. What a cancelled call is given all the same goes back."""
        abandoned = threading.Event()

        def ask() -> Task | None:
            task = self.next_task(wait_s, lease_s)
            if task is not None and abandoned.is_set():
                self.release_task(task)
            return task

        try:
            return await asyncio.to_thread(ask)
        except asyncio.CancelledError:
            abandoned.set()
            raise

    async def acomplete_task(
        self, task: str | Task, decision: Any = None, *, lease: int | None = None
    ) -> None:
        await asyncio.to_thread(self.complete_task, task, decision, lease=lease)

    async def aheartbeat(self, task: str | Task, *, lease: int | None = None) -> None:
        await asyncio.to_thread(self.heartbeat, task, lease=lease)

    async def afail_task(
        self, task: str | Task, error: str, retry_in_s: float | None = None, *, lease: int | None = None
    ) -> None:
        await asyncio.to_thread(self.fail_task, task, error, retry_in_s, lease=lease)

    async def aenqueue(self, agent: str, payload: Any, **wishes: Any) -> str:
        return await asyncio.to_thread(self.enqueue, agent, payload, **wishes)

    async def aget(self, task_id: str) -> TaskInfo:
        return await asyncio.to_thread(self.get, task_id)

    async def aask(self, agent: str, payload: Any, *, timeout_s: float | None = None, **wishes: Any) -> Any:
        return await asyncio.to_thread(self.ask, agent, payload, timeout_s=timeout_s, **wishes)

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
        """Give every task to `handler`, until SIGTERM, SIGINT or `stop()`.

        What it returns is the decision; what it raises is the failure. It may be an async function. It runs
        in a thread of its own, with heartbeats beside it.

        Idle, it waits at the harness. With a `nudge_port` it waits at home instead: for `POST /task` there,
        and for `poll_every_s`. When the end is asked for, nothing more is taken; what is held has `grace_s`
        to finish and is then given back. With `until_empty` it ends when there is nothing to take. A handler
        that raises `StopWork` ends it, too. `on_end` is called after each task, in the handler's thread.
        """
        if not callable(handler):
            raise InvalidArgument(f"handler must be a function that takes a task, not {handler!r}")
        if _count("concurrency", concurrency, least=1) > CONCURRENCY_MAX:
            raise InvalidArgument(f"concurrency must be from 1 to {CONCURRENCY_MAX}, not {concurrency!r}")
        _positive("lease_s", lease_s)
        _seconds("grace_s", grace_s)
        if nudge_port is not None and _count("nudge_port", nudge_port) > PORT_MAX:
            raise InvalidArgument(f"nudge_port must be from 0 to {PORT_MAX}, not {nudge_port!r}")
        shift = _Shift(self, handler, concurrency, lease_s, grace_s, until_empty, on_end)
        self._shifts.add(shift)
        try:
            shift.run(None if nudge_port is None else (nudge_host, nudge_port))
        finally:
            self._shifts.discard(shift)

    def stop(self) -> None:
        """End every `work` of this client, as SIGTERM does. From any thread."""
        for shift in list(self._shifts):
            shift.words.put("stop")

    # ---- calling -------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float | None = None,
        retries: int | None = None,
    ) -> Any:
        """One call of the protocol: its answer, decoded, or None when that is empty.

        Repeated with growing, random pauses while nobody answers: for words that may be said twice.
        """
        data = None if body is None else _json("the request", body)
        longest_s = self.timeout_s if timeout_s is None else _positive("timeout_s", timeout_s)
        call = _Call(method, path, data, self._headers, longest_s)
        return self._call(call, self.retries if retries is None else retries)

    def _call(self, call: "_Call", retries: int) -> Any:
        for attempt in itertools.count():
            try:
                return self._connections.ask(call)
            except Unreachable as error:
                if attempt >= retries or call.broken_off:
                    raise
                time.sleep(_pause_s(attempt, error.retry_after_s))
        raise AssertionError("unreachable")  # pragma: no cover - the loop has no end

    # ---- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every connection. The client can be used again; it opens them anew."""
        self.stop()
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Beats:
    """The heartbeats of one lease. They are sent until it is over."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.last_word_sent = False
        """Set before the last word leaves, and cleared when the harness refuses it."""


def _unconfirmed(beats: _Beats) -> str:
    if beats.last_word_sent:
        return "has a last word that nobody confirmed in time: whether it arrived is not known"
    return "is lost: nobody confirmed its lease in time"


def _pause_s(attempt: int, retry_after_s: float) -> float:
    """Random, so that a hundred agents do not come back in the same moment."""
    longest_s = min(PAUSE_S_MAX, FIRST_PAUSE_S * 2**attempt)
    return min(retry_after_s, RETRY_AFTER_S_MAX) + random.uniform(0.0, longest_s)  # noqa: S311 - not a secret


def _json(what: str, value: Any) -> bytes:
    try:
        data = _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{what} cannot be written as JSON: {_unencodable(error)}") from None
    # The encoder writes null for a number that is infinite or none.
    if data.find(b"null") >= 0 and not _is_finite(msgspec.to_builtins(value)):
        raise InvalidArgument(f"{what} holds a number that is infinite or none, which JSON cannot hold")
    return data


def _is_finite(value: Any) -> bool:
    """Whether every number in it is one."""
    level = [value]
    while level:
        if any(isinstance(each, float) and not math.isfinite(each) for each in level):
            return False
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return True


def _unencodable(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or holds itself"
    if isinstance(error, UnicodeEncodeError):
        return "it holds lone surrogates, which are not Unicode text"
    if str(error).startswith("Only dicts with"):
        return "it holds a dict with a key that is no text"
    kind = str(error).removeprefix("Encoding objects of type ").removesuffix(" is unsupported")
    return str(error) if kind == str(error) else f"it holds a value of type {kind}"


def _task_path(task_id: str) -> str:
    return f"/tasks/{urllib.parse.quote(_text('task_id', task_id), safe='')}"


def _text(name: str, value: str) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} must be a text, not {value!r}")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidArgument(f"{name} holds lone surrogates, which are not Unicode text")
    return value


def _count(name: str, number: int, *, least: int = 0) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise InvalidArgument(f"{name} must be a whole number, {least} or more, not {number!r}")
    return number


def _seconds(name: str, seconds: float) -> float:
    if not _is_number(seconds) or not 0 <= seconds < float("inf"):
        raise InvalidArgument(f"{name} must be a number of seconds, 0 or more, not {seconds!r}")
    return seconds


def _positive(name: str, seconds: float) -> float:
    if not _is_number(seconds) or not 0 < seconds < float("inf"):
        raise InvalidArgument(f"{name} must be a number of seconds above 0, not {seconds!r}")
    return seconds


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _header_text(token: str) -> str:
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or not token:
        raise InvalidArgument("token must be printable ASCII")  # and is not shown
    return token


# ---- connections -------------------------------------------------------------------------------


class _Connections:
    """Connections to one server, kept alive: as many as there are calls at the same time."""

    def __init__(self, url: str) -> None:
        parts, self._host, self._port = _address(url)
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._prefix = parts.path.rstrip("/")
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._age = (os.getpid(), 0)
        """Changes with every close and every fork; a connection of another age is not kept."""

    def ask(self, call: _Call) -> Any:
        """One exchange: the answer, or what it means."""
        try:
            status, headers, text = self._exchanged(call)
        except TimeoutError:
            raise Unreachable(f"{self.url} did not answer within {call.timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"cannot reach {self.url}: {_reason(error)}") from error
        if status >= _OK_BELOW:
            raise _refusal(status, headers, text)
        try:
            return _decode(text) if text else None
        except msgspec.DecodeError as error:
            raise Refused(f"the answer of {self.url} is not JSON: {error}", status) from None

    def _exchanged(self, call: _Call) -> _Answer:
        """A kept connection that the other side closed meanwhile is replaced without a word."""
        kept = self._take()
        if kept is not None:
            try:
                return self._exchange(kept, call)
            except (ConnectionError, http.client.BadStatusLine):
                if call.broken_off:
                    raise
            self.close()  # the others are no younger
        return self._exchange(self._kind(self._host, self._port, timeout=call.timeout_s), call)

    def _exchange(self, connection: http.client.HTTPConnection, call: _Call) -> _Answer:
        age = self._age
        try:
            if connection.sock is not None:
                connection.sock.settimeout(call.timeout_s)
            connection.request(call.method, self._prefix + call.path, call.body, call.headers)
            with contextlib.nullcontext() if call.waits is None else call.waits.listed(connection):
                response = connection.getresponse()
            text = self._whole(response)
        except BaseException:
            connection.close()
            raise
        full = len(self._idle) >= IDLE_CONNECTIONS_MAX
        if response.will_close or call.broken_off or age != self._age or full:
            connection.close()
        else:
            self._idle.append(connection)
        return response.status, response.headers, text

    def _whole(self, response: http.client.HTTPResponse) -> bytes:
        if (response.length or 0) > ANSWER_BYTES_MAX:
            raise Refused(f"the answer of {self.url} is longer than {ANSWER_BYTES_MAX} bytes")
        return response.read()

    def _take(self) -> http.client.HTTPConnection | None:
        if self._age[0] != os.getpid():
            self.close()  # they are the parent's; closing our copy does not end them
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def close(self) -> None:
        self._age = (os.getpid(), self._age[1] + 1)
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()


def _address(url: str) -> tuple[urllib.parse.SplitResult, str, int | None]:
    """The parts of a harness's address, its host and its port."""
    wrong = InvalidArgument("url must be the address of a harness, such as http://127.0.0.1:8800")
    try:
        parts = urllib.parse.urlsplit(_text("url", url))
        port = parts.port
    except InvalidArgument:
        raise
    except ValueError:  # such as a port that is no number
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise wrong
    return parts, parts.hostname, port


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _refusal(status: int, headers: http.client.HTTPMessage, text: bytes) -> TaskClientError:
    try:
        said = msgspec.json.decode(text, type=_ErrorAnswer)
    except msgspec.DecodeError:
        said = _ErrorAnswer()
    message = said.message or f"the harness answered with status {status}"
    if status == _TOO_MANY or status >= _SERVER_FAULT:
        return Unreachable(message, _retry_after_s(headers.get("Retry-After", "")))
    kind = _BY_STATUS.get(status) or _BY_NAME.get(said.error, Refused)
    return kind(message, status)


def _retry_after_s(text: str) -> float:
    try:
        return max(0.0, min(float(text), RETRY_AFTER_S_MAX))
    except ValueError:
        return 0.0


# ---- a worker's loop ---------------------------------------------------------------------------


class _Wakes:
    """Counts nudges, so that one that comes between a look and a wait is not missed."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def ring(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def wait_past(self, seen: int, timeout_s: float) -> bool:
        """Wait for a ring after the one that was seen; whether there was one."""
        with self._changed:
            return self._changed.wait_for(lambda: self.count != seen, timeout_s)


class _LastWord(NamedTuple):
    """What is to be said about a task, and what that means."""

    say: Callable[[], None]
    outcome: str
    error: str = ""


class _Shift:
    """One call of `TaskClient.work`.

    Each slot is a thread that takes a task, handles it, says its last word, and takes the next. The thread
    that called `work` only waits for words: "stop" of a signal, "ended" of a slot.
    """

    def __init__(
        self,
        client: TaskClient,
        handler: Callable[[Task], Any],
        slots: int,
        lease_s: float,
        grace_s: float,
        until_empty: bool,
        on_end: Callable[[TaskEnd], None] | None,
    ) -> None:
        self._client = client
        self._on_end = on_end
        self._handler = handler
        self._slots = slots
        self._lease_s = lease_s
        self._grace_s = grace_s
        self._until_empty = until_empty
        self._nudged = False
        self._wakes = _Wakes()
        self._waits = _Waits()
        self._stopping = threading.Event()
        self._held: dict[int, Task] = {}  # by lease
        self._failure: BaseException | None = None
        self.words: queue.SimpleQueue[str] = queue.SimpleQueue()
        """A signal handler may put into this kind of queue at any moment; it may set no event."""

    def run(self, nudge_address: tuple[str, int] | None) -> None:
        self._nudged = nudge_address is not None
        with _nudge_endpoint(nudge_address, self._wakes), self._signals():
            for number in range(self._slots):
                threading.Thread(target=self._slot, name=f"slot-{number}", daemon=True).start()
            running = self._slots - self._ended_before_stop()
            self._stopping.set()
            self._wakes.ring()
            self._waits.break_off()
            self._let_finish(running)
        self._release_held()
        if self._failure is not None:
            raise self._failure

    # ---- in the thread that called work --------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal handler's signature
            self.words.put("stop")

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

    def _ended_before_stop(self) -> int:
        """Wait for the end; how many slots have come to theirs by then."""
        for ended in itertools.count():
            if ended == self._slots or self.words.get() == "stop":
                return ended
        raise AssertionError  # pragma: no cover - the loop has no end

    def _let_finish(self, running: int) -> None:
        """What is held has the grace to finish. Whoever says stop once more does not want to wait."""
        deadline = time.monotonic() + self._grace_s
        with contextlib.suppress(queue.Empty):
            while running and self.words.get(timeout=max(0.0, deadline - time.monotonic())) != "stop":
                running -= 1

    def _release_held(self) -> None:
        """First given back, then told: a handler that gives up in between would count as a failure."""
        for task in list(self._held.values()):
            self._give_back(task)
            task.lost.set()

    # ---- in a slot -----------------------------------------------------------------------------

    def _slot(self) -> None:
        try:
            while not self._stopping.is_set() and self._turn():
                pass
        except BaseException as error:  # noqa: BLE001 - it is raised by the thread that called work
            self._failure = error
            self.words.put("stop")
        finally:
            self.words.put("ended")

    def _turn(self) -> bool:
        """Handle one task, or wait for one; whether to go on."""
        seen = self._wakes.count
        interval_s = self._client.poll_every_s
        if not self._nudged:
            interval_s = min(interval_s, WAIT_AT_WORK_S_MAX)
        until = time.monotonic() + interval_s
        task = self._take(0.0 if self._nudged or self._until_empty else interval_s)
        if task is not None:
            self._handle(task)
            return True
        if not self._until_empty:
            self._wakes.wait_past(seen, max(0.0, until - time.monotonic()))
        return not self._until_empty

    def _take(self, wait_s: float) -> Task | None:
        try:
            tasks = self._client._next(1, wait_s, self._lease_s, self._waits)  # noqa: SLF001 - of one module
        except Unreachable as error:
            if self._until_empty:
                raise
            if self._waits.over:
                return None
            _log.warning("%s; trying again", error)
            return None
        if tasks and self._stopping.is_set():
            self._give_back(tasks[0])
            return None
        return tasks[0] if tasks else None

    def _give_back(self, task: Task) -> None:
        try:
            self._client.release_task(task)
        except TaskClientError as error:  # then its lease runs out
            _log.warning("could not give task %s back: %s", task.task_id, error)

    def _handle(self, task: Task) -> None:
        self._held[task.lease] = task
        begun = time.monotonic()
        try:
            with self._client.kept_alive(task):
                word = self._last_word(task)
                outcome = word.outcome if self._say(task, word.say) else "lost"
        except BaseException:
            self._report(TaskEnd(task, "released", time.monotonic() - begun))
            raise
        finally:
            self._held.pop(task.lease, None)
        self._report(TaskEnd(task, outcome, time.monotonic() - begun, word.error))

    def _report(self, end: TaskEnd) -> None:
        if self._on_end is not None:
            self._on_end(end)

    def _last_word(self, task: Task) -> "_LastWord":
        """Run the handler; what is to be said about it."""
        try:
            decision = self._handler(task)
            if inspect.iscoroutine(decision):
                decision = asyncio.run(decision)
        except TaskFailed as failure:
            error, retry_in_s = str(failure)[:ERROR_CHARS_MAX], failure.retry_in_s
            return _LastWord(lambda: self._client.fail_task(task, error, retry_in_s), "failed", error)
        except StopWork:
            self._give_back(task)
            raise
        except Exception as failure:  # noqa: BLE001 - whatever it is, it is the task's failure and not ours
            error = f"{type(failure).__name__}: {failure}"[:ERROR_CHARS_MAX]
            return _LastWord(lambda: self._client.fail_task(task, error), "failed", error)
        except BaseException:
            self._give_back(task)
            raise
        return _LastWord(lambda: self._client.complete_task(task, decision), "completed")

    def _say(self, task: Task, word: Callable[[], None]) -> bool:
        """Whether the last word was accepted. It is repeated while its lease can be shown."""
        while True:
            try:
                word()
            except NotAllowed:
                raise
            except (StaleLease, UnknownTask, WrongState) as error:
                _log.warning("task %s went to somebody else: %s", task.task_id, error)
                return False
            except Refused as error:
                word = partial(self._fail_quietly, task, str(error))  # such as a decision that is no JSON
            except Unreachable as error:
                _log.warning("task %s waits with its last word: %s", task.task_id, error)
                if task.lost.wait(PAUSE_S_MAX):
                    return False
            else:
                return True

    def _fail_quietly(self, task: Task, reason: str) -> None:
        try:
            self._client.fail_task(task, reason[:ERROR_CHARS_MAX])
        except Refused as error:
            _log.warning("task %s: %s", task.task_id, error)


# ---- the nudge endpoint ------------------------------------------------------------------------


class _NudgeServer(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 4 * NUDGES_AT_ONCE_MAX

    def __init__(self, address: tuple[str, int], wakes: _Wakes) -> None:
        self.wakes = wakes
        self._room = threading.BoundedSemaphore(NUDGES_AT_ONCE_MAX)
        super().__init__(address, _Nudge)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer would ask the name service who we are
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)  # a nudge may be lost
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that goes away or speaks no HTTP is its own problem."""


class _Nudge(BaseHTTPRequestHandler):
    server: _NudgeServer
    timeout = NUDGE_READ_S

    def do_POST(self) -> None:
        if self.path != "/task":
            return self._reply(404)
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > NUDGE_BODY_BYTES_MAX:
            return self._reply(413)
        self.rfile.read(int(length))  # says which task; the queue says it better
        self.server.wakes.ring()
        return self._reply(202)

    def do_GET(self) -> None:
        self._reply(200 if self.path == "/health" else 404)

    def _reply(self, status: int) -> None:
        body = b'{"status":"ok"}' if status < _OK_BELOW else b'{"status":"refused"}'
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Nothing: what is worth a line is what comes out of the queue."""


@contextlib.contextmanager
def _nudge_endpoint(address: tuple[str, int] | None, wakes: _Wakes) -> Iterator[None]:
    if address is None:
        yield
        return
    with _NudgeServer(address, wakes) as server:
        threading.Thread(target=server.serve_forever, args=(0.1,), name="nudges", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
