"""One file with many writers: an append is complete or absent, and a failed fsync rolls back only its own."""

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from postroom.errors import HandleDead, UnsafePath, WriteFailed
from postroom.logs.appendfile import AppendFile
from postroom.message import Durability
from postroom.system import lock
from tests.faultydisk import FaultyDisk, in_background
from tests.waiting import HANG_GUARD_S

TIMEOUT_S = 0.05


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    return FaultyDisk(monkeypatch)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[Durability], AppendFile]]:
    made: list[AppendFile] = []

    def new(durability: Durability) -> AppendFile:
        made.append(AppendFile(tmp_path / "log", durability, file_mode=0o640, folder_mode=0o750))
        return made[-1]

    yield new
    for file in made:
        file.close()


def append(file: AppendFile, data: bytes) -> int:
    """Append under the lock, as a caller does."""
    fd = file.open()
    lock.acquire(fd, TIMEOUT_S, file.path)
    try:
        return file.append(data, file.current_size())
    finally:
        if file.fd >= 0:
            lock.release(file.fd)


def settle_elsewhere(file: AppendFile, ticket: int) -> tuple[threading.Thread, list[OSError]]:
    failures: list[OSError] = []

    def settle() -> None:
        try:
            file.settle(ticket)
        except OSError as error:
            failures.append(error)

    return in_background(settle), failures


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


Make = Callable[[Durability], AppendFile]


def test_the_file_and_its_folders_are_made_with_their_modes(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "a" / "b" / "log", "os", file_mode=0o640, folder_mode=0o750)
    append(file, b"x")
    file.close()
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o750
    assert file.path.stat().st_mode & 0o777 == 0o640


def test_opening_twice_keeps_the_descriptor(make: Make) -> None:
    file = make("os")
    assert file.open() == file.open()


@pytest.mark.parametrize("durability", ["group", "fsync"])
def test_the_name_is_made_durable_also_when_another_process_made_the_file(
    make: Make, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("postroom.logs.appendfile.sync_folder", synced.append)
    file = make(durability)
    file.path.touch()
    file.open()
    assert synced == [file.path.parent]


def test_a_folder_that_cannot_be_synced_is_a_failed_write(make: Make, disk: FaultyDisk) -> None:
    file = make("fsync")
    disk.failing = disk.with_folders = True
    with pytest.raises(WriteFailed):
        file.open()
    assert file.fd < 0
    with pytest.raises(HandleDead):
        file.open()


def test_a_renamed_or_removed_file_has_no_current_size(make: Make) -> None:
    file = make("os")
    append(file, b"x")
    assert file.current_size() == 1
    os.rename(file.path, file.path.with_name("elsewhere"))
    assert file.current_size() == -1
    file.path.write_bytes(b"another")
    assert file.current_size() == -1


def test_a_symlink_in_the_files_place_is_refused(make: Make, tmp_path: Path) -> None:
    file = make("os")
    append(file, b"x")
    moved = file.path.with_name("elsewhere")
    os.rename(file.path, moved)
    file.path.symlink_to(moved)
    with pytest.raises(UnsafePath, match="is a symlink, which is refused"):
        file.current_size()
    assert moved.read_bytes() == b"x"


def test_a_short_write_is_continued(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make("os")
    append(file, b"before ")
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:3]))
    append(file, b"0123456789")
    assert file.path.read_bytes() == b"before 0123456789"


