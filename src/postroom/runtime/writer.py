"""One thread that writes for all requests: what waits when its turn comes goes into one commit.

The event loop hands over what one of its rounds brought in one piece, and gets all answers in one piece.
Between the two, one thread works while the other waits: two that take turns at every step cost far more.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from postroom.contracts.tasks import Task, Tasks
from postroom.errors import HandleDead, PostroomError, Unavailable
from postroom.stores.base import CLAIM_MAX, Claim

TURN_MAX = 256  # calls in one commit
WAITING_MAX = 10_000
CLOSE_TIMEOUT_S = 10.0

Call = Callable[[Tasks], Any]


class _Job(msgspec.Struct, frozen=True):
    """A call and who waits for what it gives. The claims of many who ask alike are one call."""

    call: Call
    futures: "tuple[asyncio.Future[Any], ...]"
    limits: tuple[int, ...] = ()
    """How many of the claimed tasks each of those who wait wants; empty when it is no claim."""


class _Asked(msgspec.Struct, frozen=True):
    """One request's wish, as it came."""

    wish: Call | Claim
    makes_room: bool
    future: "asyncio.Future[Any]"


class Writer:
    """Runs calls on `tasks` in a thread, many in one commit, and answers in the event loop."""

    def __init__(self, tasks: Tasks, loop: asyncio.AbstractEventLoop) -> None:
        self._tasks = tasks
        self._loop = loop
        self._asked: list[_Asked] = []
        self._waiting = 0
        self._handed: queue.SimpleQueue[list[_Asked] | None] = queue.SimpleQueue()
        self._closing = False
        self.turns = 0
        self._thread = threading.Thread(target=self._run, name="postroom-writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether anybody's work is done."""
        return self._thread.is_alive()

    # ---- in the event loop ---------------------------------------------------------------------

    def submit(self, wish: Call | Claim, *, makes_room: bool = False) -> "asyncio.Future[Any]":
        """What a call or claim gives, or the error it raised, once it is committed.

        `makes_room` marks what must also work on a full disk.
        """
        if self._closing or self._waiting >= WAITING_MAX:
            raise Unavailable("too many requests wait for the store: try again soon")
        future = self._loop.create_future()
        if not self._asked:
            self._loop.call_soon(self._hand_over)
        self._asked.append(_Asked(wish, makes_room, future))
        self._waiting += 1
        return future

    def _hand_over(self) -> None:
        asked, self._asked = self._asked, []
        for start in range(0, len(asked), TURN_MAX):
            self._handed.put(asked[start : start + TURN_MAX])

    def _answer(self, answers: list[tuple["asyncio.Future[Any]", Any]]) -> None:
        self._waiting -= len(answers)
        for future, answer in answers:
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
        ended = False
        while not ended:
            asked, ended = self._gather()
            answers: list[tuple[asyncio.Future[Any], Any]] = []
            for makes_room in (True, False):  # what makes room goes first, and not with what needs room
                jobs = _jobs([one for one in asked if one.makes_room is makes_room])
                if jobs:
                    outcomes = self._commit([job.call for job in jobs], makes_room=makes_room)
                    for job, outcome in zip(jobs, outcomes, strict=True):
                        if job.limits:
                            answers += zip(job.futures, _shares(job, outcome), strict=True)
                        else:
                            answers.append((job.futures[0], outcome))
            self.turns += 1
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._answer, answers)

    def _gather(self) -> tuple[list[_Asked], bool]:
        """What waits; and whether it was the last."""
        asked: list[_Asked] = []
        handed = self._handed.get()
        while handed is not None:
            asked += handed
            if len(asked) >= TURN_MAX:
                return asked, False
            try:
                handed = self._handed.get_nowait()
            except queue.Empty:
                return asked, False
        return asked, True

    def _commit(self, calls: list[Call], *, makes_room: bool) -> list[Any]:
        try:
            return self._tasks.run_many(calls, makes_room=makes_room)
        except HandleDead as error:  # those who wait are told to try again, and find it open
            self._tasks.reopen()
            return [error] * len(calls)
        except PostroomError as error:
            return [error] * len(calls)
        except Exception as error:  # noqa: BLE001 - a defect in one call, which the others must not suffer from
            if len(calls) == 1:
                return [error]
            return [self._commit([call], makes_room=makes_room)[0] for call in calls]


def _jobs(asked: list[_Asked]) -> list[_Job]:
    """Calls as they came, and claims on equal terms put together."""
    jobs: list[_Job] = []
    claims: dict[Claim, list[_Asked]] = {}
    for one in asked:
        if isinstance(one.wish, Claim):
            claims.setdefault(replace(one.wish, limit=0), []).append(one)
        else:
            jobs.append(_Job(one.wish, (one.future,)))
    for terms, alike in claims.items():
        jobs += _claims(terms, alike)
    return jobs


def _claims(terms: Claim, asked: list[_Asked]) -> list[_Job]:
    """As few claims as hold what all of those who ask alike want."""
    jobs: list[_Job] = []
    futures: list[asyncio.Future[Any]] = []
    limits: list[int] = []
    for one in asked:
        assert isinstance(one.wish, Claim)  # noqa: S101 - for the type checker: they were sorted by it
        if limits and sum(limits) + one.wish.limit > CLAIM_MAX:
            jobs.append(_claim(terms, futures, limits))
            futures, limits = [], []
        futures.append(one.future)
        limits.append(one.wish.limit)
    jobs.append(_claim(terms, futures, limits))
    return jobs


def _claim(terms: Claim, futures: list["asyncio.Future[Any]"], limits: list[int]) -> _Job:
    together = replace(terms, limit=sum(limits))
    return _Job(lambda tasks: tasks.claim_now(together), tuple(futures), tuple(limits))


def _shares(job: _Job, outcome: Any) -> list[Any]:
    """What each of those who wait gets: who asked first is served first."""
    if isinstance(outcome, Exception):
        return [outcome] * len(job.futures)
    tasks: list[Task] = outcome
    shares = []
    for limit in job.limits:
        shares.append(tasks[:limit])
        tasks = tasks[limit:]
    return shares
