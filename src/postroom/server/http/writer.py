"""One thread that writes for all requests: the calls that wait when it is free go into one commit.

The event loop hands over all calls of one of its rounds together, and gets all outcomes of a commit together.
Handing over each call alone would cost far more, because the two threads would switch at every step.

Rule 1: when more calls wait than fit into one commit, they have turns, one call at a time.
Rule 2: who has a call that does not fit into a commit has the first turn in the next one.
Rule 3: a token has a share of the waiting calls and of their bytes, and so has an organization. Operators
        have a reserve.
"""

import asyncio
import queue
import threading
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from postroom.calls.fields import CLAIM_MAX
from postroom.contracts.tasks.task_operations import LeasedTask, TaskCall
from postroom.contracts.tasks.tasks import Tasks
from postroom.core.formats.jsoninput import raw_value
from postroom.errors import HandleDead, Unavailable
from postroom.server.access.registry import Identity
from postroom.server.access.shares import Shares
from postroom.server.access.turns import Owner, Turns, owner_of
from postroom.stores.transaction import Claim

TASK_BYTES = 1_024  # counted per task besides the bytes of its call, for work and memory
TURN_MAX = 256  # calls in one commit
TURN_BYTES_MAX = 4 * 1024 * 1024  # bytes in one commit; a larger call has a commit of its own
WAITING_MAX = 10_000
WAITING_A_TOKEN_MAX = 1_000
WAITING_RESERVE = 1_000
WAITING_BYTES_MAX = 512 * 1024 * 1024
WAITING_BYTES_A_TOKEN_MAX = 64 * 1024 * 1024
WAITING_BYTES_RESERVE = 128 * 1024 * 1024
CLOSE_TIMEOUT_S = 10.0


class _Submission(msgspec.Struct, frozen=True):
    """A call or claim of one request."""

    call: TaskCall | Claim
    makes_room: bool
    future: "asyncio.Future[Any]"
    identity: Identity
    size: int
    """Bytes counted in the share of its token."""
    work: int
    """Bytes counted in a commit."""


class _Job(msgspec.Struct, frozen=True):
    """One call of a commit. Claims of several requests on equal terms are merged into one.

    Their payloads stay JSON, because the requests pass them on.
    """

    call: TaskCall
    submissions: tuple[_Submission, ...]
    limits: tuple[int, ...] = ()
    """For a claim: how many of the tasks each submission gets at most; else empty."""