@pytest.mark.parametrize("written", [0, 4])
def test_failed_write_is_rolled_back_and_the_handle_stays_usable(
    make: Make, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make("os")
    append(file, b"before")
    real = os.write
    budget = [written]

    def full(fd: int, data: bytes) -> int:
        if budget[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(fd, bytes(data)[: budget[0]])
        budget[0] -= count
        return count

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(WriteFailed) as caught:
            append(file, b"0123456789")
    assert caught.value.rolled_back
    assert str(caught.value) == (f"could not write {file.path}: No space left on device; nothing was stored")
    assert file.path.read_bytes() == b"before"
    append(file, b" after")
    assert file.path.read_bytes() == b"before after"


def test_write_failed_reports_a_failed_rollback(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make("os")
    append(file, b"before")

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", refuse)
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(WriteFailed, match="the data may or may not be stored") as caught:
        append(file, b"x")
    assert not caught.value.rolled_back


def test_each_fsync_append_has_its_own_fsync(make: Make, disk: FaultyDisk) -> None:
    file = make("fsync")
    file.open()
    before = disk.calls
    for _ in range(3):
        append(file, b"x")
    assert disk.calls - before == 3


def test_after_a_failed_fsync_nothing_is_kept_and_the_handle_is_dead(make: Make, disk: FaultyDisk) -> None:
    file = make("fsync")
    append(file, b"durable")
    disk.failing = True
    with pytest.raises(WriteFailed, match="nothing was stored"):
        append(file, b"lost")
    assert file.path.read_bytes() == b"durable"
    disk.failing = False
    with pytest.raises(HandleDead, match=r"call reopen\(\) before writing again"):
        append(file, b"no")
    file.forget()
    append(file, b" again")
    assert file.path.read_bytes() == b"durable again"


def test_a_group_append_waits_for_its_fsync(make: Make, disk: FaultyDisk) -> None:
    file = make("group")
    ticket = append(file, b"x")
    disk.hold()
    waiter, failures = settle_elsewhere(file, ticket)
    assert disk.entered.wait(HANG_GUARD_S)
    assert waiter.is_alive()
    disk.gate.set()
    waiter.join()
    assert failures == []


def test_failed_group_fsync_rolls_back_all_waiting_appends(make: Make, disk: FaultyDisk) -> None:
    file = make("group")
    file.settle(append(file, b"durable "))
    tickets = [append(file, part) for part in (b"one ", b"two ")]
    disk.failing = True
    for ticket in tickets:
        with pytest.raises(OSError, match="Input/output"):
            file.settle(ticket)
        assert file.roll_back_group(file.fd, TIMEOUT_S)
    assert file.path.read_bytes() == b"durable "
    with pytest.raises(HandleDead):
        file.open()


def test_failed_group_fsync_keeps_appends_synced_earlier(make: Make, disk: FaultyDisk) -> None:
    """The second append comes while the first one's fsync runs, so both wait at the same time."""
    file = make("group")
    file.open()
    disk.hold()
    waiter, failures = settle_elsewhere(file, append(file, b"acknowledged "))
    assert disk.entered.wait(HANG_GUARD_S)
    late = append(file, b"late")
    disk.gate.set()
    waiter.join()
    assert failures == []
    disk.failing = True
    with pytest.raises(OSError, match="Input/output"):
        file.settle(late)
    assert file.roll_back_group(file.fd, TIMEOUT_S)
    assert file.path.read_bytes() == b"acknowledged "


@pytest.mark.parametrize("where", ["between", "behind"])
def test_failed_group_fsync_keeps_appends_of_other_processes(
    make: Make, disk: FaultyDisk, where: str
) -> None:
    file, other = make("group"), make("os")
    ticket = append(file, b"one ")
    append(other, b"other's ")
    if where == "between":
        append(file, b"two ")
    disk.failing = True
    with pytest.raises(OSError, match="Input/output"):
        file.settle(ticket)
    assert not file.roll_back_group(file.fd, TIMEOUT_S)
    assert b"other's " in file.path.read_bytes()


def test_a_roll_back_that_cannot_get_the_lock_leaves_the_file_alone(make: Make, disk: FaultyDisk) -> None:
    file, other = make("group"), make("os")
    ticket = append(file, b"one")
    lock.acquire(other.open(), TIMEOUT_S, other.path)
    disk.failing = True
    with pytest.raises(OSError, match="Input/output"):
        file.settle(ticket)
    assert not file.roll_back_group(file.fd, TIMEOUT_S)
    assert file.fd < 0
    assert file.path.read_bytes() == b"one"


def test_late_waiter_of_a_reopened_handle_gets_an_error(make: Make, disk: FaultyDisk) -> None:
    """The late waiter's record was rolled back, so an fsync after the reopening must not count for it."""
    file = make("group")
    early, late = append(file, b"early "), append(file, b"late ")
    disk.failing = True
    with pytest.raises(OSError, match="Input/output"):
        file.settle(early)
    assert file.roll_back_group(file.fd, TIMEOUT_S)
    disk.failing = False
    file.forget()
    pending = append(file, b"new life")
    with pytest.raises(OSError, match="reopened before this was synced"):
        file.settle(late)
    assert not file.roll_back_group(file.fd, TIMEOUT_S)
    file.settle(pending)
    assert file.path.read_bytes() == b"new life"


def test_closing_makes_group_appends_durable(make: Make, disk: FaultyDisk) -> None:
    file = make("group")
    ticket = append(file, b"x")
    before = disk.calls
    file.close()
    assert disk.calls == before + 1
    file.settle(ticket)
    assert disk.calls == before + 1


def test_failure_while_closing_is_raised_in_waiting_threads(make: Make, disk: FaultyDisk) -> None:
    file = make("group")
    ticket = append(file, b"x")
    disk.failing = True
    file.close()
    with pytest.raises(OSError, match="Input/output"):
        file.settle(ticket)
    assert not file.roll_back_group(file.fd, TIMEOUT_S)


def test_garbage_collected_handle_closes_its_descriptor(tmp_path: Path) -> None:
    gc.collect()
    before = open_descriptors()
    for _ in range(20):
        append(AppendFile(tmp_path / "log", "os", file_mode=0o600, folder_mode=0o700), b"x")
    gc.collect()
    assert open_descriptors() == before


def test_a_missing_parent_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = AppendFile(tmp_path / "file" / "log", "os", file_mode=0o600, folder_mode=0o700)
    with pytest.raises(OSError, match="Not a directory"):
        file.open()
