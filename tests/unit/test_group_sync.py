"""Group commit: one fsync for many waiters, no early return, and a final failure."""

import threading
from collections.abc import Callable

import pytest

from postroom.logs.appendfile import GroupSync


class Disk:
    """An fsync that can be blocked and made to fail, and that records what it covered."""

    def __init__(self) -> None:
        self.written = 0
        self.on_disk = 0
        self.runs = 0
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.failure: BaseException | None = None

    def sync(self) -> None:
        written = self.written
        self.runs += 1
        self.entered.set()
        self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.on_disk = written


def started(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target)
    thread.start()
    return thread


def test_wait_returns_after_an_fsync_that_began_after_the_write() -> None:
    group, disk = GroupSync(), Disk()

    def write(times: int) -> None:
        for _ in range(times):
            with mutex:
                disk.written += 1
                mine = disk.written
                ticket = group.ticket()
            group.wait(ticket, disk.sync)
            if disk.on_disk < mine:
                early.append(mine)

    early: list[int] = []
    mutex = threading.Lock()
    threads = [started(lambda: write(100)) for _ in range(8)]
    for thread in threads:
        thread.join()
    assert early == []
    assert disk.runs <= 800


def test_concurrent_waiters_share_one_fsync() -> None:
    group, disk = GroupSync(), Disk()
    disk.gate.clear()
    first = group.ticket()
    leader = started(lambda: group.wait(first, disk.sync))
    disk.entered.wait()
    late = [group.ticket() for _ in range(10)]
    waiters = [started(lambda ticket=ticket: group.wait(ticket, disk.sync)) for ticket in late]  # type: ignore[misc]
    disk.gate.set()
    for thread in [leader, *waiters]:
        thread.join()
    assert disk.runs == 2, "one for the first, and one for all who came while it ran"
    assert all(group.covers(ticket) for ticket in late)


def test_a_ticket_written_while_an_fsync_runs_is_not_covered_by_it() -> None:
    group, disk = GroupSync(), Disk()
    disk.gate.clear()
    first = group.ticket()
    leader = started(lambda: group.wait(first, disk.sync))
    disk.entered.wait()
    late = group.ticket()
    disk.gate.set()
    leader.join()
    assert group.covers(first)
    assert not group.covers(late)


def test_sync_failure_is_final_for_all_waiters() -> None:
    group, disk = GroupSync(), Disk()
    disk.failure = OSError(5, "Input/output error")
    with pytest.raises(OSError, match="Input/output"):
        group.wait(group.ticket(), disk.sync)
    disk.failure = None
    with pytest.raises(OSError, match="Input/output"):
        group.wait(group.ticket(), disk.sync)
    assert disk.runs == 1, "a second fsync would prove nothing"


def test_tickets_covered_before_a_failure_succeed() -> None:
    group, disk = GroupSync(), Disk()
    covered = group.ticket()
    group.wait(covered, disk.sync)
    disk.failure = OSError(5, "Input/output error")
    with pytest.raises(OSError, match="Input/output"):
        group.wait(group.ticket(), disk.sync)
    group.wait(covered, disk.sync)


def test_an_interrupted_fsync_covers_nothing_and_the_next_waiter_tries() -> None:
    group, disk = GroupSync(), Disk()
    disk.failure = KeyboardInterrupt()
    ticket = group.ticket()
    with pytest.raises(KeyboardInterrupt):
        group.wait(ticket, disk.sync)
    assert not group.covers(ticket)
    disk.failure = None
    group.wait(ticket, disk.sync)
    assert disk.runs == 2


def test_flush_syncs_pending_tickets_only() -> None:
    group, disk = GroupSync(), Disk()
    group.flush(disk.sync)
    assert disk.runs == 0
    ticket = group.ticket()
    group.flush(disk.sync)
    assert group.covers(ticket)


def test_replacement_group_continues_the_ticket_numbers() -> None:
    old = GroupSync()
    late = [old.ticket() for _ in range(3)][-1]
    new = GroupSync(old.next_ticket)
    assert late < new.first_ticket == new.ticket()
