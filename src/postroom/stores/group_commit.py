"""Group commit: the next commit takes all work that arrives during the current one.

Rule 1: one caller leads and commits for all. When it is done, a waiting caller leads the next group.
Rule 2: every caller gets the outcome of its own work: a result, its own error, or the error of the commit.
"""

import errno
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from postroom.stores.transaction import Transaction

T = TypeVar("T")

GROUP_MAX = 256  # callers whose work goes into one commit
LOOK_AGAIN_S = 0.05  # a waiting caller looks again after this time, in case a wake-up was lost


class Job(Generic[T]):
    """The work of one caller, and its outcome."""

    __slots__ = ("error", "finished", "makes_room", "result", "sealed", "wake", "work")

    def __init__(self, work: Callable[[Transaction], T], makes_room: bool) -> None:
        self.work = work
        self.makes_room = makes_room
        self.sealed = False
        """Whether its commit has begun: from then on the work must not run again."""
        self.finished = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.wake = threading.Lock()
        """Released to wake the caller; held otherwise."""
        self.wake.acquire()

    def run(self, transaction: Transaction, fatal: tuple[type[Exception], ...]) -> bool:
        """Do the work; False when it failed after a change. A `fatal` error ends the whole commit."""
        changes = transaction.changes
        self.error = None
        try:
            self.result = self.work(transaction)
        except fatal:
            raise
        except Exception as error:  # noqa: BLE001 - returned to its own caller
            self.error = error
            return transaction.changes == changes
        return True

    def finish(self, error: BaseException | None = None) -> None:
        """Give the caller its answer."""
        if not self.finished:
            self.error = error or self.error
            self.finished = True
        self.notify()

    def notify(self) -> None:
        """Wake the caller so that it looks at its job."""
        if self.wake.locked():
            with suppress(RuntimeError):  # another thread was faster
                self.wake.release()

    def outcome(self) -> T:
        """The result, or the error."""
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[no-any-return]


class GroupCommit:
    """Collects jobs and commits them in groups.

    `commit` runs jobs in one transaction. It returns False when one job failed after a change and the
    transaction was rolled back. That job is finished then, and each other job is committed alone.
    `interrupted` makes the error for a job whose commit may or may not have happened.
    """

    def __init__(
        self, commit: Callable[[list[Job[Any]]], bool], interrupted: Callable[[OSError], Exception]
    ) -> None:
        self._commit = commit
        self._interrupted = interrupted
        self.leading = threading.Lock()
        self.pending: deque[Job[Any]] = deque()

    def submit(self, job: Job[T]) -> T:
        """Wait until the job is committed or has failed, and return its result or raise its error."""
        self.pending.append(job)
        try:
            while not job.finished:
                if self.leading.locked():
                    job.wake.acquire(timeout=LOOK_AGAIN_S)
                    continue
                with self.leading:
                    if not job.finished:
                        self._lead()
                self.wake_next()
        finally:
            job.finished = True  # after an interrupt, no other thread may do the work
        return job.outcome()

    def wake_next(self) -> None:
        """Hand leadership to a waiting caller."""
        with suppress(IndexError):
            self.pending[0].notify()

    def _lead(self) -> None:
        jobs: list[Job[Any]] = []
        while self.pending and len(jobs) < GROUP_MAX:
            job = self.pending.popleft()
            if not job.finished:
                jobs.append(job)
        try:
            if not self._commit(jobs):
                for job in jobs:
                    if not job.finished:
                        self._commit([job])
        except Exception as error:  # noqa: BLE001 - each caller gets it
            for job in jobs:
                job.finish(error)
        except BaseException:
            self._give_back(jobs)
            raise

    def _give_back(self, jobs: list[Job[Any]]) -> None:
        """This thread was interrupted while leading: the other callers' work goes back to the queue."""
        self.pending.extendleft(job for job in reversed(jobs) if not job.sealed)
        interrupt = InterruptedError(errno.EINTR, "interrupted")
        for job in jobs:
            if job.sealed:
                job.finish(self._interrupted(interrupt))
