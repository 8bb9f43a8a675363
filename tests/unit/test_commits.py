"""The thread that commits for coroutines, and the wake-ups of those that wait for an end."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from postroom.engine.wakeups import EndWaiters
from postroom.errors import HandleDead
from postroom.stores.commit_thread import COMMIT_MAX, CommitThread
from postroom.stores.memory import MemoryStore
from postroom.stores.transaction import Transaction


class DyingStore(MemoryStore):
    """Its first commit fails like one after a failed fsync, and then it cannot be opened again."""

    dies = True

    def write_many(self, works: Sequence[Callable[[Transaction], Any]], **options: Any) -> list[Any]:
        if self.dies:
            self.dies = False
            return [HandleDead("queue.db")] * len(works)
        return super().write_many(works, **options)

    def reopen(self) -> None:
        raise OSError("the disk is gone")


def thread_of(store: MemoryStore) -> CommitThread[Callable[[Transaction], Any]]:
    return CommitThread(store, lambda works, makes_room: store.write_many(works, makes_room=makes_room))


def test_writes_go_on_after_a_store_that_could_not_be_opened_again() -> None:
    commits = thread_of(DyingStore())

    async def write() -> Any:
        async with asyncio.timeout(30):
            failed = await asyncio.gather(commits.submit(lambda _: 1), return_exceptions=True)
            return failed[0], await commits.submit(lambda _: 2)

    failed, second = asyncio.run(write())
    commits.close()
    assert isinstance(failed, HandleDead)
    assert second == 2


def test_work_of_one_round_is_committed_in_its_order_and_in_full_commits() -> None:
    done: list[int] = []
    sizes: list[int] = []

    def commit(works: list[Callable[[], None]], _makes_room: bool) -> list[Any]:
        sizes.append(len(works))
        return [work() for work in works]

    many: CommitThread[Callable[[], None]] = CommitThread(MemoryStore(), commit)

    async def write() -> None:
        await asyncio.gather(*(many.submit(partial(done.append, number)) for number in range(600)))

    asyncio.run(write())
    many.close()
    assert done == list(range(600))
    assert sizes == [COMMIT_MAX, COMMIT_MAX, 600 - 2 * COMMIT_MAX]


def test_reads_do_not_wait_for_blocking_calls_of_the_program() -> None:
    commits, opened = thread_of(MemoryStore()), threading.Event()

    async def read() -> int:
        calls = [asyncio.create_task(asyncio.to_thread(opened.wait, 60)) for _ in range(100)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(30):
                return await commits.read(lambda transaction: transaction.events.newest())
        finally:
            opened.set()
            await asyncio.gather(*calls)

    assert asyncio.run(read()) == 0
    commits.close()


def test_a_wake_up_for_a_closed_event_loop_is_not_an_error() -> None:
    waiters = EndWaiters()
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        waiters.add("m")

    loop.run_until_complete(wait())
    loop.close()
    waiters.wake(["m"])
