"""One thread that commits for all coroutines of a process. Work that waits together shares a commit.

An event loop hands over all work of one of its rounds together, and gets all outcomes of a commit together.
Handing over each work alone would cost far more, because the two threads would switch at every step.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from postroom.errors import HandleDead
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction
from postroom.system.handles import reset_after_fork
from postroom.system.log import library_log

T = TypeVar("T")
W = TypeVar("W")

_log = library_log("postroom.stores")

COMMIT_MAX = 256  # calls that share one commit
READS_AT_ONCE = 4
CLOSE_TIMEOUT_S = 10.0


class Submission(msgspec.Struct, Generic[W], frozen=True):
    """Work that waits for its commit, and the future with its outcome."""

    work: W
    makes_room: bool
    future: "asyncio.Future[Any]"


class Order(Protocol[W]):
    """Decides what goes into the next commit."""

    def take(self, arrived: list[Submission[W]]) -> tuple[list[Submission[W]], bool]:
        """The next commit, of the work that waited and has arrived, and whether some is left for another."""


class Arrival(Order[W]):
    """First come, first committed."""

    def __init__(self) -> None:
        self._waiting: list[Submission[W]] = []

    def take(self, arrived: list[Submission[W]]) -> tuple[list[Submission[W]], bool]:
        waiting = self._waiting + arrived
        self._waiting = waiting[COMMIT_MAX:]
        return waiting[:COMMIT_MAX], bool(self._waiting)


class CommitThread(Generic[W]):
    """Runs the work of coroutines in a thread. Any number of event loops may use it.

    `commit` runs works in one commit and returns the outcome of each. `answered` is called in the event loop
    with each work whose outcome is known, even when nobody waits for it any more.
    """

    def __init__(
        self,
        store: Store,
        commit: Callable[[list[W], bool], list[Any]],
        order: Callable[[], Order[W]] = Arrival,
        answered: Callable[[W], None] | None = None,
    ) -> None:
        self._store = store
        self._commit_works = commit
        self._order = order
        self._answered = answered
        self.after_fork()
        reset_after_fork(self)

    def after_fork(self) -> None:
        """A child has no thread."""
        self._mutex = threading.Lock()
        self._rounds: dict[asyncio.AbstractEventLoop, list[Submission[W]]] = {}
        self._batches: queue.SimpleQueue[list[Submission[W]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._readers = self._new_readers()

    @staticmethod
    def _new_readers() -> ThreadPoolExecutor:
        """Threads only for reads: blocking calls of the program may fill the default pool of its loop."""
        return ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="postroom-reads")

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, work: W, *, makes_room: bool = False) -> "asyncio.Future[Any]":
        """A future with the result of work, or its error, after the commit."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        this_round = self._rounds.get(loop)
        if this_round is None:
            this_round = self._rounds[loop] = []
            loop.call_soon(self._hand_over, loop)
        this_round.append(Submission(work, makes_room, future))
        return future

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        if this_round := self._rounds.pop(loop, None):
            self._batches.put(this_round)
            if self._thread is None:
                self.start()

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on one consistent committed state."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._store.read, work)

    async def control(self, work: Callable[[Transaction], T]) -> T:
        """As `write`, for the order of an operator, which also succeeds on a full disk."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, self._store.control, work)
        except HandleDead:
            self._reopen()
            raise

    def start(self) -> None:
        """Start the thread, which the first work does otherwise."""
        with self._mutex:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="postroom-commits", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Commit what waits, then end the thread. The next work starts another one."""
        with suppress(RuntimeError):  # called without an event loop
            self._hand_over(asyncio.get_running_loop())
        with self._mutex:
            thread, self._thread = self._thread, None
            readers, self._readers = self._readers, self._new_readers()
        readers.shutdown(wait=False)
        if thread is not None:
            self._batches.put(None)
            thread.join(CLOSE_TIMEOUT_S)

    # ---- in the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        order, is_left, ends = self._order(), False, False
        while is_left or not ends:
            arrived: list[Submission[W]] = []
            with suppress(queue.Empty):
                while not ends:
                    batch = self._batches.get(block=not (arrived or is_left))
                    ends = batch is None
                    arrived += batch or ()
            group, is_left = order.take(arrived)
            self._commit(group)

    def _commit(self, group: list[Submission[W]]) -> None:
        for makes_room in (True, False):  # work that makes room is committed first, and alone
            works = [one for one in group if one.makes_room is makes_room]
            if works:
                self._answer(works, self._outcomes([one.work for one in works], makes_room))

    def _outcomes(self, works: list[W], makes_room: bool) -> list[Any]:
        try:
            outcomes = self._commit_works(works, makes_room)
        except Exception as error:  # noqa: BLE001 - the callers get it
            outcomes = [error] * len(works)
        if any(isinstance(outcome, HandleDead) for outcome in outcomes):
            self._reopen()
        return outcomes

    def _reopen(self) -> None:
        """Use the store again after a disk error. An error must not end this thread: every write needs it."""
        try:
            self._store.reopen()
        except Exception as error:  # noqa: BLE001 - the next write gets its own error
            _log.warning("the store cannot be opened again: %s", error)

    def _answer(self, works: list[Submission[W]], outcomes: list[Any]) -> None:
        for loop in {one.future.get_loop() for one in works}:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._resolve, loop, works, outcomes)

    def _resolve(
        self, loop: asyncio.AbstractEventLoop, works: list[Submission[W]], outcomes: list[Any]
    ) -> None:
        answered = self._answered
        for one, outcome in zip(works, outcomes, strict=True):
            future = one.future
            if future.get_loop() is not loop:
                continue
            if answered is not None:
                answered(one.work)
            if future.done():
                continue
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
