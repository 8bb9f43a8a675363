"""The file lock: exclusive, with a timeout, bound to the open file, released when its holder dies."""

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.errors import LockTimeout, Unavailable
from postroom.system import lock

AT_ONCE_S = 0.01
NO_DESCRIPTOR = 1_000_000

HOLDER = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    return path


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


@pytest.fixture
def other_fd(path: Path) -> Iterator[int]:
    other = os.open(path, os.O_RDWR)
    yield other
    os.close(other)


def test_a_second_open_file_is_kept_out_until_the_release(fd: int, other_fd: int, path: Path) -> None:
    lock.acquire(fd, AT_ONCE_S, path)
    with pytest.raises(LockTimeout):
        lock.acquire(other_fd, AT_ONCE_S, path)
    lock.release(fd)
    lock.acquire(other_fd, AT_ONCE_S, path)


def test_the_timeout_names_the_file_and_the_time(fd: int, other_fd: int, path: Path) -> None:
    lock.acquire(fd, AT_ONCE_S, path)
    with pytest.raises(LockTimeout) as caught:
        lock.acquire(other_fd, 0.25, path)
    assert str(caught.value) == f"could not lock {path} within 0.25 s: another process holds it"
    assert (caught.value.path, caught.value.timeout_s) == (path, 0.25)
    assert isinstance(caught.value, Unavailable)
    assert isinstance(caught.value, TimeoutError)


def test_a_waiter_gets_the_lock_when_it_is_released(fd: int, other_fd: int, path: Path) -> None:
    lock.acquire(fd, AT_ONCE_S, path)
    waiter = threading.Thread(target=lock.acquire, args=(other_fd, 60.0, path))
    waiter.start()
    lock.release(fd)
    waiter.join()
    with pytest.raises(LockTimeout):
        lock.acquire(fd, AT_ONCE_S, path)


def test_releasing_an_unheld_lock_is_harmless(fd: int, other_fd: int, path: Path) -> None:
    lock.acquire(fd, AT_ONCE_S, path)
    lock.release(other_fd)
    with pytest.raises(LockTimeout):
        lock.acquire(other_fd, AT_ONCE_S, path)


def test_closing_another_descriptor_of_the_file_does_not_release(fd: int, other_fd: int, path: Path) -> None:
    """The trap of POSIX record locks, which flock does not have."""
    lock.acquire(fd, AT_ONCE_S, path)
    os.close(os.open(path, os.O_RDONLY))
    with pytest.raises(LockTimeout):
        lock.acquire(other_fd, AT_ONCE_S, path)


def test_a_plain_flock_of_another_program_excludes_and_its_death_releases(fd: int, path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(LockTimeout):
            lock.acquire(fd, AT_ONCE_S, path)
        holder.kill()
        lock.acquire(fd, 60.0, path)


def test_the_settled_size_is_known_only_without_an_active_writer(fd: int, other_fd: int, path: Path) -> None:
    assert lock.size_at_rest(other_fd) == 5
    lock.acquire(fd, AT_ONCE_S, path)
    assert lock.size_at_rest(other_fd) is None
    lock.release(fd)
    assert lock.size_at_rest(other_fd) == 5
    lock.acquire(fd, AT_ONCE_S, path)  # reading the size did not keep the lock


def test_two_readers_may_look_at_the_same_time(fd: int, other_fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert lock.size_at_rest(other_fd) == 5


def test_other_errors_are_not_taken_for_a_held_lock(path: Path) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        lock.acquire(NO_DESCRIPTOR, AT_ONCE_S, path)


def test_alone_holds_the_lock_or_raises_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "new"
    with (
        lock.alone(path, "mine"),
        pytest.raises(Unavailable, match=rf"yours is busy \(process {os.getpid()}\)"),
        lock.alone(path, "yours is busy"),
    ):
        raise AssertionError("two of them")
    with lock.alone(path, "it is free again"):
        assert path.exists()
    with pytest.raises(NotADirectoryError) as caught, lock.alone(path / "up.lock", "busy"):
        raise AssertionError("in a folder that is a file")
    assert caught.value.filename == str(path)  # no user knows the lock file