class StoreWriter:
    """Runs calls on `tasks` in a thread, many in one commit, and resolves futures in the event loop."""

    def __init__(self, tasks: Tasks, loop: asyncio.AbstractEventLoop) -> None:
        self._tasks = tasks
        self._loop = loop
        self._round: list[_Submission] = []
        self._calls = Shares("calls that wait", WAITING_MAX, WAITING_A_TOKEN_MAX, WAITING_RESERVE)
        self._bytes = Shares(
            "bytes of calls that wait", WAITING_BYTES_MAX, WAITING_BYTES_A_TOKEN_MAX, WAITING_BYTES_RESERVE
        )
        self._batches: queue.SimpleQueue[list[_Submission] | None] = queue.SimpleQueue()
        self._waiting: Turns[_Submission] = Turns()
        """Calls that did not fit into the last commit."""
        self._closing = False
        self._ended = False
        self.turns = 0
        """Commits made so far."""
        self._thread = threading.Thread(target=self._run, name="postroom-writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    # ---- in the event loop ---------------------------------------------------------------------

    def submit(
        self, call: TaskCall | Claim, identity: Identity, size: int = TASK_BYTES, *, makes_room: bool = False
    ) -> "asyncio.Future[Any]":
        """Return a future with the result of a call or claim, or its error, after the commit.

        `size` is the bytes counted in the caller's share. `makes_room` marks calls that must also succeed on
        a full disk.
        """
        if self._closing:
            raise Unavailable("the server is stopping: try again soon")
        self._take(identity, size)
        future = self._loop.create_future()
        if not self._round:
            self._loop.call_soon(self._hand_over)
        work = call.limit * TASK_BYTES if isinstance(call, Claim) else size
        self._round.append(_Submission(call, makes_room, future, identity, size, work))
        return future

    def _take(self, identity: Identity, size: int) -> None:
        self._calls.take(identity)
        try:
            self._bytes.take(identity, size)
        except Unavailable:
            self._calls.give_back(identity)
            raise

    def _hand_over(self) -> None:
        submissions, self._round = self._round, []
        self._batches.put(submissions)

    def _answer(self, answers: list[tuple[_Submission, Any]]) -> None:
        for submissions, answer in answers:
            self._calls.give_back(submissions.identity)
            self._bytes.give_back(submissions.identity, submissions.size)
            future = submissions.future
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def close(self) -> None:
        """Commit the waiting calls, then end the thread."""
        self._closing = True
        self._batches.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    # ---- in the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while submissions := self._gather():
            answers: list[tuple[_Submission, Any]] = []
            for makes_room in (True, False):  # calls that make room go first, in a commit of their own
                jobs = _jobs(
                    [submission for submission in submissions if submission.makes_room is makes_room]
                )
                if jobs:
                    outcomes = self._commit([job.call for job in jobs], makes_room=makes_room)
                    for job, outcome in zip(jobs, outcomes, strict=True):
                        if job.limits:
                            answers += zip(job.submissions, _shares(job, outcome), strict=True)
                        else:
                            answers.append((job.submissions[0], outcome))
            self.turns += 1
            with suppress(RuntimeError):  # the loop is closed, and no request waits any more
                self._loop.call_soon_threadsafe(self._answer, answers)

    def _gather(self) -> list[_Submission]:
        """The calls of the next commit; empty when the writer is closed and no call waits."""
        submissions = self._drain()
        if (
            not self._waiting
            and len(submissions) <= TURN_MAX
            and sum(submission.work for submission in submissions) <= TURN_BYTES_MAX
        ):
            return submissions
        for submission in submissions:
            self._waiting.add(submission.identity, submission)
        return self._group()

    def _drain(self) -> list[_Submission]:
        """The calls handed over since the last commit. Waits for one when no other call is left."""
        submissions: list[_Submission] = []
        with suppress(queue.Empty):
            while not self._ended:
                batch = self._batches.get(block=not (submissions or self._waiting))
                if batch is None:
                    self._ended = True
                else:
                    submissions += batch
        return submissions

    def _group(self) -> list[_Submission]:
        """As many calls as fit into one commit. Whose call does not fit keeps its turn for the next one."""
        group: list[_Submission] = []
        left = TURN_BYTES_MAX
        unfit: set[Owner] = set()

        def fits(submission: _Submission) -> bool:
            owner = owner_of(submission.identity)
            if group and submission.work > left:
                unfit.add(owner)
            return owner not in unfit

        while len(group) < TURN_MAX and (fitting := self._waiting.take(fits, unfit)) is not None:
            group.append(fitting)
            left -= fitting.work
        return group

    def _commit(self, calls: list[TaskCall], *, makes_room: bool) -> list[Any]:
        try:
            outcomes = self._tasks.run_many(calls, makes_room=makes_room)
        except Exception as error:  # noqa: BLE001 - every caller gets the error
            outcomes = [error] * len(calls)
        if any(isinstance(outcome, HandleDead) for outcome in outcomes):
            self._tasks.reopen()  # the callers get the error, and can try again
        return outcomes


def _jobs(submissions: list[_Submission]) -> list[_Job]:
    """Calls in their order, then claims, merged where their terms are equal."""
    jobs: list[_Job] = []
    claims: dict[Claim, list[_Submission]] = {}
    for submission in submissions:
        if isinstance(submission.call, Claim):
            claims.setdefault(replace(submission.call, limit=0), []).append(submission)
        else:
            jobs.append(_Job(submission.call, (submission,)))
    for terms, alike in claims.items():
        jobs += _claims(terms, alike)
    return jobs


def _claims(terms: Claim, submissions: list[_Submission]) -> list[_Job]:
    """Merge claims on equal terms into as few as `CLAIM_MAX` allows."""
    jobs: list[_Job] = []
    alike: list[_Submission] = []
    limits: list[int] = []
    for submission in submissions:
        assert isinstance(submission.call, Claim)  # noqa: S101 - for the type checker
        if limits and sum(limits) + submission.call.limit > CLAIM_MAX:
            jobs.append(_claim(terms, alike, limits))
            alike, limits = [], []
        alike.append(submission)
        limits.append(submission.call.limit)
    jobs.append(_claim(terms, alike, limits))
    return jobs


def _claim(terms: Claim, submissions: list[_Submission], limits: list[int]) -> _Job:
    together = replace(terms, limit=sum(limits))
    return _Job(lambda operations: operations.claim(together, raw_value), tuple(submissions), tuple(limits))


def _shares(job: _Job, outcome: Any) -> list[Any]:
    """Divide claimed tasks among the submissions, the first one first."""
    if isinstance(outcome, Exception):
        return [outcome] * len(job.submissions)
    tasks: list[LeasedTask] = outcome
    shares = []
    for limit in job.limits:
        shares.append(tasks[:limit])
        tasks = tasks[limit:]
    return shares
