"""The programs around a task queue that get killed or stopped: they report after each call has returned.

producer    `TOKEN ID` for every accepted task
consumer    `claimed ID LEASE TOKEN`, then `completed ID LEASE` or `stale ID LEASE`
harness     `executed DECISION PARENT LEASE`, then `settled DECISION PARENT LEASE` or `stale ...`
holder      `holds ID LEASE`, then a line for every call after it was stopped and continued
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from postroom import StaleLease, Tasks
from postroom.calls.fields import RETRIES_MAX
from postroom.contracts.tasks.task_operations import TaskFields
from postroom.contracts.tasks.tasks import DECISIONS, LeasedTask
from postroom.core.lifecycle.retry import RetryPolicy
from postroom.message import Durability
from postroom.stores.sqlite.checkpoints import CheckpointLimits
from postroom.stores.sqlite.store import SqliteStore
from tests.crash.child import _in_threads, _size
from tests.crash.ledger import body_of, token_of
from tests.crash.workers import Report

WAIT_S = 0.2  # wait for a task to claim; a lost wake-up costs no more
HEARTBEAT_CHANCE = 0.2
RELEASE_CHANCE = 0.05
FAIL_CHANCE = 0.05
DAWDLE_CHANCE = 0.02
FOUND_MAX = 100
US_PER_S = 1_000_000
FOR_EVER = RetryPolicy(max_retries=RETRIES_MAX)
"""Killed holders count as failures, which must not make any task a dead letter."""
USUAL = CheckpointLimits()
WAL_PAGES_FEW = (5, 200, USUAL.wal_pages)
"""Some rounds have checkpoints all the time, some occasionally, some hardly any."""


def open_tasks(folder: str | Path, *, wal_pages: int = USUAL.wal_pages, **options: Any) -> Tasks:
    """Few `wal_pages` make checkpoints so frequent that crashes hit them."""
    # One page: in every commit and without a thread, so that the order of system calls is fixed.
    most = 1 if wal_pages == 1 else USUAL.wal_pages_max
    limits = CheckpointLimits(
        wal_pages=wal_pages, wal_pages_max=most, look_events=min(wal_pages, USUAL.look_events)
    )
    return Tasks(SqliteStore(Path(folder, "queue.db"), checkpoints=limits), retry=FOR_EVER, **options)


def task_of(token: str, agent: str) -> TaskFields:
    """The keywords of an enqueue whose payload can be checked."""
    return {"agent": agent, "payload": {"token": token, "body": body_of(token)}}


def producer(
    report: Report,
    *,
    folder: str,
    agent: str,
    name: str,
    seed: int,
    first: int = 0,
    sizes: tuple[int, int] = (0, 400),
    batch: int = 1,
    pause_s: float = 0.0,
    wal_pages: int = USUAL.wal_pages,
    durability: Durability = "os",
    threads: int = 1,
    early: bool = False,
    timed: bool = False,
) -> None:
    """Enqueue forever, from number `first` on. The key prevents a duplicate after a kill."""
    tasks = open_tasks(folder, durability=durability, wal_pages=wal_pages)

    def produce(thread: int) -> None:
        rng = Random(seed * 1000 + thread)
        number = first
        while True:
            count = rng.randint(1, batch)
            tokens = [_token(f"{name}-{thread}", number + i, sizes) for i in range(count)]
            number += count
            if early:
                report(lines=[f"{token} early" for token in tokens])
                time.sleep(0.01)
            wanted: list[TaskFields] = [
                {**task_of(token, agent), "idempotency_key": token} for token in tokens
            ]
            begun = time.perf_counter()
            ids = tasks.enqueue_many(wanted) if count > 1 else [tasks.enqueue(**wanted[0])]
            took = f" {round((time.perf_counter() - begun) * US_PER_S)}" if timed else ""
            if not early:
                report(lines=[f"{token} {each}{took}" for token, each in zip(tokens, ids, strict=True)])
            if pause_s:
                time.sleep(pause_s)

    _in_threads(produce, threads)


def _token(writer: str, number: int, sizes: tuple[int, int]) -> str:
    """The same payload for the same number, also in another process."""
    return token_of(writer, number, _size(Random(f"{writer}.{number}"), sizes))


def consumer(
    report: Report,
    *,
    folder: str,
    agent: str,
    name: str,
    seed: int,
    lease_s: float = 300.0,
    batch: int = 1,
    wal_pages: int = USUAL.wal_pages,
    wayward: bool = False,
    early: bool = False,
    timed: bool = False,
) -> None:
    """Claim and complete forever. A `wayward` consumer also renews, fails, releases and exceeds leases."""
    tasks = open_tasks(folder, wal_pages=wal_pages)
    rng = Random(seed)
    while True:
        begun = time.perf_counter()
        limit = rng.randint(1, batch)
        claimed = tasks.claim(agent=agent, limit=limit, lease_s=lease_s, worker=name)
        took = f" {round((time.perf_counter() - begun) * US_PER_S)}" if timed else ""
        if not claimed:
            claimed = tasks.claim(agent=agent, limit=limit, lease_s=lease_s, wait_s=WAIT_S, worker=name)
        report_claims(report, claimed, took)
        for task in claimed:
            if early:
                report("completed", task.task_id, task.lease)
                time.sleep(0.01)
            word = _wayward_word(rng) if wayward else "complete"
            if wayward and rng.random() < DAWDLE_CHANCE:
                time.sleep(lease_s * 1.5)
            _speak(report, tasks, task, word, timed=timed)


def report_claims(report: Report, claimed: list[LeasedTask], took: str = "") -> None:
    for task in claimed:
        payload = task.payload
        whole = isinstance(payload, dict) and payload["body"] == body_of(payload["token"])
        report("claimed", task.task_id, task.lease, payload["token"] if whole else "TORN", took)


def _wayward_word(rng: Random) -> str:
    chance = rng.random()
    if chance < FAIL_CHANCE:
        return "fail"
    if chance < FAIL_CHANCE + RELEASE_CHANCE:
        return "release"
    return "heartbeat" if chance < FAIL_CHANCE + RELEASE_CHANCE + HEARTBEAT_CHANCE else "complete"


def _speak(report: Report, tasks: Tasks, task: LeasedTask, word: str, *, timed: bool) -> None:
    begun = time.perf_counter()
    try:
        if word == "heartbeat":
            tasks.heartbeat(task.task_id, task.lease)
            word = "complete"
        WORDS[word](tasks, task.task_id, task.lease)
    except StaleLease:
        report("stale", task.task_id, task.lease)
        return
    took = round((time.perf_counter() - begun) * US_PER_S) if timed else ""
    report("completed" if word == "complete" else word, task.task_id, task.lease, took)


WORDS: dict[str, Callable[[Tasks, str, int], object]] = {
    "heartbeat": lambda tasks, task_id, lease: tasks.heartbeat(task_id, lease),
    "complete": lambda tasks, task_id, lease: tasks.complete(task_id, lease, {"under": lease}),
    "fail": lambda tasks, task_id, lease: tasks.fail(task_id, lease, "it was not to be", retry_in_s=0.0),
    "release": lambda tasks, task_id, lease: tasks.release(task_id, lease),
}
"""The calls of a holder; a result names the lease under which it was reported."""


def harness(report: Report, *, folder: str, agent: str, lease_s: float, wal_pages: int) -> None:
    """Turn results into decisions and execute them, forever."""
    tasks = open_tasks(folder, wal_pages=wal_pages)
    while True:
        drain(report, tasks, agent, lease_s)


def drain(report: Report, tasks: Tasks, agent: str, lease_s: float) -> None:
    """One round of a harness: first the effect, then the report."""
    for line in tasks.find(agent=agent, state="COMPLETED", limit=FOUND_MAX):
        tasks.open_decision(line.task_id)
    for decision in tasks.claim(agent=DECISIONS, limit=FOUND_MAX, lease_s=lease_s):
        report("executed", decision.task_id, decision.parent, decision.lease, decision.payload["under"])
        try:
            tasks.settle(decision)
        except StaleLease:
            report("stale", decision.task_id, decision.parent, decision.lease)
        else:
            report("settled", decision.task_id, decision.parent, decision.lease)


def holder(report: Report, *, folder: str, agent: str, name: str, seed: int, lease_s: float) -> None:
    """Claim, work until stopped and continued, and then make every call of a holder."""
    tasks = open_tasks(folder)
    rng = Random(seed)
    continued: list[int] = []
    signal.signal(signal.SIGCONT, lambda number, _: continued.append(number))
    while True:
        for task in tasks.claim(agent=agent, lease_s=lease_s, worker=name, wait_s=WAIT_S):
            continued.clear()
            report("holds", task.task_id, task.lease)
            while not continued:
                time.sleep(0.001)
            words = sorted(WORDS, key=lambda _: rng.random())
            report("said", task.task_id, task.lease, *(_refused(tasks, task, word) for word in words))


def _refused(tasks: Tasks, task: LeasedTask, word: str) -> str:
    try:
        WORDS[word](tasks, task.task_id, task.lease)
    except StaleLease:
        return f"{word}:refused"
    return f"{word}:accepted"
