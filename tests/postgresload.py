"""Senders and workers of a store while something happens to its server."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable

from postroom import Tasks
from postroom.errors import StoreUnreachable, Unavailable
from postroom.stores.base import Listing
from postroom.stores.postgres.store import PostgresStore
from postroom.stores.postgres.watchdog import WaitLimits
from tests.waiting import until

SENDERS = 3
WORKERS = 2
CLAIMED = 10
MORE = 20
RECORDS_MAX = 1_000_000


class Report:
    """What a fault did to the messages."""

    def __init__(self) -> None:
        self.accepted: list[str] = []
        self.completed: Counter[str] = Counter()
        self.unsure = 0
        """Calls whose outcome is unknown, and says so."""
        self.failed = 0
        """Calls that ended with another `Unavailable`."""
        self.lost = self.duplicated = 0
        self._heals: list[float] = []
        self._times: list[float] = []

    def note(self, completed: list[str]) -> None:
        self.completed.update(completed)
        self._times.append(time.monotonic())

    def heal(self) -> None:
        """The cause of a fault is gone now."""
        self._heals.append(time.monotonic())

    def work_on(self, more: int = MORE) -> None:
        """Wait until so many further messages are completed."""
        wanted = len(self.completed) + more
        until(lambda: len(self.completed) >= wanted)

    @property
    def pause_s(self) -> float:
        """The longest time without a completed message."""
        times = sorted(self._times)
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)

    @property
    def first_after_heal_s(self) -> float:
        """How long after a heal the first message was completed; the longest of all heals."""
        return max(min(at - healed for at in self._times if at > healed) for healed in self._heals)

    def __str__(self) -> str:
        return (
            f"accepted {len(self.accepted)}, lost {self.lost}, duplicated {self.duplicated}, "
            f"unsure {self.unsure}, longest pause {self.pause_s:.2f} s, "
            f"first delivery {self.first_after_heal_s:.2f} s after the heal"
        )


def under_load(url: str, fault: Callable[[Report], object], waits: WaitLimits | None = None) -> Report:
    """Send, claim and complete while `fault` runs, then count what was acknowledged and is not there."""
    report, stopped = Report(), threading.Event()

    def run(work: Callable[[Tasks], None]) -> None:
        with Tasks(PostgresStore(url, waits=waits), durability="group") as tasks:
            while not stopped.is_set():
                try:
                    work(tasks)
                except StoreUnreachable as error:
                    report.unsure += not error.rolled_back
                    report.failed += error.rolled_back
                except Unavailable:
                    report.failed += 1

    def send(tasks: Tasks) -> None:
        report.accepted.append(tasks.enqueue(agent="a", payload={"n": 1}))

    def complete(tasks: Tasks) -> None:
        held = tasks.claim(agent="a", limit=CLAIMED, wait_s=0.1)
        if held:
            tasks.complete_many([(task.task_id, task.lease, None) for task in held])
            report.note([task.task_id for task in held])

    works = [send] * SENDERS + [complete] * WORKERS
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        report.work_on()
        fault(report)
        report.heal()
        report.work_on()
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    _count(url, report)
    return report


def _count(url: str, report: Report) -> None:
    with Tasks.open(url) as tasks:
        states = {record.message_id: record.state for record in tasks.store.find(Listing(limit=RECORDS_MAX))}
    report.lost = sum(name not in states for name in report.accepted)
    report.lost += sum(states.get(name) != "COMPLETED" for name in report.completed)
    report.duplicated = max(0, len(states) - len(set(report.accepted)) - report.unsure)
    report.duplicated += sum(times - 1 for times in report.completed.values())
