"""Waiting for a lock: a writer gets its turn although another one takes the lock again and again.

Turns are counted, not timed: how often the other writer had the lock while this one waited for it.
"""

import fcntl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from postroom import Bus, Queue
from postroom.system import lock
from tests.waiting import until

HOLD_S = lock.TURN_S + 0.002
WRITES = 20
TURNS_A_WRITE_MAX = 4  # the current turn, one that reached the gate first, and two for a busy machine


def slow_clock() -> datetime:
    """Called while the lock is held: as if the disk were slow."""
    time.sleep(HOLD_S)
    return datetime.now(UTC)


class Turns:
    """How often the busy writer had the lock."""

    taken = 0

    def has_passed(self, number: int) -> bool:
        return self.taken > number


@contextmanager
def busy(work: Callable[[], object]) -> Iterator[Turns]:
    """Repeat `work` in a tight loop, in a thread with a handle of its own."""
    turns, done = Turns(), threading.Event()

    def loop() -> None:
        while not done.is_set():
            work()
            turns.taken += 1

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield turns
    finally:
        done.set()
        thread.join()


def turns_waited(turns: Turns, write: Callable[[], object]) -> int:
    waited = 0
    for _ in range(WRITES):
        until(partial(turns.has_passed, turns.taken))
        before = turns.taken
        write()
        waited += turns.taken - before
    return waited


@pytest.mark.skipif(not hasattr(fcntl, "F_OFD_SETLK"), reason="the system has no second kind of lock")
def test_a_sender_is_not_starved_by_a_poller_in_a_tight_loop(tmp_path: Path) -> None:
    poller, sender = Queue(tmp_path, clock=slow_clock), Queue(tmp_path)
    with busy(lambda: poller.poll("ada")) as turns:
        waited = turns_waited(turns, lambda: sender.send("ask", "x", to="ada"))
    assert waited <= WRITES * TURNS_A_WRITE_MAX


@pytest.mark.skipif(not hasattr(fcntl, "F_OFD_SETLK"), reason="the system has no second kind of lock")
def test_a_writer_is_not_starved_by_another_one_in_a_tight_loop(tmp_path: Path) -> None:
    slow, quick = Bus(tmp_path / "bus.yaml", clock=slow_clock), Bus(tmp_path / "bus.yaml")
    with busy(lambda: slow.append(type="t", project_id="p")) as turns:
        waited = turns_waited(turns, lambda: quick.append(type="t", project_id="p"))
    assert waited <= WRITES * TURNS_A_WRITE_MAX


def test_a_program_that_knows_only_flock_is_excluded_and_excludes_us(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml", lock_timeout_s=0.01)
    bus.append(type="t", project_id="p")
    with bus.path.open("rb+") as foreign:
        fcntl.flock(foreign, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError):
            bus.append(type="t", project_id="p")
        fcntl.flock(foreign, fcntl.LOCK_UN)
        before = time.monotonic()
        assert lock.take_turn(foreign.fileno(), 1.0, bus.path) >= before + lock.TURN_S
        with bus.path.open("rb+") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_waiter_that_gives_up_releases_the_gate(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb+") as holder, path.open("rb+") as first, path.open("rb+") as second:
        fcntl.flock(holder, fcntl.LOCK_EX)
        for file in (first, second, first):
            with pytest.raises(TimeoutError):
                lock.take_turn(file.fileno(), 0.005, path)
        fcntl.flock(holder, fcntl.LOCK_UN)
        lock.take_turn(second.fileno(), 1.0, path)
