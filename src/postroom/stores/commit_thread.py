"""One thread that commits for all coroutines of a process. Work that waits together shares a commit."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from postroom.errors import HandleDead
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction
from postroom.system.handles import reset_after_fork
from postroom.system.log import library_log

T = TypeVar("T")

_log = library_log("postroom.engine")

COMMIT_MAX = 256  # calls that share one commit
READS_AT_ONCE = 4
CLOSE_TIMEOUT_S = 10.0


class _Waiting(NamedTuple):
    work: Callable[[Transaction], Any]
    makes_room: bool
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"


class CommitThread:
    """Runs the work of coroutines in a thread. Any number of event loops may use it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._start()
        reset_after_fork(self)

    def _start(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._readers = self._new_readers()

    @staticmethod
    def _new_readers() -> ThreadPoolExecutor:
        """Threads only for reads: blocking calls of the program may fill the default pool of its loop."""
        return ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="postroom-reads")

    def after_fork(self) -> None:
        """A child has no thread."""
        self._start()

    async def write(self, work: Callable[[Transaction], T], *, makes_room: bool = False) -> T:
        """Run `work` in a transaction, and return once it is committed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._waiting.put(_Waiting(work, makes_room, loop, future))
        if self._thread is None:
            self._begin()
        return await future

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

    def _begin(self) -> None:
        with self._mutex:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="postroom-commits", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Commit what waits, then end the thread. The next write starts another one."""
        with self._mutex:
            thread, self._thread = self._thread, None
            readers, self._readers = self._readers, self._new_readers()
        readers.shutdown(wait=False)
        if thread is not None:
            self._waiting.put(None)
            thread.join(CLOSE_TIMEOUT_S)

    # ---- in the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        waiting = self._waiting
        while (first := waiting.get()) is not None:
            group = [first]
            ends = False
            with suppress(queue.Empty):
                while len(group) < COMMIT_MAX and not ends:
                    one = waiting.get_nowait()
                    if one is None:
                        ends = True
                    else:
                        group.append(one)
            self._commit(group)
            if ends:
                return

    def _commit(self, group: list[_Waiting]) -> None:
        for makes_room in (True, False):  # work that makes room is committed first, and alone
            works = [one for one in group if one.makes_room is makes_room]
            if works:
                _answer(works, self._outcomes([one.work for one in works], makes_room=makes_room))

    def _outcomes(self, works: list[Callable[[Transaction], Any]], *, makes_room: bool) -> list[Any]:
        try:
            outcomes = self._store.write_many(works, makes_room=makes_room)
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


def _answer(works: list[_Waiting], outcomes: list[Any]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for one, outcome in zip(works, outcomes, strict=True):
        by_loop.setdefault(one.loop, []).append((one.future, outcome))
    for loop, answers in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_resolve, answers)


def _resolve(answers: list[tuple["asyncio.Future[Any]", Any]]) -> None:
    for future, outcome in answers:
        if future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
