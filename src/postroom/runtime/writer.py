"""One thread that writes for all requests: what waits when its turn comes goes into one commit.

The event loop hands over what one of its rounds brought in one piece, and gets all answers in one piece.
Between the two, one thread works while the other waits: two that take turns at every step cost far more.

Rule 1: when more waits than one commit takes, the tokens take turns: one call of each, then the next of each.
Rule 2: a call that does not fit into a commit goes first into the next one.
Rule 3: one token has a share of the calls that wait and of their bytes. Operators have a reserve.
"""

import asyncio
import queue
import threading
from collections import OrderedDict, deque
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from postroom.contracts.task_operations import Task, TaskCall
from postroom.contracts.tasks import Tasks
from postroom.errors import HandleDead, Unavailable
from postroom.runtime.agents import Identity
from postroom.runtime.shares import Shares
from postroom.stores.base import CLAIM_MAX
from postroom.stores.transaction import Claim

TASK_BYTES = 1_024  # what a task counts besides the bytes of its call: the work and the memory for it
TURN_MAX = 256  # calls in one commit
TURN_BYTES_MAX = 4 * 1024 * 1024  # the same in bytes; a larger call has a commit of its own
WAITING_MAX = 10_000
WAITING_A_TOKEN_MAX = 1_000
WAITING_RESERVE = 1_000
WAITING_BYTES_MAX = 512 * 1024 * 1024
WAITING_BYTES_A_TOKEN_MAX = 64 * 1024 * 1024
WAITING_BYTES_RESERVE = 128 * 1024 * 1024
CLOSE_TIMEOUT_S = 10.0


class _Submission(msgspec.Struct, frozen=True):
    """One request's wish, as it came."""

    wish: TaskCall | Claim
    makes_room: bool
    future: "asyncio.Future[Any]"
    identity: Identity
    size: int
    """What it counts in the share of its token, in bytes."""
    work: int
    """What it counts in a commit, in bytes."""


class _Job(msgspec.Struct, frozen=True):
    """A call and who waits for what it gives. The claims of many who ask alike are one call."""

    call: TaskCall
    asked: tuple[_Submission, ...]
    limits: tuple[int, ...] = ()
    """How many of the claimed tasks each of those who wait wants; empty when it is no claim."""


