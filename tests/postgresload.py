"""Senders and workers of a store while something happens to its server."""

import threading
import time
from collections.abc import Callable

from postroom import Tasks
from postroom.errors import StoreUnreachable, Unavailable
from postroom.stores.base import Listing

SENDERS = 3
WORKERS = 2
BEFORE_S = 0.6
AFTER_S = 1.0
CLAIMED = 10
RECORDS_MAX = 1_000_000


class Report:
    """What a fault did to the messages."""

    def __init__(self) -> None:
        self.accepted: list[str] = []
        self.completed: list[str] = []
        self.pauses: list[float] = [0.0]
        self.unsure = 0
        """Calls whose outcome is unknown, and says so."""
        self.lost = self.duplicated = 0

    def __str__(self) -> str:
        return (
            f"accepted {len(self.accepted)}, completed {len(self.completed)}, lost {self.lost}, "
            f"duplicated {self.duplicated}, unsure {self.unsure}, longest pause {max(self.pauses):.2f} s"
        )


def under_load(url: str, fault: Callable[[], object], after_s: float = AFTER_S) -> Report:
    """Send, claim and complete while `fault` runs, then count what was acknowledged and is not there."""
    report, stopped = Report(), threading.Event()

    def run(work: Callable[[Tasks], None]) -> None:
        with Tasks.open(url, durability="group") as tasks:
            while not stopped.is_set():
                began = time.monotonic()
                try:
                    work(tasks)
                except StoreUnreachable as error:
                    report.unsure += not error.rolled_back
                except Unavailable:
                    pass
                report.pauses.append(time.monotonic() - began)

    def send(tasks: Tasks) -> None:
        report.accepted.append(tasks.enqueue(agent="a", payload={"n": 1}))

    def complete(tasks: Tasks) -> None:
        held = tasks.claim(agent="a", limit=CLAIMED)
        tasks.complete_many([(task.task_id, task.lease, None) for task in held])
        report.completed.extend(task.task_id for task in held)

    works = [send] * SENDERS + [complete] * WORKERS
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    time.sleep(BEFORE_S)
    fault()
    time.sleep(after_s)
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
