"""The thread that commits for coroutines, and the wake-ups of those that wait for an end."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from postroom.engine.wakeups import EndWaiters
from postroom.errors import HandleDead
from postroom.stores.commit_thread import CommitThread
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


def test_writes_go_on_after_a_store_that_could_not_be_opened_again() -> None:
    commits = CommitThread(DyingStore())

    async def write() -> Any:
        async with asyncio.timeout(30):
            [failed, *_] = await asyncio.gather(commits.write(lambda _: 1), return_exceptions=True)
            return failed, await commits.write(lambda _: 2)

    failed, second = asyncio.run(write())
    commits.close()
    assert isinstance(failed, HandleDead)
    assert second == 2


def test_reads_do_not_wait_for_blocking_calls_of_the_program() -> None:
    commits, opened = CommitThread(MemoryStore()), threading.Event()

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
