"""The fair lock between processes."""

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.errors import LockTimeout
from postroom.system.lock import FairLock
from tests import children
from tests.children import no_child_left
from tests.waiting import HANG_GUARD_S, until

AT_ONCE_S = 0.01
ROUNDS = 200

__all__ = ["no_child_left"]  # a fixture


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "queue.db"


@pytest.fixture
def lock(path: Path) -> Iterator[FairLock]:
    lock = FairLock(path, AT_ONCE_S)
    yield lock
    lock.forget()


@pytest.fixture
def other(path: Path) -> Iterator[FairLock]:
    other = FairLock(path, AT_ONCE_S)
    yield other
    other.forget()


def test_lock_is_exclusive(lock: FairLock, other: FairLock) -> None:
    lock.acquire()
    with pytest.raises(LockTimeout, match=r"queue\.db within"):  # no user knows the lock file
        other.acquire()
    lock.release()
    other.acquire()
    with pytest.raises(LockTimeout):
        lock.acquire()


def test_timed_out_waiter_releases_the_gate(path: Path, lock: FairLock, other: FairLock) -> None:
    lock.acquire()
    with pytest.raises(LockTimeout):
        other.acquire()
    lock.release()
    third = FairLock(path, AT_ONCE_S)
    third.acquire()
    third.forget()


def test_a_release_without_a_lock_is_harmless(lock: FairLock, other: FairLock) -> None:
    lock.release()
    lock.acquire()
    other.release()
    lock.release()
    lock.release()
    other.acquire()


def test_forget_releases_the_lock(lock: FairLock, other: FairLock) -> None:
    lock.acquire()
    lock.forget()
    other.acquire()
    lock.forget()


def is_gate_taken(path: Path) -> bool:
    with path.with_name(f"{path.name}.gate").open("rb") as gate:
        try:
            fcntl.flock(gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_only_one_process_waits_inside_the_gate(path: Path, lock: FairLock, no_child_left: None) -> None:
    """A process that returns finds the gate taken, so it cannot overtake the waiting process."""
    lock.acquire()
    waiting = children.start(lambda: FairLock(path, HANG_GUARD_S).acquire())
    back = FairLock(path, AT_ONCE_S)
    until(lambda: is_gate_taken(path))
    with pytest.raises(LockTimeout):
        back.acquire()
    lock.release()
    children.wait(waiting)
    back.acquire()
    back.forget()


def test_death_of_the_holder_releases_the_lock(path: Path, lock: FairLock, no_child_left: None) -> None:
    reader, writer = os.pipe()

    def hold_for_ever() -> None:
        FairLock(path, HANG_GUARD_S).acquire()
        os.write(writer, b"!")
        time.sleep(HANG_GUARD_S)

    holder = children.start(hold_for_ever)
    assert os.read(reader, 1) == b"!"
    with pytest.raises(LockTimeout):
        lock.acquire()
    os.kill(holder, signal.SIGKILL)
    with pytest.raises(AssertionError):
        children.wait(holder)
    lock.acquire()
    os.close(reader)
    os.close(writer)


def test_no_update_is_lost_between_processes(path: Path, no_child_left: None) -> None:
    counter = path.with_name("counter")
    counter.write_text("0")

    def count() -> None:
        lock = FairLock(path, HANG_GUARD_S)
        for _ in range(ROUNDS):
            lock.acquire()
            counter.write_text(str(int(counter.read_text()) + 1))
            lock.release()

    children.run(*[count] * 4)
    assert int(counter.read_text()) == 4 * ROUNDS
