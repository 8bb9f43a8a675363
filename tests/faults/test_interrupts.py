"""A signal handler may raise anywhere: in the middle of a commit, and right after it."""

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pytest

from postroom import Tasks
from postroom.errors import WriteFailed
from postroom.stores.sqlite.ledger import SqliteLedger
from postroom.testing import check_consistency
from tests.waiting import HANG_GUARD_S

ROUNDS = 300
WITHIN_S = 0.002  # about as long as a round takes


class Interrupted(BaseException):
    """The exception of the signal handler."""


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    with Tasks.open(f"sqlite:///{tmp_path}/queue.db") as opened:
        opened.enqueue(agent="a", payload="first")
        yield opened


def numbers(tasks: Tasks) -> list[int]:
    return [event.seq for event in tasks.events(limit=100_000)]


def test_an_interrupt_after_the_commit_reuses_no_number(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed, interrupts = SqliteLedger.committed, [Interrupted()]

    def interrupted(ledger: SqliteLedger) -> None:
        if interrupts:
            raise interrupts.pop()
        committed(ledger)

    monkeypatch.setattr(SqliteLedger, "committed", interrupted)
    with pytest.raises(Interrupted):
        tasks.enqueue_many([{"agent": "a", "payload": "cut short"}] * 3)
    last = tasks.enqueue(agent="a", payload="last")
    assert tasks.get(last).payload == "last"
    payloads = [task.payload for task in tasks.claim(agent="a", limit=10)]
    assert payloads == ["first", *["cut short"] * 3, "last"]
    assert numbers(tasks) == list(range(1, len(numbers(tasks)) + 1))
    check_consistency(tasks.store)


def test_a_lock_that_cannot_be_released_loses_no_task(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr("postroom.system.lock.flock", no_locks)
        with pytest.raises(WriteFailed, match="No locks available"):
            tasks.enqueue(agent="a", payload="refused")
    assert tasks.enqueue(agent="a", payload="last")
    assert [task.payload for task in tasks.claim(agent="a", limit=10)] == ["first", "last"]
    check_consistency(tasks.store)


@contextmanager
def interrupts(rng: random.Random) -> Iterator[None]:
    """Send one signal at a random moment; its handler raises while the block lasts."""
    armed: list[bool] = []  # until the timer has started: `Timer.start` itself cannot be interrupted safely

    def raise_it(signum: int, frame: FrameType | None) -> None:
        if armed:
            armed.clear()
            raise Interrupted

    before = signal.signal(signal.SIGUSR1, raise_it)
    main = threading.get_ident()
    timer = threading.Timer(rng.uniform(0, WITHIN_S), signal.pthread_kill, (main, signal.SIGUSR1))
    timer.start()
    try:
        armed.append(True)
        yield
    finally:
        armed.clear()
        timer.join()
        signal.signal(signal.SIGUSR1, before)


# The exception may also occur where Python cannot raise it: in the callback of a weak reference.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("others", [0, 2])
def test_interrupts_anywhere_lose_no_task_and_block_no_thread(tasks: Tasks, others: int) -> None:
    rng = random.Random(others)
    acknowledged: list[str] = []
    ending = threading.Event()

    def enqueue_beside() -> None:
        while not ending.is_set():
            with suppress(WriteFailed):  # the main thread was interrupted in the middle of our commit
                acknowledged.append(tasks.enqueue(agent="a", payload="beside"))
            ending.wait(0.001)

    threads = [threading.Thread(target=enqueue_beside) for _ in range(others)]
    for thread in threads:
        thread.start()
    hits = 0
    for _ in range(ROUNDS):
        try:
            with interrupts(rng):
                for number in range(10):
                    task_id = tasks.enqueue(agent="a", payload=number)
                    acknowledged.append(task_id)
                [task] = tasks.claim(agent="a")
                tasks.complete(task.task_id, task.lease)
        except Interrupted:
            hits += 1
    ending.set()
    for thread in threads:
        thread.join(HANG_GUARD_S)
        assert not thread.is_alive(), "a writer waits indefinitely"
    assert hits
    assert len(acknowledged) == len(set(acknowledged))
    for task_id in acknowledged:
        assert tasks.get(task_id).status in ("pending", "claimed", "completed")
    assert numbers(tasks) == list(range(1, len(numbers(tasks)) + 1))
    check_consistency(tasks.store)