class StoreWriter:
    """Runs calls on `tasks` in a thread, many in one commit, and answers in the event loop."""

    def __init__(self, tasks: Tasks, loop: asyncio.AbstractEventLoop) -> None:
        self._tasks = tasks
        self._loop = loop
        self._asked: list[_Submission] = []
        self._calls = Shares("calls that wait", WAITING_MAX, WAITING_A_TOKEN_MAX, WAITING_RESERVE)
        self._bytes = Shares(
            "bytes of calls that wait", WAITING_BYTES_MAX, WAITING_BYTES_A_TOKEN_MAX, WAITING_BYTES_RESERVE
        )
        self._handed: queue.SimpleQueue[list[_Submission] | None] = queue.SimpleQueue()
        self._lines: OrderedDict[str, deque[_Submission]] = OrderedDict()
        """What did not fit into the last commit, by token; the token whose turn is next comes first."""
        self._closing = False
        self._ended = False
        self.turns = 0
        self._thread = threading.Thread(target=self._run, name="postroom-writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether anybody's work is done."""
        return self._thread.is_alive()

    # ---- in the event loop ---------------------------------------------------------------------

    def submit(
        self, wish: TaskCall | Claim, identity: Identity, size: int = TASK_BYTES, *, makes_room: bool = False
    ) -> "asyncio.Future[Any]":
        """What a call or claim gives, or the error it raised, once it is committed.

        `size` is how many bytes it counts. `makes_room` marks what must also work on a full disk.
        """
        if self._closing:
            raise Unavailable("the server ends now: try again soon")
        self._take(identity, size)
        future = self._loop.create_future()
        if not self._asked:
            self._loop.call_soon(self._hand_over)
        work = wish.limit * TASK_BYTES if isinstance(wish, Claim) else size
        self._asked.append(_Submission(wish, makes_room, future, identity, size, work))
        return future

    def _take(self, identity: Identity, size: int) -> None:
        self._calls.take(identity)
        try:
            self._bytes.take(identity, size)
        except Unavailable:
            self._calls.give_back(identity)
            raise

    def _hand_over(self) -> None:
        asked, self._asked = self._asked, []
        self._handed.put(asked)

    def _answer(self, answers: list[tuple[_Submission, Any]]) -> None:
        for asked, answer in answers:
            self._calls.give_back(asked.identity)
            self._bytes.give_back(asked.identity, asked.size)
            future = asked.future
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def close(self) -> None:
        """Do what waits, then end."""
        self._closing = True
        self._handed.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    # ---- in the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while asked := self._gather():
            answers: list[tuple[_Submission, Any]] = []
            for makes_room in (True, False):  # what makes room goes first, and not with what needs room
                jobs = _jobs([one for one in asked if one.makes_room is makes_room])
                if jobs:
                    outcomes = self._commit([job.call for job in jobs], makes_room=makes_room)
                    for job, outcome in zip(jobs, outcomes, strict=True):
                        if job.limits:
                            answers += zip(job.asked, _shares(job, outcome), strict=True)
                        else:
                            answers.append((job.asked[0], outcome))
            self.turns += 1
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._answer, answers)

    def _gather(self) -> list[_Submission]:
        """What the next commit is made of; empty when the writer is closed and nothing waits."""
        asked = self._drain()
        if not self._lines and len(asked) <= TURN_MAX and sum(one.work for one in asked) <= TURN_BYTES_MAX:
            return asked
        for one in asked:
            self._lines.setdefault(one.identity.name, deque()).append(one)
        return self._group()

    def _drain(self) -> list[_Submission]:
        """What was handed over meanwhile. Waits for it when there is nothing else to do."""
        asked: list[_Submission] = []
        with suppress(queue.Empty):
            while not self._ended:
                handed = self._handed.get(block=not (asked or self._lines))
                if handed is None:
                    self._ended = True
                else:
                    asked += handed
        return asked

    def _group(self) -> list[_Submission]:
        """As many calls as fit into one commit: one of each token in turn."""
        group: list[_Submission] = []
        left = TURN_BYTES_MAX
        unfit: list[tuple[str, deque[_Submission]]] = []
        while self._lines and len(group) < TURN_MAX:
            name, line = self._lines.popitem(last=False)
            if group and line[0].work > left:
                unfit.append((name, line))
                continue
            group.append(line.popleft())
            left -= group[-1].work
            if line:
                self._lines[name] = line
        for name, line in reversed(unfit):
            self._lines[name] = line
            self._lines.move_to_end(name, last=False)
        return group

    def _commit(self, calls: list[TaskCall], *, makes_room: bool) -> list[Any]:
        try:
            outcomes = self._tasks.run_many(calls, makes_room=makes_room)
        except Exception as error:  # noqa: BLE001 - the clients get it
            outcomes = [error] * len(calls)
        if any(isinstance(outcome, HandleDead) for outcome in outcomes):
            self._tasks.reopen()  # the clients are told to try again, and find it open
        return outcomes


def _jobs(asked: list[_Submission]) -> list[_Job]:
    """Calls as they came, and claims on equal terms put together."""
    jobs: list[_Job] = []
    claims: dict[Claim, list[_Submission]] = {}
    for one in asked:
        if isinstance(one.wish, Claim):
            claims.setdefault(replace(one.wish, limit=0), []).append(one)
        else:
            jobs.append(_Job(one.wish, (one,)))
    for terms, alike in claims.items():
        jobs += _claims(terms, alike)
    return jobs


def _claims(terms: Claim, asked: list[_Submission]) -> list[_Job]:
    """As few claims as hold what all of those who ask alike want."""
    jobs: list[_Job] = []
    alike: list[_Submission] = []
    limits: list[int] = []
    for one in asked:
        assert isinstance(one.wish, Claim)  # noqa: S101 - for the type checker: they were sorted by it
        if limits and sum(limits) + one.wish.limit > CLAIM_MAX:
            jobs.append(_claim(terms, alike, limits))
            alike, limits = [], []
        alike.append(one)
        limits.append(one.wish.limit)
    jobs.append(_claim(terms, alike, limits))
    return jobs


def _claim(terms: Claim, asked: list[_Submission], limits: list[int]) -> _Job:
    together = replace(terms, limit=sum(limits))
    return _Job(lambda operations: operations.claim(together), tuple(asked), tuple(limits))


def _shares(job: _Job, outcome: Any) -> list[Any]:
    """What each of those who wait gets: who asked first is served first."""
    if isinstance(outcome, Exception):
        return [outcome] * len(job.asked)
    tasks: list[Task] = outcome
    shares = []
    for limit in job.limits:
        shares.append(tasks[:limit])
        tasks = tasks[limit:]
    return shares
